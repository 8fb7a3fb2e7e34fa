"""How long participants take to answer a turn, so that an owner waits for those who are usually in time.

The paper's grace window is a share of tau steps. On a long or slow path answers take longer than that, turn after turn:
a version would hold one learner's progress, and what the others had sent would be refused and sent again.

Rules of this file:
1. Late answers count, too: a peer that was not waited for must not look as if it never answered.
2. Nobody is waited for who usually takes longer than the limit: it gives what it has at its next turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.protocol.identifiers import Digest, PeerId, ShardId


class Delay:
    """A smoothed time and its variation (RFC 6298's estimator)."""

    __slots__ = ("mean_s", "variation_s")

    def __init__(self, sample_s: float) -> None:
        self.mean_s = sample_s
        self.variation_s = sample_s / 2

    def measured(self, sample_s: float) -> None:
        """One more."""
        self.variation_s += 0.25 * (abs(sample_s - self.mean_s) - self.variation_s)
        self.mean_s += 0.125 * (sample_s - self.mean_s)

    @property
    def usual_s(self) -> float:
        """Few samples are longer."""
        return self.mean_s + 2 * self.variation_s


class Answers:
    """Of all peers to this owner, from the opening of a turn here."""

    def __init__(self, shards: int) -> None:
        self._delays: dict[PeerId, Delay] = {}
        self._merged: list[tuple[Digest, float] | None] = [None] * shards
        """The base of each shard's last version, and when its turn had opened: for answers that come too late."""

    def came(self, peer: PeerId, delay_s: float) -> None:
        """An answer, so long after the opening."""
        if peer in self._delays:
            self._delays[peer].measured(delay_s)
        else:
            self._delays[peer] = Delay(delay_s)

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
        usual = (self._delays[peer].usual_s for peer in absent if peer in self._delays)
        return max((delay_s for delay_s in usual if delay_s <= limit_s), default=0.0)

    def forget(self, peer: PeerId) -> None:
        """The peer is gone."""
        self._delays.pop(peer, None)
