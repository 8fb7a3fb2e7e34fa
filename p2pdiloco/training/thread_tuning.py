"""Thread tuning: finds the number of torch threads with the fastest steps under the machine's present load.

Rules of this file:
1. Real steps are measured. Each number of threads is tried for a few steps, and the median counts. Of numbers that are
   nearly equally fast, the smallest is chosen, because others may need the remaining cores.
2. The measurement is repeated when steps have become much slower or faster for a while, because the load has changed.
"""

from __future__ import annotations

import statistics
from collections import deque

# Steps after a change that do not count, while threads start and caches fill.
WARM = 2
# Counted steps per number of threads.
TRIED = 7
# A larger number must be faster by this share.
SPARED = 0.05
# Steps that are slower or faster by this factor show a changed load.
CHANGED = 1.5
# Number of steps whose median is watched.
WATCHED = 20
# Steps between two rounds of trials.
REST = 200


class ThreadChoice:
    """Chooses the number of threads of one learner, at most ``most``. It is told each step's time."""

    def __init__(self, most: int) -> None:
        self.candidates = _halved(max(1, most))
        # The number of threads to train with now.
        self.threads = self.candidates[0]
        self._left = list(self.candidates)
        self._medians: dict[int, float] = {}
        self._times: list[float] = []
        self._recent: deque[float] = deque(maxlen=WATCHED)
        self._usual_s = 0.0
        self._since = 0

    def stepped(self, seconds: float) -> int | None:
        """Record a step's time; return the new number of threads if it changes."""
        if len(self.candidates) == 1:
            return None
        return self._try(seconds) if self._left else self._watch(seconds)

    def _try(self, seconds: float) -> int | None:
        self._times.append(seconds)
        if len(self._times) < WARM + TRIED:
            return None
        self._medians[self._left.pop(0)] = statistics.median(self._times[WARM:])
        self._times.clear()
        if self._left:
            return self._use(self._left[0])
        best = min(self._medians.values())
        chosen = min(number for number, median in self._medians.items() if median <= best * (1.0 + SPARED))
        self._usual_s, self._since = self._medians[chosen], 0
        self._recent.clear()
        return self._use(chosen)

    def _watch(self, seconds: float) -> int | None:
        self._recent.append(seconds)
        self._since += 1
        if self._since < REST or len(self._recent) < WATCHED:
            return None
        now_s = statistics.median(self._recent)
        if self._usual_s / CHANGED <= now_s <= self._usual_s * CHANGED:
            return None
        self._left, self._medians = list(self.candidates), {}
        return self._use(self._left[0])

    def _use(self, number: int) -> int | None:
        changed, self.threads = number != self.threads, number
        return number if changed else None


def _halved(most: int) -> list[int]:
    """Return ``most``, its half, and so on down to 1."""
    found = []
    while most:
        found.append(most)
        most //= 2
    return found
