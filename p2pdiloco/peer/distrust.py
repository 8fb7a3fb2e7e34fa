"""Whom a node asks for no state, and for how long.

A wrong chunk is a lie or a flipped bit, and one cannot tell which. So whoever sends one is left alone for a while,
which doubles each time; only when somebody else has sent that very chunk as its owner signed it, for good.
"""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco.protocol.ids import Digest, PeerId

Chunk = tuple[Digest, int]
"""A head, and the number of a chunk of its state."""
FIRST_S = 10.0
"""The first time."""
REMEMBERED = 1024
"""Wrong chunks that wait for a witness; older ones are forgotten."""


class Distrust:
    """``now``: seconds, never going back."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: dict[PeerId, float] = {}
        self._times: dict[PeerId, int] = {}
        self._wrong: dict[tuple[Chunk, PeerId], None] = {}

    def of(self, peer: PeerId) -> bool:
        """Whether it is not to be asked now."""
        return self._now() < self._until.get(peer, float("-inf"))

    def wrong(self, peer: PeerId, chunk: Chunk | None = None) -> None:
        """It has sent something wrong: this chunk, or an offer that does not prove itself."""
        times = self._times[peer] = self._times.get(peer, 0) + 1
        self._until[peer] = max(self._until.get(peer, 0.0), self._now() + FIRST_S * 2.0 ** min(times - 1, 16))
        if chunk is not None:
            self._wrong[chunk, peer] = None
            while len(self._wrong) > REMEMBERED:
                del self._wrong[next(iter(self._wrong))]

    def right(self, peer: PeerId, chunk: Chunk) -> None:
        """``peer`` has sent this chunk as it was signed: who else sent another one had it wrong. (Nobody is a witness
        against itself: what it sent wrong before was spoilt on the way, or has been mended.)"""
        for key in [key for key in self._wrong if key[0] == chunk]:
            del self._wrong[key]
            if key[1] != peer:
                self._until[key[1]] = float("inf")
