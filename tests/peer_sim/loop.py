"""An event loop whose time is a number: nothing waits, and the next timer that is due comes at once."""

from __future__ import annotations

import asyncio
from typing import Any

MOST_ROUNDS = 20_000
"""Of the loop, in which time stands still: more than any seed needs, less than anybody waits for."""


class StandstillError(Exception):
    """Things go on for ever, and time does not."""


class NothingLeftError(Exception):
    """Nothing is scheduled any more: whoever still waits would wait for ever."""


class _Nowhere:
    """In the place of a selector: instead of waiting, time goes on."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._rounds = 0

    def select(self, timeout: float | None) -> list[Any]:
        """As if ``timeout`` seconds had passed."""
        if timeout is None:
            raise NothingLeftError
        self._rounds = 0 if timeout else self._rounds + 1
        if self._rounds > MOST_ROUNDS:
            raise StandstillError
        self._loop.pass_time(timeout)
        return []

    def close(self) -> None:
        """Nothing was opened."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Everything happens in the order of its time, and what is due at once in the order in which it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._time = 0.0
        self._selector = _Nowhere(self)

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._time

    def pass_time(self, seconds: float) -> None:
        """Time goes on."""
        self._time += seconds

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps."""
