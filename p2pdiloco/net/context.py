"""The context of an endpoint: what its connections share, its queue of events, and its deadlines.

The parts of an endpoint write into it and never call upwards; ``net/endpoint.py`` reads it.
Keys of deadlines are hashable tuples or enum members.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import Enum

from p2pdiloco.net.abuse_limits import Reputation
from p2pdiloco.net.events import ConnectionId, Event
from p2pdiloco.net.flow_control import Granter, Grants
from p2pdiloco.net.handshake import Greeter
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.net.traffic_shaping import Shaper
from p2pdiloco.timing import Timers
from p2pdiloco.wire.buffer_pool import Blocks


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
        self.deadlines: Timers[Hashable] = Timers()
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
