"""Clock synchronization of the nodes of a directory: records expire by the shared time, not by the machines' clocks.

Rules of this file:
1. The shared clock begins as the machine's wall clock, and then runs with a steady clock: setting the wall clock
   changes nothing.
2. A node that joins adopts the time of the nodes that are there (their median). So a machine whose clock is an hour
   wrong finds others and is found. The first node decides the time, right or wrong.
3. Later only a majority of several others moves the clock, so that two nodes do not chase each other.
4. Only the directory uses this time. A node that lies about it can make records expire; it could also drop them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median_low

TOLERANCE_S = 2.0
"""Differences that network and load explain; they do not matter to records that live for a minute."""
WRONG_S = 5.0
"""Differences beyond this are told to the user."""
MOST_S = 1e11
"""Latest time that is accepted, in seconds since 1970."""


def steady() -> float:
    """A steady clock in seconds, which runs while the machine sleeps, if the system has one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SharedClock:
    """See the module's rules. Times are seconds since 1970."""

    def __init__(self, wall: Callable[[], float] | None = None, steady: Callable[[], float] = steady) -> None:
        self._wall = wall or time.time
        self._steady = steady
        self._base = self._wall() - steady()
        self.witnesses = 0
        """Number of nodes whose clocks were compared last."""

    def now(self) -> float:
        """The shared time."""
        return self._base + self._steady()

    @property
    def ahead_s(self) -> float:
        """How far this machine's wall clock is ahead of the shared time (negative: behind), in seconds."""
        return self._wall() - self.now()

    @property
    def is_wrong(self) -> bool:
        """Whether the wall clock differs by more than WRONG_S."""
        return self.witnesses > 0 and abs(self.ahead_s) > WRONG_S

    def adopt(self, theirs: Sequence[float]) -> None:
        """Adopt the median time of other nodes; each element is how far one of them is ahead of ``now``."""
        sound = self._sound(theirs)
        if sound and abs(middle := median_low(sound)) > TOLERANCE_S:
            self._base += middle

    def compare(self, theirs: Sequence[float]) -> bool:
        """As ``adopt``, for a node that has joined: move only if a majority of at least two others agrees.

        Returns whether to compare again soon: the clocks differ, or fewer than two others told theirs."""
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
        """Tell the user what is wrong and what to do."""
        ahead = self.ahead_s
        how = "ahead of" if ahead > 0 else "behind"
        others = f"{self.witnesses} other node{'s' * (self.witnesses > 1)} of the directory"
        return (
            f"this machine's clock is {abs(ahead):,.0f} s {how} that of {others}; the directory's "
            "time is used here. Set the clock that is wrong (as root: timedatectl set-ntp true)"
        )
