"""When which peer of the directory is pinged: often at first and when one that answered does not any more, ever more
seldom while nothing changes, and more seldom the more they are: what pings cost a node does not grow with the swarm. At
most PEERS_MOST are remembered, the longest unpinged forgotten first.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.runtime.backoff import Backoff

CALM_S, SILENT_S = 60.0, 8.0
"""At most between two pings of a peer that answers, and of one that does not."""
FEW = 8
"""Beyond so many peers, those that answer are pinged more seldom in proportion."""
PEERS_MOST = 512


class _Peer:
    def __init__(self, shortest_s: float) -> None:
        self.next_at = 0.0
        self.has_answered = False
        self.pauses = {True: Backoff(shortest_s, CALM_S), False: Backoff(shortest_s, SILENT_S)}


class Pings:
    """See the module; ``shortest_s`` between two of one peer."""

    def __init__(self, shortest_s: float) -> None:
        self._shortest_s = shortest_s
        self._peers: dict[PeerId, _Peer] = {}

    def due(self, peers: Iterable[PeerId], now: float) -> list[PeerId]:
        """Of ``peers`` those that are to be pinged now."""
        return [peer for peer in peers if peer not in self._peers or now >= self._peers[peer].next_at]

    def is_silent(self, peer: PeerId) -> bool:
        """Whether its last ping was not answered."""
        return peer in self._peers and not self._peers[peer].has_answered

    def ended(self, peer: PeerId, now: float, *, is_answered: bool) -> None:
        """A ping was answered, or was not."""
        known = self._peers.pop(peer) if peer in self._peers else _Peer(self._shortest_s)
        self._peers[peer] = known
        if is_answered != known.has_answered:
            known.has_answered = is_answered
            known.pauses[is_answered].reset()
        many = max(1.0, len(self._peers) / FEW) if is_answered else 1.0
        known.next_at = now + many * known.pauses[is_answered].next_s()
        while len(self._peers) > PEERS_MOST:
            del self._peers[next(iter(self._peers))]
