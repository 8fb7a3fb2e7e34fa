"""What peers sent that could not be read costs them points, and too many of those the connection, and for a while the
next one.

Rules of this file:
1. Pure: time is a number. Points wear off with time, so that an honest peer with a rare defect stays.
2. Bounded: of REMEMBERED peers, those blamed longest ago are forgotten first.
"""

from __future__ import annotations

from p2pdiloco.protocol.ids import PeerId

LIMIT = 100.0
"""Points at which a peer is cut off."""
WEARS_OFF_PER_S = 0.5
BODY = 1.0
"""A body that cannot be read."""
FRAMES = 25.0
"""Frames that break the format; they end the connection as well."""
SHUT_OUT_S = 60.0
REMEMBERED = 4096


class Scores:
    """See the module's rules."""

    def __init__(self) -> None:
        self._points: dict[PeerId, tuple[float, float]] = {}
        """Points, and as of when."""
        self._shut_out: dict[PeerId, float] = {}
        """Until when."""

    def blame(self, peer: PeerId, points: float, now: float) -> bool:
        """Whether that was too much: it is to be cut off."""
        had, at = self._points.pop(peer, (0.0, now))
        total = max(0.0, had - WEARS_OFF_PER_S * (now - at)) + points
        if total >= LIMIT:
            self._shut_out[peer] = now + SHUT_OUT_S
            _bound(self._shut_out)
            return True
        self._points[peer] = (total, now)
        _bound(self._points)
        return False

    def is_shut_out(self, peer: PeerId, now: float) -> bool:
        until = self._shut_out.get(peer)
        if until is not None and until <= now:
            del self._shut_out[peer]
        return peer in self._shut_out


def _bound(remembered: dict[PeerId, tuple[float, float]] | dict[PeerId, float]) -> None:
    if len(remembered) > REMEMBERED:
        del remembered[next(iter(remembered))]
