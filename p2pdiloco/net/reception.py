"""Whose greeting is answered next. A handshake costs some twenty times what accepting does, so those that fail have a
budget of their own (measured: benchmarks.hostile.arrivals).

Rules of this file:
1. Pure: time is a number.
2. A handshake takes one of so many tokens, which come back at a rate, and at once where the other side has proved
   itself: whoever is let in costs nothing, and a flood not more than the rate.
3. The machine with the fewest failures lately goes first: who floods, from however many machines, goes behind who
   comes for the first time.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from p2pdiloco.net.admission import Room
from p2pdiloco.net.failures import Failures

Visitor = TypeVar("Visitor")


class Reception(Generic[Visitor]):
    """See the module's rules."""

    def __init__(self, *, per_s: float, at_once: int, places: int) -> None:
        """``at_once``: tokens there are at most; ``per_s``: those that come back; ``places``: who may wait."""
        self.room: Room[Visitor] = Room(places)
        """Who waits."""
        self._per_s = per_s
        self._at_once = float(at_once)
        self._tokens = float(at_once)
        self._at = 0.0
        self._failures = Failures()

    def next(self, now: float) -> Visitor | None:
        """Who is answered now, and leaves the room; None: nobody waits, or has to."""
        self._come(now)
        if not self.room or self._tokens < 1.0:
            return None
        waiting = self.room.holders
        first = min(waiting, key=lambda visitor: self._failures.of(waiting[visitor], now))
        self.room.leave(first)
        self._tokens -= 1.0
        return first

    def due(self, now: float) -> float | None:
        """In how many seconds somebody is; None: nobody waits."""
        self._come(now)
        return max(0.0, (1.0 - self._tokens) / self._per_s) if self.room else None

    def ended(self, machine: str, now: float, *, is_proved: bool) -> None:
        """Of a handshake."""
        if is_proved:
            self._tokens = min(self._at_once, self._tokens + 1.0)
        else:
            self._failures.add(machine, now)

    def _come(self, now: float) -> None:
        self._tokens = min(self._at_once, self._tokens + max(0.0, now - self._at) * self._per_s)
        self._at = now
