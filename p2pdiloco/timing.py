"""Rate limits, decaying counters, backoff and timers without a clock: the caller passes the time, in seconds.

Collections by key are bounded: beyond ``max_keys``, the key that was used longest ago is forgotten.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

MAX_KEYS = 4096


# -- Rate limits -------------------------------------------------------------------------------------------------------


class TokenBucket:
    """A rate limit: ``burst`` tokens at once, and ``per_s`` more in each second, up to ``burst``.

    In any ``t`` seconds at most ``burst + per_s * t`` tokens are taken, apart from those added by ``give_back`` and
    ``grant``.
    """

    __slots__ = ("_at", "_tokens", "burst", "per_s")

    def __init__(self, *, burst: float, per_s: float) -> None:
        self.burst = burst
        self.per_s = per_s
        self._tokens = burst
        self._at = 0.0

    def available(self, now: float) -> float:
        """Return the number of tokens available now."""
        passed_s, self._at = max(0.0, now - self._at), now
        self._refill(passed_s * self.per_s)
        return self._tokens

    def take(self, now: float, count: float = 1.0) -> bool:
        """Take ``count`` tokens if there are enough, else none. Return whether they were taken."""
        is_allowed = count <= self.available(now)
        if is_allowed:
            self._tokens -= count
        return is_allowed

    def wait_s(self, now: float, count: float = 1.0) -> float:
        """Return the seconds until ``count`` tokens are available; infinite if that never happens."""
        missing = count - self.available(now)
        if missing <= 0.0:
            return 0.0
        return missing / self.per_s if self.per_s > 0.0 and count <= self.burst else math.inf

    def give_back(self, count: float = 1.0) -> bool:
        """Return unused tokens to the bucket, up to ``burst``. Return whether it was not full."""
        is_missing = self._tokens < self.burst
        self._refill(count)
        return is_missing

    def grant(self, count: float) -> None:
        """Add tokens beyond ``burst``. The bucket refills by itself only once it is below ``burst`` again."""
        self._tokens += count

    def _refill(self, count: float) -> None:
        self._tokens = max(self._tokens, min(self.burst, self._tokens + count))


class RateLimiter(Generic[Key]):
    """One ``TokenBucket`` for each key."""

    def __init__(self, *, burst: float, per_s: float, max_keys: int = MAX_KEYS) -> None:
        self._burst = burst
        self._per_s = per_s
        self._max_keys = max_keys
        self._buckets: dict[Key, TokenBucket] = {}
        """Ordered by last use, the oldest first."""

    def __len__(self) -> int:
        return len(self._buckets)

    def available(self, key: Key, now: float) -> float:
        """Return the number of tokens that ``key`` has."""
        bucket = self._buckets.get(key)
        return self._burst if bucket is None else bucket.available(now)

    def take(self, key: Key, now: float, count: float = 1.0) -> bool:
        """Take ``count`` tokens of ``key`` if it has enough, else none. Return whether they were taken."""
        bucket = self._buckets.pop(key, None) or TokenBucket(burst=self._burst, per_s=self._per_s)
        self._buckets[key] = bucket
        if len(self._buckets) > self._max_keys:
            del self._buckets[next(iter(self._buckets))]
        return bucket.take(now, count)

    def give_back(self, key: Key, count: float = 1.0) -> bool:
        """Return unused tokens of ``key``, as ``TokenBucket.give_back`` does."""
        bucket = self._buckets.get(key)
        return bucket is not None and bucket.give_back(count)


# -- Decaying counter --------------------------------------------------------------------------------------------------


class DecayingCounter(Generic[Key]):
    """Counter of recent events by key. Each count halves in ``half_life_s``."""

    def __init__(self, half_life_s: float, *, max_keys: int = MAX_KEYS) -> None:
        self._half_life_s = half_life_s
        self._max_keys = max_keys
        self._counts: dict[Key, tuple[float, float]] = {}
        """Count of each key and the time of its last update, ordered by that time, the oldest first."""

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, key: Key, now: float) -> float:
        """Return the current, decayed count of ``key``."""
        count, at = self._counts.get(key, (0.0, now))
        return count * math.exp2((at - now) / self._half_life_s)

    def add(self, key: Key, now: float) -> float:
        """Count one event of ``key`` and return its new count."""
        count = self.count(key, now) + 1.0
        self._counts.pop(key, None)
        self._counts[key] = (count, now)
        if len(self._counts) > self._max_keys:
            del self._counts[next(iter(self._counts))]
        return count


# -- Backoff -----------------------------------------------------------------------------------------------------------

_MAX_DOUBLINGS = 64


class Backoff:
    """Exponential backoff: each pause is twice as long as the one before, from ``shortest_s`` to ``longest_s``."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self.failures = 0
        """Pauses begun since the last ``reset``."""

    @property
    def pause_s(self) -> float:
        """Length of the next pause, in seconds."""
        return min(self._longest_s, self._shortest_s * 2.0 ** min(self.failures, _MAX_DOUBLINGS))

    def next_s(self) -> float:
        """Return the length of the pause that begins now, and double the next one."""
        pause_s = self.pause_s
        self.failures += 1
        return pause_s

    def reset(self) -> None:
        """Start again from the shortest pause, after a success or news."""
        self.failures = 0


# -- Timers ------------------------------------------------------------------------------------------------------------


class Timers(Generic[Key]):
    """Timers, at most one for each key. Keys with the same deadline become due in the order in which they were set."""

    __slots__ = ("_current", "_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Key]] = []
        self._current: dict[Key, tuple[float, int, Key]] = {}
        """The valid entry of each key. Other entries in the heap were replaced or cancelled."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, key: Key) -> bool:
        return key in self._current

    def set(self, key: Key, at: float) -> None:
        """Set the deadline of ``key``, replacing an earlier one."""
        entry = self._current[key] = (at, next(self._numbers), key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 4 * len(self._current):
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)

    def cancel(self, key: Key) -> None:
        """Remove the deadline of ``key``, if it has one."""
        self._current.pop(key, None)

    def next(self) -> float | None:
        """Return the earliest deadline, or None."""
        while self._heap and self._current.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Key | None:
        """Remove the earliest deadline if it has passed. Return its key, or None."""
        at = self.next()
        if at is None or at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._current[key]
        return key

    def pop_if_due(self, key: Key, now: float) -> bool:
        """Remove the deadline of ``key`` if it has passed. Return whether it has."""
        entry = self._current.get(key)
        is_due = entry is not None and entry[0] <= now
        if is_due:
            del self._current[key]
        return is_due
