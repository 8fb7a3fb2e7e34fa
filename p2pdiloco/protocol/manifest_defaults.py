"""Default settings that depend on the size of a run. They are written into the manifest when the run is created."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final, Literal

import msgspec
from msgspec import UNSET

from p2pdiloco.protocol.config import LONGEST_RUN, MOST_BUDGET, RunEnd
from p2pdiloco.protocol.manifest import (
    InnerConfig,
    ModelConfig,
    MomentumType,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
)

LEAST_LOGGED: Final = 32
"""Least log length that is filled in."""
LONG_MOMENTUM: Final = 0.99
"""Largest outer momentum that is kept in bfloat16. Above it, the rounding error of bfloat16, which is applied to the
parameters at once (``codec/outer_optimizer.py``), exceeds a fifth of a step."""
LOG_STEPS: Final = 768
"""Length of a fork, in steps, that heals without loss: 32 versions at the default H of 24."""
MOST_LOGGED: Final = 1 << 18
"""Maximum number of commits in all logs of a peer; a commit takes about 1 kB."""


PARTS: Final = {
    "inner": ("optimizer", "decay_share"),
    "schedule": ("log_length",),
    "outer": ("bias_correction", "momentum_type"),
}
"""Settings that are filled in, by table."""
ENOUGH_ROUNDS: Final = 40
"""Rounds of a fragment in a run. With fewer, the founder is warned, and the bias of the outer momentum is corrected."""
WANTED_ROUNDS: Final = {"muon": 160, "adamw": 80}
"""Rounds of a fragment for which H is shortened, by inner optimizer. What learners lose by training apart falls with
the steps of the run, so a short one needs to exchange often. With AdamW less is gained by it."""
SEVERAL: Final = 8
"""Learners that share a budget of tokens, for an estimate of the run's steps."""
LONGEST_ROUND: Final = ScheduleConfig().sync_every
"""The usual H in steps, with RDA."""
SHORTEST_ROUND: Final = 3
"""The least H in steps. The mean every two steps gains little more."""
PLAIN_ROUND: Final = 8
"""Largest H in steps for which Muon's learners take the plain mean. Above, it needs an outer momentum."""
FREE_PARAMETERS: Final = 1_400_000
"""Parameters per step of H for which traffic does not matter: with int4, a peer sends, and receives, about 1.2 MB per
step."""
LARGEST_MEASURED: Final = 2.8e6
"""Parameters of the largest model whose loss was compared with data parallel."""
SMALL: Final = 1 << 23
"""Maximum size of a model whose inner rate is known, in parameters."""
ADAPTERS: Final = 0.125
"""Maximum share of a model's parameters that counts as adapters, for which traffic does not matter either: with rounds
eight times as frequent they send no more than the whole model would with the usual ones."""
RATE_AT_ONE: Final = 0.1
"""Muon's learning rate times the square root of the width. Best measured rates: with data parallelism 0.016 at width 48
and 0.008 at 96 (0.016 is 0.8 % worse); with three learners 0.004, the highest tried, at 128."""
LARGEST_RATE: Final = 0.016
WARMUP_SHARE: Final = 0.3
"""Share of a run of AdamW from scratch for its warm-up. Several learners can then use the rate that is best for one
machine, and lose half as much (``python -m benchmarks.quality run long-warmups``)."""
DECAY_SHARE: Final = 0.2
"""Share of a token budget, at its end, over which the learning rate falls."""
LINE_SHARE: Final = 0.95
"""Share of a run of steps over which the learning rate falls linearly, from the warm-up on."""
SPARE_STEPS: Final = 2
"""Multiple of the steps that one learner alone needs for a token budget: lost work is trained again."""
LARGEST_GAIN: Final = 2.0
"""Largest rate / (1 - momentum) with bias correction: the first round goes that far by itself, with nothing to average
it with."""


def is_bias_corrected(outer: OuterConfig, rounds: int) -> bool:
    """Return whether a new run of so many rounds corrects the bias of the outer momentum: if the first rounds are a
    large part of the run, and correction does not make them go too far. (With 80 rounds it costs 0.1 to 0.3 % of the
    loss.)"""
    return rounds < ENOUGH_ROUNDS and outer.learning_rate / (1.0 - outer.momentum) <= LARGEST_GAIN


