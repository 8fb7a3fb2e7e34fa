"""How long participants usually take to answer a round.

Late answers are measured, too, and answers that were waited for in vain count as late. Otherwise a peer that was not
waited for would look as if it never answered. The own learner is timed in all rounds, whoever owns the shard
(``Contributions``).
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.membership import smoothed

TOO_LATE = 1.25
"""Multiple of the limit that is recorded as the response time of a peer that did not answer within the limit."""


class ResponseTimes:
    """Measures how long each peer takes to answer a round, from the moment the round opens at this owner."""

    def __init__(self, shards: int) -> None:
        self._delays: dict[PeerId, float] = {}
        """Smoothed response time, in seconds."""
        self._merged: list[tuple[Digest, float] | None] = [None] * shards
        """By shard: the base of the last version and the time its round opened. Used to measure late answers."""

    def record(self, peer: PeerId, delay_s: float) -> None:
        """Record an answer that arrived ``delay_s`` seconds after the round opened."""
        self._delays[peer], _ = smoothed(self._delays.get(peer, 0.0), 0.0, delay_s)

    def end_round(self, shard: ShardId, base: Digest, opened_at: float) -> None:
        """Record the end of the round on ``base``, which opened at ``opened_at``: later answers are late."""
        self._merged[shard] = base, opened_at

    def record_late(self, peer: PeerId, shard: ShardId, base: Digest, now: float) -> None:
        """Record an answer to a version that has been merged already."""
        merged = self._merged[shard]
        if merged is not None and merged[0] == base:
            self.record(peer, now - merged[1])

    def usual_s(self, peers: Iterable[PeerId]) -> dict[PeerId, float]:
        """Return how long each of ``peers`` usually takes, in seconds; 0 for one that is new."""
        return {peer: self._delays.get(peer, 0.0) for peer in peers}

    def record_missing(self, absent: Iterable[PeerId], limit_s: float) -> None:
        """Record that ``absent`` peers were waited for until the limit."""
        for peer in absent:
            self.record(peer, TOO_LATE * limit_s)

    def forget(self, peer: PeerId) -> None:
        """Drop the measurements of a peer that has left."""
        self._delays.pop(peer, None)
