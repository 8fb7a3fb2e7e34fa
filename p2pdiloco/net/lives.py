"""Which lives of a peer are over.

A peer that is started anew gets a new life (``Hello.life``), which takes the place of the one before. A life that comes
back after that means two processes with one identity: it is refused while the later one is connected, so that the two
do not take each other's place for ever.
"""

from __future__ import annotations

from collections import deque

from p2pdiloco.protocol.ids import PeerId

PEERS = 1024
LIVES = 4
"""Of each peer; more are forgotten, the oldest first."""


class PastLives:
    """See above."""

    def __init__(self) -> None:
        self._past: dict[PeerId, deque[bytes]] = {}
        self._told: dict[PeerId, None] = {}
        """Peers of which it is known that they are two processes."""

    def has(self, peer: PeerId, life: bytes) -> bool:
        """Whether that life is over."""
        return life in self._past.get(peer, ())

    def end(self, peer: PeerId, life: bytes) -> None:
        """Another life takes its place."""
        past = self._past.pop(peer, None) or deque(maxlen=LIVES)
        if life not in past:
            past.append(life)
        self._past[peer] = past
        while len(self._past) > PEERS:
            oldest = next(iter(self._past))
            del self._past[oldest]
            self._told.pop(oldest, None)

    def is_news(self, peer: PeerId) -> bool:
        """Whether a life that is over comes back for the first time."""
        is_news = peer not in self._told
        self._told[peer] = None
        return is_news
