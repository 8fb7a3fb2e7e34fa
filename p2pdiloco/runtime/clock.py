"""The event loop's clock as an interface (event loops are one implementation, a test's is the other), and a timer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

LEAST_WAIT_S = 0.001
"""Event loops count in milliseconds; what waits for less would spin."""


class Handle(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """What event loops have."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None], /) -> Handle: ...

    def call_soon(self, callback: Callable[[], None], /) -> Handle: ...


class Timer:
    """At most one call that is due; setting an earlier time replaces it."""

    def __init__(self, clock: Callable[[], Clock]) -> None:
        self._clock = clock
        self._handle: Handle | None = None
        self._at = 0.0

    @property
    def is_set(self) -> bool:
        return self._handle is not None

    def set(self, at: float, action: Callable[[], None]) -> None:
        """Call ``action`` at time ``at``, or in the next turn of the event loop if that is past."""
        clock = self._clock()
        now = clock.time()
        at = max(at, now)
        if self._handle is not None:
            if self._at <= at:
                return
            self._handle.cancel()

        def run() -> None:
            self._handle = None
            action()

        self._at = at
        self._handle = clock.call_soon(run) if at <= now else clock.call_at(max(at, now + LEAST_WAIT_S), run)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
