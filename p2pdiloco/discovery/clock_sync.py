"""Clock synchronization of the directory's nodes: records expire by a shared time, not by each machine's clock.

Rules of this file:
1. The shared clock starts as the machine's wall clock and then runs with a steady clock, so setting the wall clock
   later has no effect.
2. A node that joins adopts the median time of the nodes it finds. So a machine whose clock is an hour wrong still finds
   others and is found. The first node decides the time, right or wrong.
3. After joining, only a majority of several other nodes moves the clock, so that two nodes do not chase each other.
4. Only the directory uses this time. A node that lies about its time can make records expire early, which is no worse
   than dropping them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median_low

# Smaller differences may come from latency and load, and do not matter to records that live for a minute.
TOLERANCE_S = 2.0
# Larger differences are reported to the user.
WRONG_S = 5.0
# Latest time that is accepted, in seconds since 1970; later ones are nonsense.
MOST_S = 1e11


def steady() -> float:
    """Return a steady clock in seconds. It includes suspend where the system has such a clock (CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SharedClock:
    """A clock shared with other nodes. Times are seconds since 1970."""

    def __init__(self, wall: Callable[[], float] | None = None, steady: Callable[[], float] = steady) -> None:
        self._wall = wall or time.time
        self._steady = steady
        self._base = self._wall() - steady()
        # Number of nodes in the last comparison of clocks.
        self.witnesses = 0

    def now(self) -> float:
        """Return the shared time."""
        return self._base + self._steady()

    @property
    def ahead_s(self) -> float:
        """Seconds by which this machine's wall clock is ahead of the shared time (negative: behind)."""
        return self._wall() - self.now()

    @property
    def is_wrong(self) -> bool:
        """True if the wall clock differs from the shared time by more than WRONG_S."""
        return self.witnesses > 0 and abs(self.ahead_s) > WRONG_S

    def adopt(self, theirs: Sequence[float]) -> None:
        """Adopt the median time of other nodes. ``theirs``: the lead of each over ``now``, in seconds."""
        sound = self._sound(theirs)
        if sound and abs(middle := median_low(sound)) > TOLERANCE_S:
            self._base += middle

    def compare(self, theirs: Sequence[float]) -> bool:
        """Compare clocks after joining: as ``adopt``, but only if a majority of at least two other nodes agrees.

        Returns whether to compare again soon: the clocks differ, or fewer than two nodes reported their time."""
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
        """Return a message for the user: the difference, and how to correct the clock."""
        ahead = self.ahead_s
        how = "ahead of" if ahead > 0 else "behind"
        others = f"{self.witnesses} other node{'s' * (self.witnesses > 1)} of the directory"
        return (
            f"this machine's clock is {abs(ahead):,.0f} s {how} that of {others}; the directory's "
            "time is used here. Set the clock that is wrong (as root: timedatectl set-ntp true)"
        )
