"""State of the laboratory's learners, open rounds, and commits on their way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.quality.data import Stream
from benchmarks.quality.exchange import Parcel
from benchmarks.quality.stacked import Stepping
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.training.cuda_copies import Finished
from p2pdiloco.training.parameters import FlatParameters

SPELL = 48.0
"""Mean length of a spell of presence, in steps."""
ENDLESS = 1e18


def ended(finished: Finished | None) -> None:
    """Wait for a copy from or to a device, if it still runs."""
    if finished is not None and not finished():
        torch.cuda.synchronize()


class Given(NamedTuple):
    """One learner's contribution to a round of a fragment."""

    parcels: dict[ShardId, Parcel]
    meant: dict[ShardId, Tensor]
    """The outer gradients before they were quantized."""
    predicted: dict[ShardId, Tensor]
    """Predicted changes that the learner made at once, until the commit comes (``Setting.predicts``)."""
    steps: int
    tokens: int
    """The learner's counters at its snapshot."""


class Round:
    """An open round of one fragment."""

    def __init__(self, fragment: int, opened_at: float) -> None:
        self.fragment = fragment
        self.opened_at = opened_at
        self.quorum_at: float | None = None
        self.given: dict[int, Given] = {}
        self.answered: set[int] = set()


class Shift(NamedTuple):
    """A commit on its way to one learner."""

    ready_at: float
    shard: ShardId
    change: Tensor
    """To add to the learner's parameters; float32 [elements]."""


class Member:
    """One learner: its parameters in the flat layout, its counters and marks."""

    def __init__(self, flat: FlatParameters, shards: int) -> None:
        self.flat = flat
        self.steps = 0
        self.tokens = 0
        self.marks: list[tuple[int, int]] = [(0, 0)] * shards
        """By shard: steps and tokens up to which this learner is merged."""
        self.shifts: list[Shift] = []
        self.is_present = True
        self.seen: Tensor | None = None
        """While it is cut off: the global parameters that it knew last."""

    @property
    def takes_part(self) -> bool:
        """Whether an owner waits for it."""
        return self.is_present and self.seen is None


class Group:
    """Learners that are computed together."""

    def __init__(self, members: list[int], stack: Stepping, stream: Stream, step_time: float, spells: Iterator[float]):
        self.members = members
        self.stack = stack
        self.stream = stream
        self.step_time = step_time
        self.spells = spells
        self.changes_at = next(spells)
        """When it comes or goes next."""
        self.step = 0
        """The global step as it knows it."""


def spells(seed: int, member: int, absent: float) -> Iterator[float]:
    """The times at which a learner goes, comes, goes ..., that is away for a share ``absent`` of the time."""
    at, draw = 0.0, random.Random(f"{seed}/{member}")
    while absent:
        for mean in (SPELL, SPELL * absent / (1.0 - absent)):
            at += mean * draw.uniform(0.5, 1.5)
            yield at
    while True:
        yield ENDLESS
