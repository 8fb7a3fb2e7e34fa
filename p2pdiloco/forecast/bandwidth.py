"""What a line must carry for a given compute utilisation, by the public model of the DiLoCo family.

Source: the public simulator of that family (Streaming DiLoCo, arXiv 2501.18512; Decoupled DiLoCo, arXiv 2604.21428).
The forward pass takes a third of a step, the backward pass two thirds; gradients leave in 128 buckets while it goes on;
one line without latency, first in, first out; what is not there by its deadline stalls the learner; utilisation is
compute over compute and stalls.

Rules of this file:
1. Pure numbers: bits, seconds, bits a second, without headers.
2. A peer's line carries what it sends and, the other way, as much that it gets.
3. This project's learners never wait. Its utilisation here is what it would be if they did, so that it can stand beside
   the others'; what happens instead is that turns are late, or left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

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
