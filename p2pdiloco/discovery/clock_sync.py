"""The time that the nodes of a directory share: its records expire by it, whatever the machines' own clocks say.

Rules of this file:
1. It begins as the machine's wall clock, and from then on runs with a steady one: who sets the clock, or a clock that
   jumps, changes nothing.
2. Who joins takes over the time of those who are there (their median). So a machine whose clock is an hour wrong finds
   and is found; and whoever came first decides, right or wrong, as long as all agree.
3. Later only a majority of several others moves it, so that two nodes do not chase each other.
4. Nothing but the directory believes it. A node that lies about the time can make records expire, which it could do by
   losing them, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median_low

TOLERANCE_S = 2.0
"""Differences that network and load explain, and that records of a minute do not mind."""
WRONG_S = 5.0
"""What is told to the user."""
MOST_S = 1e11
"""Seconds since 1970 beyond which nothing is a time."""


def steady() -> float:
    """Seconds that also pass while the machine sleeps, where the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SharedClock:
    """See the module's rules. Times are seconds since 1970."""

    def __init__(self, wall: Callable[[], float] | None = None, steady: Callable[[], float] = steady) -> None:
        self._wall = wall or time.time
        self._steady = steady
        self._base = self._wall() - steady()
        self.witnesses = 0
        """Others whose clocks were heard last."""

    def now(self) -> float:
        """The shared time."""
        return self._base + self._steady()

    @property
    def ahead_s(self) -> float:
        """How far this machine's own clock is ahead of it (behind: negative)."""
        return self._wall() - self.now()

    @property
    def is_wrong(self) -> bool:
        """Whether the user should hear of that."""
        return self.witnesses > 0 and abs(self.ahead_s) > WRONG_S

    def adopt(self, theirs: Sequence[float]) -> None:
        """Take over the time of the others; each element is how far one of them is ahead of ``now``."""
        sound = self._sound(theirs)
        if sound and abs(middle := median_low(sound)) > TOLERANCE_S:
            self._base += middle

    def compare(self, theirs: Sequence[float]) -> bool:
        """As ``adopt``, for one who is there already: move only if most of the others, two at least, agree on it.
        Returns whether ours may not be that of the others, or nobody says: it is to be compared again soon."""
        sound = self._sound(theirs)
        if len(sound) < 2:
            return True
        if abs(middle := median_low(sound)) <= TOLERANCE_S:
            return False
        if 2 * sum(abs(other - middle) <= TOLERANCE_S for other in sound) > len(sound):
            self._base += middle
        return True

    def _sound(self, theirs: Sequence[float]) -> list[float]:
        sound = [other for other in theirs if math.isfinite(other) and 0.0 < self.now() + other < MOST_S]
        if sound:
            self.witnesses = len(sound)
        return sound

    def describe(self) -> str:
        """What is wrong and what to do, for the user."""
        ahead = self.ahead_s
        how = "ahead of" if ahead > 0 else "behind"
        others = f"{self.witnesses} other node{'s' * (self.witnesses > 1)} of the directory"
        return (
            f"this machine's clock is {abs(ahead):,.0f} s {how} that of {others}; the directory's "
            "time is used here. Set the clock that is wrong (as root: timedatectl set-ntp true)"
        )
