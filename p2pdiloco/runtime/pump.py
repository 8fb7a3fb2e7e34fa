"""The turns of an endpoint in an event loop: what happened is told, what it wants to send is written, a timer set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pdiloco.net.connection import Connection
from p2pdiloco.net.endpoint import Endpoint
from p2pdiloco.net.events import Event
from p2pdiloco.net.rate_limit import TURN_BYTES
from p2pdiloco.net.send_queue import Slice

LEAST_WAIT_S = 0.001
"""Event loops count in milliseconds; what waits for less would spin."""


class Pump:
    """Call ``turn`` after everything that happens to ``endpoint``. ``start`` it within the event loop."""

    def __init__(
        self, endpoint: Endpoint, tell: Callable[[Event], None], write: Callable[[Connection, Slice], None]
    ) -> None:
        self._endpoint = endpoint
        self._tell = tell
        self._write = write
        self._timer: tuple[float, asyncio.Handle] | None = None
        self._is_in_turn = False
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """No turn comes by itself any more."""
        if self._timer is not None:
            self._timer[1].cancel()
            self._timer = None

    def now(self) -> float:
        return self._loop.time()

    def turn(self, bulk_bytes: int = 0) -> None:
        """Hand out what happened and write what is to be written, until there is nothing; then set the timer."""
        if self._is_in_turn:
            return
        self._is_in_turn, endpoint, has_sent = True, self._endpoint, False
        try:
            while True:
                now = self._loop.time()
                for event in endpoint.events(now):
                    self._tell(event)
                if not bulk_bytes and not endpoint.has_control:
                    break
                has_sent = True
                for connection, piece in endpoint.to_send(now, bulk_bytes):
                    self._write(connection, piece)
                bulk_bytes = 0
                if not endpoint.has_events and not endpoint.has_control:
                    break
        finally:
            self._is_in_turn = False
            if has_sent or endpoint.has_new_deadline or endpoint.has_events:
                self._set_timer()

    def turn_soon(self) -> None:
        """A turn with bulk, when the event loop comes round."""
        if not self._is_in_turn:
            self._set(self._loop.time(), self._loop.time())

    def _set_timer(self) -> None:
        now = self._loop.time()
        if self._endpoint.has_events:
            self._set(now, now)  # The user's defect has ended the turn.
        elif self._timer is None or self._timer[0] > now:
            at = self._endpoint.next_deadline()
            if at is not None:
                self._set(at, now)

    def _set(self, at: float, now: float) -> None:
        """One timer: an earlier one stays."""
        if self._timer is not None:
            if self._timer[0] <= at:
                return
            self._timer[1].cancel()
        if at <= now:
            handle = self._loop.call_soon(self._wake)
        else:
            handle = self._loop.call_at(max(at, now + LEAST_WAIT_S), self._wake)
        self._timer = (at, handle)

    def _wake(self) -> None:
        self._timer = None
        self._endpoint.wake(self._loop.time())
        self.turn(TURN_BYTES)
