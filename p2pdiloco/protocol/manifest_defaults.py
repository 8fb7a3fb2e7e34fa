"""Settings of a run that its founder left out, and that follow from its size. They are put into the manifest when it is
founded; a manifest without them is of a release that had the ``OLD`` ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final, Literal

import msgspec
from msgspec import UNSET

from p2pdiloco.protocol.manifest import (
    InnerConfig,
    ModelConfig,
    MomentumType,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
)

OLD_LOG_LENGTH: Final = 32
OLD_HEARTBEAT_S: Final = 1.0
OLD_MOMENTUM_TYPE: Final = "float32"
LONG_MOMENTUM: Final = 0.99
"""Beyond it what bfloat16 rounds off, which goes to the parameters at once (``codec/outer_optimizer.py``), is more than
a fifth of a step."""
LOG_STEPS: Final = 768
"""Steps of a fork that heals without loss: at any H as many as 32 versions have at the default H of 24."""
MOST_LOGGED: Final = 1 << 18
"""Commits in all logs of a peer: about 1 kB each."""


PARTS: Final = {
    "inner": ("optimizer", "decay_share"),
    "schedule": ("heartbeat_s", "log_length"),
    "outer": ("bias_correction", "momentum_type"),
}
"""The settings that are filled in."""
ENOUGH_TURNS: Final = 40
"""Turns of a fragment in a run, below which its founder is warned, and the outer momentum's bias is corrected;
docs/results.md has the figures."""
SHORT_TURNS: Final = 80
"""Of a run of a larger model that would have fewer than ``ENOUGH_TURNS``."""
USUAL_TURN: Final = ScheduleConfig().sync_every
SHORTEST_TURN: Final = 6
"""Steps, where traffic does not matter: with turns so frequent the plain mean of the learners ends lower than RDA with
momentum every 24 steps, whatever the number of steps and of learners (benchmarks/quality/README.md)."""
SMALL: Final = 1 << 23
"""Parameters of a model for which traffic does not matter: with 4 bits every 6 steps a peer says and hears about 0.14
bytes a parameter and step each, here 1.2 MB."""
RATE_AT_ONE: Final = 0.1
"""Muon's inner rate times the root of the width: of what was run, data parallel ends lowest with 0.016 at width 48,
0.008 at 96 (0.016 is 0.8 % worse), three learners with 0.004, the highest tried, at 128
(benchmarks/quality/README.md)."""
LARGEST_RATE: Final = 0.016
DECAY_SHARE: Final = 0.2
"""Of a budget of tokens, at its end: the rate falls."""
LINE_SHARE: Final = 0.95
"""Of a run of steps: the rate falls in a line from the warm-up on, and not as a cosine, as in releases before
(benchmarks/quality/README.md has both)."""
SPARE_STEPS: Final = 2
"""Times the steps that one learner alone needs for the budget: what is lost is trained again."""
LARGEST_GAIN: Final = 2.0
"""Largest rate / (1 - momentum) for which momentum's bias is corrected: the first turn's merge alone goes so far, with
nothing to average it with."""


def is_bias_corrected(outer: OuterConfig, turns: int) -> bool:
    """Whether the outer momentum of a new run of so many turns is: where the first ones are much of it, and go no
    farther than they should. (Of 80 turns it costs 0.1 to 0.3 % of the loss: docs/results.md.)"""
    return turns < ENOUGH_TURNS and outer.learning_rate / (1.0 - outer.momentum) <= LARGEST_GAIN


def in_turns(config: RunConfig, said: Collection[str], said_outer: Collection[str] = ()) -> RunConfig:
    """``config`` with the H that its founder left out, and the P, if that is left out, too; ``said``: which keys of the
    schedule were written, ``said_outer``: of the outer optimizer. With a ``SMALL`` model in so few fragments
    ``SHORTEST_TURN`` steps, if exchanges take half of it at most; else 24, or where that makes fewer than
    ``ENOUGH_TURNS``, so many fewer that there are ``SHORT_TURNS``; a multiple of P and never less than
    ``SHORTEST_TURN``. Where it is fewer than 24 and nothing of the outer optimizer is written, the plain mean at rate 1
    without momentum."""
    schedule, outer, steps = config.schedule, config.outer, config.inner.steps
    if "sync_every" in said:
        return config
    is_short = config.inner.tokens is UNSET and steps < ENOUGH_TURNS * USUAL_TURN
    least = max(SHORTEST_TURN, schedule.overlap + 1)
    fragments = schedule.fragments if "fragments" in said else 0
    if max(fragments, 2 * schedule.overlap) <= SHORTEST_TURN and _parameters(config.model) <= SMALL:
        wanted = SHORTEST_TURN
    else:
        wanted = max(least, steps // SHORT_TURNS) if is_short else USUAL_TURN
    fragments = fragments or wanted
    sync_every = max(-(-least // fragments), wanted // fragments) * fragments
    if max(wanted, sync_every) < USUAL_TURN and not said_outer:
        outer = msgspec.structs.replace(outer, merge="direct", learning_rate=1.0, momentum=0.0)
    return msgspec.structs.replace(
        config, outer=outer, schedule=msgspec.structs.replace(schedule, fragments=fragments, sync_every=sync_every)
    )


def with_usual_rate(config: RunConfig, said: Collection[str]) -> RunConfig:
    """``config`` with the inner rate that its founder left out, where it is known what is near the best: Muon's, of a
    ``SMALL`` built-in model, falls with the root of the width. ``said``: which keys of the inner optimizer were
    written."""
    inner, model = config.inner, config.model
    if "learning_rate" in said or inner.optimizer == "adamw" or _parameters(model) > SMALL:
        return config
    rate = round(min(LARGEST_RATE, RATE_AT_ONE / model.width**0.5), 4)
    return msgspec.structs.replace(config, inner=msgspec.structs.replace(inner, learning_rate=rate))


def _parameters(model: ModelConfig) -> float:
    """About how many a built-in transformer has; others are taken for large."""
    if model.kind != "transformer":
        return math.inf
    return 12 * model.depth * model.width**2 + 2 * model.vocabulary * model.width


def most_logged(shards: int) -> int:
    """The largest log length for which all logs together have room."""
    return max(OLD_LOG_LENGTH, MOST_LOGGED // shards)


def log_length(sync_every: int, shards: int) -> int:
    """Versions that are logged of a shard: what ``LOG_STEPS`` steps make, as far as there is room."""
    return max(OLD_LOG_LENGTH, min(-(-LOG_STEPS // sync_every), most_logged(shards)))


def completed(config: RunConfig, shards: int) -> RunConfig:
    """``config`` as it is founded: nothing is left out."""
    schedule, inner = config.schedule, config.inner
    if inner.optimizer is UNSET:
        inner = msgspec.structs.replace(inner, optimizer=inner_optimizer(config.model))
    if inner.decay_share is UNSET:
        share = LINE_SHARE if inner.tokens is UNSET else DECAY_SHARE
        inner = msgspec.structs.replace(inner, decay_share=share)
    if inner.tokens is not UNSET:
        alone = -(-inner.tokens // (inner.batch * config.model.context))
        inner = msgspec.structs.replace(inner, steps=SPARE_STEPS * alone)
    filled = msgspec.structs.replace(
        schedule,
        heartbeat_s=heartbeat_s(schedule),
        log_length=log_length(schedule.sync_every, shards) if schedule.log_length is UNSET else schedule.log_length,
    )
    outer = config.outer
    if outer.bias_correction is UNSET:
        outer = msgspec.structs.replace(
            outer, bias_correction=is_bias_corrected(outer, inner.steps // schedule.sync_every)
        )
    if outer.momentum_type is UNSET:
        kept: MomentumType = "bfloat16" if outer.momentum <= LONG_MOMENTUM else "float32"
        outer = msgspec.structs.replace(outer, momentum_type=kept)
    return msgspec.structs.replace(config, inner=inner, schedule=filled, outer=outer)


def without_left_out(config: RunConfig, written: RunConfig) -> RunConfig:
    """A run's ``config`` without what its founder left out in ``written``."""
    parts = {}
    for name in ("inner", "schedule", "outer"):
        left: dict[str, object] = {
            field: UNSET for field in PARTS[name] if getattr(getattr(written, name), field) is UNSET
        }
        if name == "inner" and written.inner.tokens is not UNSET:
            left["steps"] = written.inner.steps
        parts[name] = msgspec.structs.replace(getattr(config, name), **left)
    return msgspec.structs.replace(config, **parts)


