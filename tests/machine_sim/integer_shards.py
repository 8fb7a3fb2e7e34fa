"""Shards of integers in place of tensors, so that every merged token can be counted exactly.

A learner's k-th token adds ``1 + k * 2**48`` to the learner's own component of every shard. Sums of such numbers tell
how many tokens they hold, and a range that is merged twice, skipped or swapped for another one changes them:
conservation is an equality of integers.
The outer step is plain subtraction (learning rate 1, no momentum), so all rules are exact.

Rules of this file:
1. A shard's global value maps each learner to the sum of its merged tokens; its digest is of the content alone.
2. An outer gradient is base minus local, as in tensors/: the outer step subtracts it, a settled one is added to the
   learner, a restored one subtracted.
"""

from __future__ import annotations

import msgspec

from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import Digest, LearnerId, ShardId, digest_of
from p2pdiloco.protocol.messages import CommitHeader

PLACE = 1 << 48
"""Above the token count, in the same integer, lies the sum of the tokens' positions."""

Payload = tuple[tuple[LearnerId, int], ...]
"""An outer gradient: each learner's component, sorted by learner."""
WILD = LearnerId("!")
"""Learner whose component stands for values that no owner may put into a commit (rules V)."""

POISON = LearnerId("~")
"""Learner whose component stands for a contribution that ruins the model, though no bound tells."""


class States:
    """Of all shards, as this process has them."""

    def __init__(self, shards: int) -> None:
        self.heads: list[Digest | None] = [None] * shards
        self.values: list[GlobalShard | None] = [None] * shards
        self.fetched: dict[Digest, GlobalShard] = {}
        """Downloaded and not installed, by head."""


def value_of(tokens: int) -> int:
    """The sum over a learner's first ``tokens`` tokens."""
    return tokens + (tokens * (tokens - 1) // 2) * PLACE


def tokens_in(value: int) -> int:
    """How many tokens a sum or difference of values holds (negative if it lacks some)."""
    return (value + PLACE // 2) % PLACE - PLACE // 2


class GlobalShard:
    """One shard's global state. Immutable, shared by all simulated peers that hold it."""

    __slots__ = ("digest", "values")

    def __init__(self, values: dict[LearnerId, int]) -> None:
        self.values = values
        self.digest = digest_of(repr(sorted(values.items())).encode())

    @property
    def is_wild(self) -> bool:
        """Whether an owner has put values of its own into it."""
        return WILD in self.values

    def of(self, learner: LearnerId) -> int:
        """The learner's merged tokens."""
        return self.values.get(learner, 0)


EMPTY = GlobalShard({})
"""Version 0."""


def payload_digest(shard: ShardId, base: Digest, payload: Payload) -> Digest:
    """What names an outer gradient's bytes."""
    return digest_of(f"{shard}/{base}/{payload}".encode())


def merged(contributions: list[Payload], *, is_wild: bool = False) -> Payload:
    """The sum of outer gradients: what a commit carries; or with values of its owner's own."""
    total: dict[LearnerId, int] = {WILD: 1} if is_wild else {}
    for payload in contributions:
        for learner, value in payload:
            total[learner] = total.get(learner, 0) + value
    return tuple(sorted(total.items()))


def outer_step(base: GlobalShard, payload: Payload) -> GlobalShard:
    """The state after a commit."""
    values = dict(base.values)
    for learner, value in payload:
        values[learner] = values.get(learner, 0) - value
    return GlobalShard(values)


def component(payload: Payload, learner: LearnerId) -> int:
    """The learner's own component of an outer gradient."""
    return sum(value for who, value in payload if who == learner)


class Checkpoint(msgspec.Struct, frozen=True):
    """What a process leaves on disk."""

    shards: tuple[tuple[ev.ShardState, GlobalShard], ...]
    lineages: tuple[tuple[Digest, ...], ...] = ()
    own: tuple[tuple[CommitHeader, Payload], ...] = ()
    """Commits that it made after that, with their payloads."""
    convictions: ev.Convictions = ev.Convictions()
