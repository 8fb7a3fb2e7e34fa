"""How long participants take to answer a turn, so that an owner waits for those who are usually in time.

The paper's grace window is a share of tau steps. On a long or slow path answers take longer than that, turn after turn:
a version would hold one learner's progress, and what the others had sent would be refused and sent again.

Rules of this file:
1. Late answers count, too: a peer that was not waited for must not look as if it never answered.
2. Nobody is waited for who usually takes longer than the limit: it gives what it has at its next turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.protocol.estimates import smoothed
from p2pdiloco.protocol.identifiers import Digest, PeerId, ShardId

VARIATIONS = 2
"""Beyond the mean; few answers take longer than that."""


class Answers:
    """Of all peers to this owner, from the opening of a turn here."""

    def __init__(self, shards: int) -> None:
        self._delays: dict[PeerId, tuple[float, float]] = {}
        """Smoothed, with their variation."""
        self._merged: list[tuple[Digest, float] | None] = [None] * shards
        """The base of each shard's last version, and when its turn had opened: for answers that come too late."""

    def came(self, peer: PeerId, delay_s: float) -> None:
        """An answer, so long after the opening."""
        self._delays[peer] = smoothed(*self._delays.get(peer, (0.0, 0.0)), delay_s)

    def moved(self, shard: ShardId, base: Digest, opened_at: float) -> None:
        """The version after ``base`` is there."""
        self._merged[shard] = base, opened_at

    def came_late(self, peer: PeerId, shard: ShardId, base: Digest, now: float) -> None:
        """An answer to a version that is there already."""
        merged = self._merged[shard]
        if merged is not None and merged[0] == base:
            self.came(peer, now - merged[1])

    def wait_s(self, absent: Iterable[PeerId], limit_s: float) -> float:
        """How long after the opening all of ``absent`` will usually have answered who do so within ``limit_s``."""
        known = (self._delays[peer] for peer in absent if peer in self._delays)
        usual = (mean_s + VARIATIONS * variation_s for mean_s, variation_s in known)
        return max((delay_s for delay_s in usual if delay_s <= limit_s), default=0.0)

    def forget(self, peer: PeerId) -> None:
        """The peer is gone."""
        self._delays.pop(peer, None)
