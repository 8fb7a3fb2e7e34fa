"""The context of an endpoint: what its connections share, its queue of events, and its deadlines.

The parts of an endpoint write into it and never call upwards; ``net/endpoint.py`` reads it.

Rules of this file:
1. Pure: time is a number.
2. A key has one deadline; setting it again replaces it. Keys are hashable tuples or enum members.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from enum import Enum

from p2pdiloco.net.abuse_limits import Reputation
from p2pdiloco.net.events import ConnectionId, Event
from p2pdiloco.net.flow_control import Granter, Grants
from p2pdiloco.net.handshake import Greeter
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.net.rate_limit import Shaper
from p2pdiloco.wire.buffer_pool import Blocks


class Deadlines:
    """When which key is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Hashable]] = []
        self._current: dict[Hashable, int] = {}
        """The entry that counts, of each key."""
        self._counter = itertools.count()
        self.has_new = False
        """Something was set since ``next`` was asked."""

    def __len__(self) -> int:
        return len(self._current)

    def set(self, key: Hashable, at: float) -> None:
        self.has_new = True
        number = self._current[key] = next(self._counter)
        heapq.heappush(self._heap, (at, number, key))
        if len(self._heap) > 64 + 4 * len(self._current):
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def cancel(self, key: Hashable) -> None:
        self._current.pop(key, None)

    def next(self) -> float | None:
        """When something is due; None: nothing is waited for."""
        self.has_new = False
        while self._heap and self._current.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Hashable | None:
        """The next key that is due, which is forgotten with that; None: none is."""
        at = self.next()
        if at is None or at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._current[key]
        return key


class Due(Enum):
    """Kind of a deadline: the first element of its key, or all of it."""

    CONNECTION = "connection"
    """With the connection: it closes."""
    REQUEST = "request"
    """With the connection and the request's number: our request fails."""
    ANSWER = "answer"
    """With the connection and the request's number: the peer's request is refused."""
    PATH_INFO = "path info"
    """PathInfoWanted is due."""


class EndpointContext:
    """State that all connections of one endpoint share: limits, budgets, memory, and what is to be done next."""

    def __init__(self, greeter: Greeter, limits: TransportLimits) -> None:
        self.limits = limits.connection
        self.greeter = greeter
        self.blocks = Blocks(limit_bytes=limits.reused_bytes)
        self.shaper: Shaper[ConnectionId] = Shaper(None if limits.up_bytes_per_s == "auto" else limits.up_bytes_per_s)
        self.grants = Grants(
            Granter(
                window_bytes=limits.connection.window_bytes,
                total_bytes=limits.window_bytes,
                bytes_per_s=limits.down_bytes_per_s,
            )
        )
        self.scores = Reputation()
        self.now = 0.0
        """The time of the last call from outside."""
        self.deadlines = Deadlines()
        self.events: deque[Event] = deque()
        """Not handed out yet."""
        self.touched: dict[ConnectionId, None] = {}
        """Connections of which something was queued or has ended, longest waiting first."""
        self.unread: dict[ConnectionId, None] = {}
        """Connections with received bytes that were not parsed yet."""

    def emit(self, event: Event) -> None:
        """Queue an event for whoever drives the endpoint."""
        self.events.append(event)

    def touch(self, connection: ConnectionId) -> None:
        """Something of ``connection`` was queued or has ended: look whether it has something to send."""
        self.touched[connection] = None