def in_rounds(
    config: RunConfig,
    said: Collection[str],
    said_outer: Collection[str] = (),
    *,
    parameters: float | None = None,
    share: float | None = None,
    tensors: int | None = None,
) -> RunConfig:
    """Return ``config`` with H (``sync_every``) filled in if it was left out, and P (``fragments``) likewise.

    H is between ``SHORTEST_ROUND`` and ``LONGEST_ROUND`` steps: as short as traffic allows (adapters, and models by
    ``FREE_PARAMETERS``), or as a run of this length needs (``WANTED_ROUNDS``). It is at least P, and twice the overlap
    less one, and a multiple of P.

    If H is below ``LONGEST_ROUND`` and nothing of the outer optimizer is written, the mean is filled in: with rate 1
    and no momentum, or with Muon above ``PLAIN_ROUND`` with rate 0.7 and momentum 0.6. With AdamW RDA loses less than
    rare means, so an H from 12 on becomes ``LONGEST_ROUND``.

    Args:
        said: keys that the founder wrote in the schedule.
        said_outer: keys that the founder wrote in the outer optimizer.
        parameters: number of parameters that are exchanged; None: estimate it, for a built-in model.
        share: how much of the model is exchanged, 0 to 1; None: adapters, if the configuration has them, else all.
        tensors: number of the model's tensors, which P must not exceed; None: it has enough.
    """
    schedule, outer = config.schedule, config.outer
    if "sync_every" in said:
        return config
    has_adapters = config.model.lora is not None if share is None else share <= ADAPTERS
    parameters = _parameters(config.model) if parameters is None else parameters
    needed = _planned_steps(config) // WANTED_ROUNDS[_optimizer(config)]
    shortest = min(needed, 0 if has_adapters else parameters / FREE_PARAMETERS)
    fragments = schedule.fragments if "fragments" in said else 0
    least = max(SHORTEST_ROUND, fragments, 2 * schedule.overlap - 1)
    if _optimizer(config) == "adamw" and shortest >= LONGEST_ROUND / 2:
        shortest = LONGEST_ROUND
    wanted = max(least, min(LONGEST_ROUND, math.ceil(shortest)))
    most = wanted if tensors is None else min(wanted, tensors)
    fragments = fragments or next(divisor for divisor in range(max(1, most), 0, -1) if wanted % divisor == 0)
    sync_every = max(-(-least // fragments), wanted // fragments) * fragments
    if max(wanted, sync_every) < LONGEST_ROUND and not said_outer:
        outer = _mean(config, sync_every)
    return msgspec.structs.replace(
        config, outer=outer, schedule=msgspec.structs.replace(schedule, fragments=fragments, sync_every=sync_every)
    )


def _mean(config: RunConfig, sync_every: int) -> OuterConfig:
    """Return the outer optimizer of a run that takes the mean every so many steps."""
    rate, momentum = (0.7, 0.6) if _optimizer(config) == "muon" and sync_every > PLAIN_ROUND else (1.0, 0.0)
    return msgspec.structs.replace(config.outer, merge="direct", learning_rate=rate, momentum=momentum)


def _planned_steps(config: RunConfig) -> int:
    """Return the steps of a run; if it has a token budget, those in which ``SEVERAL`` learners train it."""
    inner = config.inner
    if inner.tokens is UNSET:
        return inner.steps
    return inner.tokens // (inner.batch * config.model.context * SEVERAL)


def with_usual_inner(config: RunConfig, said: Collection[str]) -> RunConfig:
    """Return ``config`` with what was left out of the inner optimizer, as far as good settings are known: Muon's
    learning rate, for a ``SMALL`` built-in model, falls with the square root of the width; AdamW that trains a whole
    model from scratch has a long warm-up.

    Args:
        said: keys that the founder wrote in the inner optimizer.
    """
    inner, model = config.inner, config.model
    if _optimizer(config) == "adamw":
        if "warmup" not in said and model.lora is None and not model.folder:
            warmup = min(inner.steps, int(WARMUP_SHARE * _planned_steps(config)))
            inner = msgspec.structs.replace(inner, warmup=warmup)
    elif "learning_rate" not in said and _parameters(model) <= SMALL:
        rate = round(min(LARGEST_RATE, RATE_AT_ONE / model.width**0.5), 4)
        inner = msgspec.structs.replace(inner, learning_rate=rate)
    return msgspec.structs.replace(config, inner=inner)


def _parameters(model: ModelConfig) -> float:
    """Estimate the parameters of a built-in transformer; any other model counts as large."""
    if model.kind != "transformer":
        return math.inf
    return 12 * model.depth * model.width**2 + 2 * model.vocabulary * model.width


def most_logged(shards: int) -> int:
    """Return the largest log length for which all logs together have room."""
    return max(LEAST_LOGGED, MOST_LOGGED // shards)


def log_length(sync_every: int, shards: int) -> int:
    """Return the versions to log of each shard: those of ``LOG_STEPS`` steps, as far as there is room."""
    return max(LEAST_LOGGED, min(-(-LOG_STEPS // sync_every), most_logged(shards)))


def completed(config: RunConfig, shards: int) -> RunConfig:
    """Return ``config`` with every default filled in, as it goes into the manifest."""
    schedule, inner = config.schedule, config.inner
    inner = msgspec.structs.replace(inner, optimizer=_optimizer(config), decay_share=decay_share(inner))
    if inner.tokens is not UNSET:
        inner = msgspec.structs.replace(inner, steps=_most_steps(inner.tokens, config))
    if schedule.log_length is UNSET:
        schedule = msgspec.structs.replace(schedule, log_length=log_length(schedule.sync_every, shards))
    outer = config.outer
    if outer.bias_correction is UNSET:
        outer = msgspec.structs.replace(
            outer, bias_correction=is_bias_corrected(outer, inner.steps // schedule.sync_every)
        )
    if outer.momentum_type is UNSET:
        kept: MomentumType = "bfloat16" if outer.momentum <= LONG_MOMENTUM else "float32"
        outer = msgspec.structs.replace(outer, momentum_type=kept)
    return msgspec.structs.replace(config, inner=inner, schedule=schedule, outer=outer)


def without_left_out(config: RunConfig, written: RunConfig) -> RunConfig:
    """Return a run's ``config`` without the settings that its founder left out in ``written``."""
    parts = {}
    for name in ("inner", "schedule", "outer"):
        left: dict[str, object] = {
            field: UNSET for field in PARTS[name] if getattr(getattr(written, name), field) is UNSET
        }
        if name == "inner" and written.inner.tokens is not UNSET:
            left["steps"] = written.inner.steps
        parts[name] = msgspec.structs.replace(getattr(config, name), **left)
    return msgspec.structs.replace(config, **parts)


def decay_share(inner: InnerConfig) -> float:
    """Return the share of a run, at its end, over which the learning rate falls."""
    if inner.decay_share is not UNSET:
        return inner.decay_share
    return LINE_SHARE if inner.tokens is UNSET else DECAY_SHARE


def inner_optimizer(model: ModelConfig) -> Literal["adamw", "muon"]:
    """Return the optimizer of a new run: Muon where a built-in learner trains whole matrices, else AdamW."""
    return "muon" if model.kind != "external" and model.lora is None else "adamw"


def _optimizer(config: RunConfig) -> Literal["adamw", "muon"]:
    return inner_optimizer(config.model) if config.inner.optimizer is UNSET else config.inner.optimizer


def few_rounds(config: RunConfig) -> str:
    """Return a warning for the founder of a run with few rounds, with a remedy; empty if it has enough."""
    inner, schedule = config.inner, config.schedule
    rounds = inner.steps // schedule.sync_every
    if rounds >= ENOUGH_ROUNDS or inner.tokens is not UNSET:  # then it depends on how many come
        return ""
    shorter = inner.steps // ENOUGH_ROUNDS // schedule.fragments * schedule.fragments
    remedy = f"schedule.sync_every = {shorter} or " if shorter > schedule.overlap else ""
    return (
        f"a run of {inner.steps} steps has only {rounds} rounds of {schedule.sync_every} steps, and would learn more "
        f"with {ENOUGH_ROUNDS}: set {remedy}inner.steps = {ENOUGH_ROUNDS * schedule.sync_every}"
    )


def expected_gap(config: RunConfig, parameters: float, learners: int) -> float | None:
    """Return by how many per cent the loss of so many learners will roughly be above that of data parallel with the
    same tokens; None for one learner, a run that trains by AdamW or from a trained model, and a merge that was not
    measured.

    This is the law that ``python -m benchmarks.quality scale`` fits to models of up to 0.9 million parameters; for one
    of 2.8 million it was at most 1.8 times too high, and 1.2 times too low. Larger models count as that. The law's H is
    that of the plain mean; with the momentum that is filled in above ``PLAIN_ROUND``, H = 12 lost 1.1 to 1.5 times what
    H = 6 does, so a longer H counts as ``PLAIN_ROUND``. Beyond 16 learners the mean's gap grows more
    slowly (the sweep ``crowd``).
    """
    sync_every, steps = config.schedule.sync_every, max(1.0, _planned_steps(config)) / 1e3
    if learners < 2 or _optimizer(config) == "adamw" or config.model.folder or sync_every > LONGEST_ROUND:
        return None
    if config.outer.merge == "rda":
        return 12.9 * (learners / 8) ** 0.95 * steps**-0.85 if sync_every == LONGEST_ROUND else None
    size, each = min(parameters, LARGEST_MEASURED) / 1e5, min(sync_every, PLAIN_ROUND)
    crowd = (min(learners, 16) / 8) ** 1.17 * max(1.0, learners / 16) ** 0.55
    return float(7.8 * crowd * steps**-0.72 * ((each + 2) / 8) ** 0.74 * size**-0.14)


def describe_rounds(config: RunConfig, parameters: float) -> str:
    """Return a sentence for the founder: how often peers exchange, and what that costs in quality and traffic."""
    said = f"peers exchange each part of the model every {config.schedule.sync_every} steps"
    gap = expected_gap(config, parameters, SEVERAL)
    if gap is None:
        return said
    said += f"; {SEVERAL} learners end roughly {gap:.2g} % above one machine that trains on the same tokens"
    half = max(SHORTEST_ROUND, config.schedule.sync_every // 2)
    if half == config.schedule.sync_every:
        return said
    schedule, outer = msgspec.structs.replace(config.schedule, sync_every=half), _mean(config, half)
    less = expected_gap(msgspec.structs.replace(config, schedule=schedule, outer=outer), parameters, SEVERAL)
    mean = f'outer.merge = "direct", learning_rate = {outer.learning_rate}, momentum = {outer.momentum}'
    return f"{said}. With schedule.sync_every = {half} and {mean}: {less:.2g} %, for up to twice the traffic"


def momentum_type(outer: OuterConfig) -> MomentumType:
    """Return the momentum type of a run; float32 while nothing is filled in."""
    return "float32" if outer.momentum_type is UNSET else outer.momentum_type


def budget(inner: InnerConfig) -> int:
    """Return the token budget of a run; 0: it ends by steps."""
    return 0 if inner.tokens is UNSET else inner.tokens


def end_of(config: RunConfig, prolonged_to: int = 0) -> RunEnd:
    """Return the end of a run.

    prolonged_to: steps, or tokens if the run has a budget, to which it is prolonged (``Members.prolonged_to``).
    """
    steps, tokens = config.inner.steps, budget(config.inner)
    if not tokens:
        return RunEnd(min(max(steps, prolonged_to), LONGEST_RUN))
    if prolonged_to <= tokens:
        return RunEnd(steps, tokens)
    tokens = min(prolonged_to, MOST_BUDGET)
    return RunEnd(min(max(steps, _most_steps(tokens, config)), LONGEST_RUN), tokens)


def _most_steps(tokens: int, config: RunConfig) -> int:
    """Return the steps of a run with a token budget: several times those that one learner alone needs."""
    return SPARE_STEPS * -(-tokens // (config.inner.batch * config.model.context))


def logged(schedule: ScheduleConfig) -> int:
    """Return the log length of a run; the least while nothing is filled in."""
    return LEAST_LOGGED if schedule.log_length is UNSET else schedule.log_length
