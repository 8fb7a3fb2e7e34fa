"""A simulated process's own clock."""

from __future__ import annotations


class Clock:
    """Shows ``offset_s`` at the world's beginning, and goes ``rate`` times as fast as the world's."""

    __slots__ = ("offset_s", "rate")

    def __init__(self, offset_s: float, rate: float) -> None:
        self.offset_s, self.rate = offset_s, rate

    def at(self, world_s: float) -> float:
        """What it shows then."""
        return self.offset_s + self.rate * world_s

    def when(self, shown_s: float) -> float:
        """The world's time at which it shows this, or a little later: rounding never makes it earlier."""
        return (shown_s - self.offset_s) / self.rate + 1e-6
