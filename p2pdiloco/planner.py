"""Forecast of what a run will ask of its peers' bandwidth, memory and money, before it is created.

Rules of this file:
1. Pure numbers; all peers and their lines are alike. Utilisation is by the public model (``bandwidth.py``), the rest is
   counted: what goes over a line, what a peer holds.
2. An exchange is a contribution to the owner, a commit from it to all, and three one-way trips (announced, contributed,
   committed). A fragment with fewer shards than there are peers has fewer owners, whose lines are then the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

# -- Bandwidth model ---------------------------------------------------------------------------------------------------
# What a line must carry for a given compute utilisation, by the public model of the DiLoCo family.
#
# Rules of this file:
# 1. Pure numbers: bits, seconds, bits a second, without headers.
# 2. A peer's line carries what it sends and, the other way, as much that it gets.
# 3. This project's learners never wait. Its utilisation here is what it would be if they did, so that it can stand
#    beside the others'; what happens instead is that turns are late, or left out.


Described = TypeVar("Described")
"""A run, as some model sees it."""

BUCKETS: Final = 128
BACKWARD: Final = 2 / 3
"""Of a step."""


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as the model sees it."""

    parameters: float
    peers: int
    step_s: float = 1.0
    sync_every: int = 24
    """H."""
    fragments: int = 24
    """P."""
    overlap: int = 2
    """tau, in steps."""
    up_bytes: float = 0.5
    """A parameter, of what a learner contributes; of gradients, for data parallel."""
    down_bytes: float = 0.5
    """A parameter, of what comes back."""

    @property
    def interval_s(self) -> float:
        """Between the turns of two fragments."""
        return self.step_s * self.sync_every / self.fragments


def all_reduced_bits(training: Training) -> float:
    """What a peer sends, and gets, for one exchange of the whole model: a reduce and a spread."""
    share = 1 - 1 / training.peers
    return training.parameters * 8 * share * (training.up_bytes + training.down_bytes)


def starred_bits(training: Training) -> float:
    """The same towards a central syncer that is elsewhere; the other direction is as much."""
    return training.parameters * 8 * max(training.up_bytes, training.down_bytes)


def data_parallel(training: Training, bits_per_s: float) -> float:
    """Gradients of each step, bucket by bucket, by the end of the step."""
    step_s, bucket_s = training.step_s, all_reduced_bits(training) / bits_per_s / BUCKETS
    done = 0.0
    for bucket in range(1, BUCKETS + 1):
        made = step_s * (1 - BACKWARD) + step_s * BACKWARD * bucket / BUCKETS
        done = max(done, made) + bucket_s
    return step_s / (step_s + max(0.0, done - step_s))


def diloco(training: Training, bits_per_s: float) -> float:
    """All stop every H steps until the whole model has been exchanged."""
    computed_s = training.step_s * training.sync_every
    return computed_s / (computed_s + all_reduced_bits(training) / bits_per_s)


def _streamed(training: Training, bits: float, bits_per_s: float) -> float:
    """A fragment every H / P steps, by ``overlap`` steps after the one in which it is sent."""
    deadline_s = (training.overlap + 1) * training.step_s
    late_s = bits / training.fragments / bits_per_s - min(training.interval_s, deadline_s)
    return training.interval_s / (training.interval_s + max(0.0, late_s))


def streaming(training: Training, bits_per_s: float) -> float:
    """Streaming DiLoCo: fragments are all-reduced."""
    return _streamed(training, all_reduced_bits(training), bits_per_s)


def star(training: Training, bits_per_s: float) -> float:
    """Decoupled DiLoCo: to and from a syncer that is on none of the learners' lines, and has one as fast for each."""
    return _streamed(training, starred_bits(training), bits_per_s)


def p2pdiloco(training: Training, bits_per_s: float) -> float:
    """Contributions to owners, which are the peers themselves, and commits to all."""
    return _streamed(training, all_reduced_bits(training), bits_per_s)


SYSTEMS: Final[dict[str, Callable[[Training, float], float]]] = {
    "data parallel": data_parallel,
    "DiLoCo": diloco,
    "Streaming DiLoCo": streaming,
    "Decoupled DiLoCo, star": star,
    "p2pdiloco": p2pdiloco,
}


