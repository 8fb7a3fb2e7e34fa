"""Deadlines by key: the machine's only notion of time to come."""

from __future__ import annotations

from heapq import heappop, heappush

Key = tuple[str, int]
"""What to look at when the time comes: a topic and, for most, a shard."""


class Alarms:
    """At most one deadline per key. Setting a key again moves it."""

    __slots__ = ("_at", "_heap")

    def __init__(self) -> None:
        self._at: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []

    def set(self, key: Key, at: float) -> None:
        """Ring ``key`` at ``at`` instead of whenever it was set to."""
        if self._at.get(key) != at:
            self._at[key] = at
            heappush(self._heap, (at, key))

    def cancel(self, key: Key) -> None:
        """Do not ring ``key``."""
        self._at.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline."""
        heap, at = self._heap, self._at
        while heap and at.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop_if_due(self, key: Key, now: float) -> bool:
        """Whether the time of ``key`` has come; then it is removed."""
        is_due = self._at.get(key, now + 1.0) <= now
        if is_due:
            del self._at[key]
        return is_due

    def pop_due(self, now: float) -> Key | None:
        """The earliest key whose time has come, now removed; None if there is none."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            at, key = heappop(heap)
            if self._at.get(key) == at:
                del self._at[key]
                return key
        return None

    def __contains__(self, key: Key) -> bool:
        return key in self._at

    def __len__(self) -> int:
        return len(self._at)
