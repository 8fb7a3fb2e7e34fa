"""Tunes the number of torch threads to the fastest steps, whatever else the machine does.

Rules of this file:
1. It is measured with real steps: each number is tried for a few, the median counts, and of two that are nearly as fast
   the smaller one is taken, since the other cores are somebody else's.
2. It is measured again when steps have become much slower or faster for a while: the load has changed.
"""

from __future__ import annotations

import statistics
from collections import deque

WARM = 2
"""Steps after a change that do not count: threads are made, caches are filled."""
TRIED = 7
"""Steps that count, of each number."""
SPARED = 0.05
"""By so much a larger number must be faster."""
CHANGED = 1.5
"""Steps that take so many times as long as they did, or as many times less, show another load."""
WATCHED = 20
"""Steps, whose median is watched."""
REST = 200
"""Steps between two rounds of trials."""


class ThreadChoice:
    """The choice of one learner; ``most`` threads at most. Told each step's time, it says when to change."""

    def __init__(self, most: int) -> None:
        self.candidates = _halved(max(1, most))
        self.threads = self.candidates[0]
        """What to train with now."""
        self._left = list(self.candidates)
        self._medians: dict[int, float] = {}
        self._times: list[float] = []
        self._recent: deque[float] = deque(maxlen=WATCHED)
        self._usual_s = 0.0
        self._since = 0

    @property
    def is_trying(self) -> bool:
        """Whether a round of trials is under way."""
        return bool(self._left)

    def stepped(self, seconds: float) -> int | None:
        """A step has taken so long; the number of threads from now on, if that changes."""
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
    """``most``, its half, ... 1."""
    found = []
    while most:
        found.append(most)
        most //= 2
    return found