def least_rate(utilisation: Callable[[Described, float], float], training: Described, wanted: float = 0.95) -> float:
    """The slowest line, in bits a second, at which so much of the time is computed."""
    low, high = 1.0, 1e16
    while high / low > 1 + 1e-9:
        rate = (low * high) ** 0.5
        low, high = (low, rate) if utilisation(training, rate) >= wanted else (rate, high)
    return high


def sustained(training: Training, bits_per_s: float) -> float:
    """The share of its turns that this project's line can carry: all, if fragments leave as fast as they come."""
    return min(1.0, bits_per_s * training.interval_s * training.fragments / all_reduced_bits(training))


# -- What a run would ask of its peers' lines, memory and money, before it is founded ----------------------------------


DAY_S: Final = 86400.0
PAYLOAD_SHARE: Final = 1448 / 1514
"""Payload in a full packet."""
CONTROL_BYTES: Final = 220
"""A small message on the line (117 bytes measured, benchmarks/protocol/README.md, and 104 of headers)."""
NODE_BYTES: Final = 9.0
"""A parameter that a node holds (``python -m benchmarks.memory``),"""
NODE_FIXED_BYTES: Final = 45e6
"""and besides."""
LEARNER_BYTES: Final = 16.0
"""A parameter: model, gradients, AdamW; activations come on top."""
STATE_BYTES: Final = 8.0
"""A parameter that a newcomer fetches: parameters and momentum."""
MOST_OVERLAP: Final = 8
"""Steps that a recommended exchange may take; a longer overlap costs loss (benchmarks/quality/README.md)."""
MOST_SYNC_EVERY: Final = 768
CODECS: Final = (("int4", 0.43), ("int4-coarse", 0.27))
"""What is advised, with its bytes a parameter and way: the shipped one, and step 1.0, which costs 0.5 % of loss and
saves a third of the bytes (docs/results.md)."""


class PeerLines(msgspec.Struct, frozen=True, kw_only=True):
    """What each peer has."""

    up_bits_per_s: float
    down_bits_per_s: float
    round_trip_s: float = 0.0


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A run, its fragments as numbers of parameters of their shards."""

    fragments: tuple[tuple[int, ...], ...]
    peers: int
    step_s: float
    steps: int
    """In all."""
    sync_every: int
    overlap: int
    up_bytes: float
    down_bytes: float
    heartbeat_s: float = 1.0

    @property
    def parameters(self) -> int:
        return sum(map(sum, self.fragments))

    @property
    def training(self) -> Training:
        """As the public model sees it."""
        return Training(
            parameters=self.parameters,
            peers=self.peers,
            step_s=self.step_s,
            sync_every=self.sync_every,
            fragments=len(self.fragments),
            overlap=self.overlap,
            up_bytes=self.up_bytes,
            down_bytes=self.down_bytes,
        )


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Bytes are those on the line of one peer, one way; the other way are as many."""

    parameters: int
    bytes_a_step: float
    bytes_a_day: float
    mean_bits_per_s: float
    exchange_s: float
    """From the turn of the largest fragment to its commit at all."""
    staleness_steps: float
    is_on_time: bool
    turns_kept: float
    utilisation: dict[str, float]
    """By system, on this line."""
    turns: int
    """That each fragment has in the run."""
    node_bytes: float
    learner_bytes: float
    join_s: float
    cost_a_day: float


def control_bytes_per_s(wanted: Wanted) -> float:
    """Heartbeats, which swarms of more than 16 send more seldom, and what a turn is announced and answered with."""
    others = wanted.peers - 1
    interval_s = wanted.heartbeat_s * max(1.0, wanted.peers / 16)
    shards = sum(map(len, wanted.fragments))
    return CONTROL_BYTES * others * (1 / interval_s + 2 * shards / (wanted.sync_every * wanted.step_s))


