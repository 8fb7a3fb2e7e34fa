"""The learned up budget: windows of what the kernel says was delivered, for net/capacity.py.

Rules of this file:
1. Pure: time is a number; connections are any hashable names.
2. Acknowledged bytes of all connections count but those that stay on this machine: they have no link. Kernels that do
   not tell them (all but Linux) leave the budget open.
3. The receiver's budget is not learned: senders slow down by what they see delivered.
4. While nothing waits, this looks IDLE_LOOK_S apart and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from p2pdiloco.net.capacity import Capacity
from p2pdiloco.net.path import Path

WINDOW_S, WINDOW_ROUND_TRIPS = 0.1, 4
"""A window is the longer of the two, so that what was changed at its beginning shows in it."""
LOOKS = 4
"""At the queues, in a window."""
IDLE_LOOK_S = 0.25

Name = TypeVar("Name", bound=Hashable)


class Gauge(Generic[Name]):
    """See the module's rules."""

    def __init__(self) -> None:
        self.capacity = Capacity()
        self.look_s = IDLE_LOOK_S
        """When to look again."""
        self.is_local = False
        """There are connections, and none of them leaves this machine."""
        self._start: Mapping[Name, Path] | None = None
        """At the start of the window that is measured."""
        self._started_at = 0.0
        self._looks = 0
        self._is_busy = False

    def look(self, paths: Mapping[Name, Path], is_waiting: Callable[[Name], bool], now: float) -> bool:
        """What the kernel says now; ``is_waiting``: the link, and not the other side, is what it waits for. Whether a
        window ended, and the budget may have changed."""
        self.is_local = bool(paths) and all(path.is_local for path in paths.values())
        linked = {name: path for name, path in paths.items() if not path.is_local and path.acked_bytes is not None}
        if self._start is None:
            if any(map(is_waiting, linked)):
                self._begin(linked, now)
            return False
        self._is_busy &= any(map(is_waiting, self._start))
        self._looks += 1
        if self._looks < LOOKS:
            return False
        start, self._start, self.look_s = self._start, None, IDLE_LOOK_S
        is_over = now > self._started_at and all(name in linked for name in start)
        if is_over:
            delivered = sum((linked[name].acked_bytes or 0) - (start[name].acked_bytes or 0) for name in start)
            self.capacity.saw(delivered, now - self._started_at, is_busy=self._is_busy)
        if any(map(is_waiting, linked)):
            self._begin(linked, now)
        return is_over

    def reset(self) -> None:
        """What is measured does not count."""
        self._start, self.look_s = None, IDLE_LOOK_S

    def _begin(self, linked: Mapping[Name, Path], now: float) -> None:
        round_trip_s = max(path.round_trip_s for path in linked.values())
        self._start, self._started_at = linked, now
        self._looks, self._is_busy = 0, True
        self.look_s = max(WINDOW_S, WINDOW_ROUND_TRIPS * round_trip_s) / LOOKS
