"""Context of an endpoint: state shared by its connections, its event queue, and its deadlines.

The components of an endpoint write into it and never call upwards; ``net/endpoint.py`` reads it.
Keys of deadlines are hashable tuples or enum members.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import Enum

from p2pdiloco.net.abuse_limits import Reputation
from p2pdiloco.net.events import ConnectionId, Event
from p2pdiloco.net.flow_control import Granter, Grants
from p2pdiloco.net.handshake import HandshakeFactory
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.net.traffic_shaping import Shaper
from p2pdiloco.timing import Timers
from p2pdiloco.wire.buffer_pool import Blocks


class Due(Enum):
    """Kind of a deadline: the first element of its key, or the whole key."""

    CONNECTION = "connection"
    """With the connection: the connection closes."""
    REQUEST = "request"
    """With the connection and the request's number: this peer's request fails."""
    ANSWER = "answer"
    """With the connection and the request's number: the peer's request is refused."""
    PATH_INFO = "path info"
    """PathInfoWanted is due."""


class EndpointContext:
    """State that all connections of one endpoint share: limits, budgets, memory, events and deadlines."""

    def __init__(self, handshake_factory: HandshakeFactory, limits: TransportLimits) -> None:
        self.limits = limits.connection
        self.handshake_factory = handshake_factory
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
        """Time of the last call from outside."""
        self.deadlines: Timers[Hashable] = Timers()
        self.events: deque[Event] = deque()
        """Events that have not been handed out yet."""
        self.touched: dict[ConnectionId, None] = {}
        """Connections with new output or that have ended, the longest waiting first."""
        self.unread: dict[ConnectionId, None] = {}
        """Connections with received bytes that have not been parsed yet."""

    def emit(self, event: Event) -> None:
        """Queue an event for the endpoint's driver."""
        self.events.append(event)

    def touch(self, connection: ConnectionId) -> None:
        """Have ``to_send`` look at ``connection``: something was queued, or it has ended."""
        self.touched[connection] = None