def inner_optimizer(model: ModelConfig) -> Literal["adamw", "muon"]:
    """A new run's: Muon where a built-in learner trains whole matrices; adapters' were not measured."""
    return "muon" if model.kind != "external" and model.lora is None else "adamw"


def few_turns(config: RunConfig) -> str:
    """What to tell a founder whose run has few turns, and what would do; empty if it has enough."""
    inner, schedule = config.inner, config.schedule
    turns = inner.steps // schedule.sync_every
    if turns >= ENOUGH_TURNS or inner.tokens is not UNSET:  # then it depends on how many come
        return ""
    shorter = inner.steps // ENOUGH_TURNS // schedule.fragments * schedule.fragments
    remedy = f"schedule.sync_every = {shorter} or " if shorter > schedule.overlap else ""
    return (
        f"a run of {inner.steps} steps has {turns} turns of {schedule.sync_every} steps, and learns less than one of "
        f"{ENOUGH_TURNS} would: {remedy}inner.steps = {ENOUGH_TURNS * schedule.sync_every} has as many"
    )


def momentum_type(outer: OuterConfig) -> MomentumType:
    """A run's, whichever release has founded it."""
    return OLD_MOMENTUM_TYPE if outer.momentum_type is UNSET else outer.momentum_type


def budget(inner: InnerConfig) -> int:
    """A run's tokens; 0: it ends by steps."""
    return 0 if inner.tokens is UNSET else inner.tokens


def heartbeat_s(schedule: ScheduleConfig) -> float:
    """A run's, whichever release has founded it."""
    return OLD_HEARTBEAT_S if schedule.heartbeat_s is UNSET else schedule.heartbeat_s


def logged(schedule: ScheduleConfig) -> int:
    """The log length of a run, whichever release has founded it."""
    return OLD_LOG_LENGTH if schedule.log_length is UNSET else schedule.log_length