def bytes_a_step(wanted: Wanted) -> float:
    """What a peer sends, headers and all."""
    away = 1 - 1 / wanted.peers
    exchanged = wanted.parameters * away * (wanted.up_bytes + wanted.down_bytes) / wanted.sync_every
    return exchanged / PAYLOAD_SHARE + control_bytes_per_s(wanted) * wanted.step_s


def exchange_s(wanted: Wanted, lines: PeerLines) -> float:
    """Of the largest fragment, with nothing else on the lines."""
    shards = max(wanted.fragments, key=sum)
    others, parameters = wanted.peers - 1, sum(shards)
    owned = max(max(shards), parameters / wanted.peers)
    up = parameters * wanted.up_bytes * others / wanted.peers + owned * wanted.down_bytes * others
    down = max(owned * wanted.up_bytes * others, parameters * wanted.down_bytes)
    bits = 8 / PAYLOAD_SHARE
    return max(up * bits / lines.up_bits_per_s, down * bits / lines.down_bits_per_s) + 1.5 * lines.round_trip_s


def make_plan(wanted: Wanted, lines: PeerLines, *, price_a_gb: float = 0.0) -> Forecast:
    """All of it. ``price_a_gb``: of what leaves a peer, in any currency."""
    step_bytes, took_s = bytes_a_step(wanted), exchange_s(wanted, lines)
    rate = min(lines.up_bits_per_s, lines.down_bits_per_s)
    day_bytes = step_bytes * DAY_S / wanted.step_s
    donors_bits = lines.up_bits_per_s * max(1, wanted.peers - 1)
    state_bits = STATE_BYTES * wanted.parameters * 8 / PAYLOAD_SHARE
    return Forecast(
        parameters=wanted.parameters,
        bytes_a_step=step_bytes,
        bytes_a_day=day_bytes,
        mean_bits_per_s=8 * step_bytes / wanted.step_s,
        exchange_s=took_s,
        staleness_steps=took_s / wanted.step_s,
        is_on_time=took_s <= wanted.overlap * wanted.step_s,
        turns_kept=min(1.0, rate * wanted.step_s / (8 * step_bytes)),
        utilisation=_utilisation(wanted, rate * PAYLOAD_SHARE),
        turns=wanted.steps // wanted.sync_every,
        node_bytes=NODE_BYTES * wanted.parameters + NODE_FIXED_BYTES,
        learner_bytes=LEARNER_BYTES * wanted.parameters,
        join_s=state_bits / min(lines.down_bits_per_s, donors_bits),
        cost_a_day=day_bytes / 1e9 * price_a_gb,
    )


def _utilisation(wanted: Wanted, bits_per_s: float) -> dict[str, float]:
    bf16 = msgspec.structs.replace(wanted.training, up_bytes=2.0, down_bytes=2.0)
    found = {
        name: system(bf16 if name in ("data parallel", "DiLoCo") else wanted.training, bits_per_s)
        for name, system in SYSTEMS.items()
    }
    return {**found, "p2pdiloco": 1.0}  # its learners never wait; turns are left out instead


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The settings with which all turns are kept, on time."""

    codec: str
    sync_every: int
    overlap: int
    turns: int
    """That each fragment has then."""


def advise(wanted: Wanted, lines: PeerLines) -> Advice | None:
    """The smallest H, and for it the finest codec, with which every turn is kept and its exchange takes few steps; None
    if nothing does."""
    for sync_every in _growing(wanted.sync_every):
        for codec, size in CODECS:
            tried = msgspec.structs.replace(wanted, sync_every=sync_every, up_bytes=size, down_bytes=size)
            plan = make_plan(tried, lines)
            overlap = max(1, math.ceil(plan.staleness_steps))
            if plan.turns_kept == 1.0 and overlap <= min(max(MOST_OVERLAP, wanted.overlap), sync_every - 1):
                overlap = max(overlap, min(wanted.overlap, sync_every - 1))
                return Advice(codec=codec, sync_every=sync_every, overlap=overlap, turns=wanted.steps // sync_every)
    return None


def _growing(first: int) -> Sequence[int]:
    found = [first]
    while found[-1] * 2 <= MOST_SYNC_EVERY:
        found.append(found[-1] * 2)
    return found
