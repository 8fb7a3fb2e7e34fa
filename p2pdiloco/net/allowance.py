"""How much of what costs more to give than to ask for each asker gets.

Rules of this file:
1. Pure: time is a number. So much at once, and then it comes back at a rate.
2. Bounded: of REMEMBERED askers, those that took longest ago are forgotten first.
"""

from __future__ import annotations

from collections.abc import Hashable

REMEMBERED = 4096


class Allowance:
    """See the module's rules."""

    def __init__(self, *, at_once: float, per_s: float) -> None:
        self._at_once = at_once
        self._per_s = per_s
        self._taken: dict[Hashable, tuple[float, float]] = {}
        """How much, and as of when; who took longest ago first."""

    def take(self, who: Hashable, now: float) -> bool:
        """One; False: there is none for ``who`` now."""
        taken, at = self._taken.pop(who, (0.0, now))
        taken = max(0.0, taken - self._per_s * max(0.0, now - at))
        is_there = taken + 1.0 <= self._at_once
        self._taken[who] = (taken + is_there, now)
        if len(self._taken) > REMEMBERED:
            del self._taken[next(iter(self._taken))]
        return is_there
