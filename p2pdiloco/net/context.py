"""What is to be done next: what is to be told, who may have something to send, and what is due when.

The parts of an endpoint write into it and never call upwards; ``net/endpoint.py`` reads it.
Keys of deadlines are hashable tuples or enum members.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import Enum
from typing import TYPE_CHECKING, Self

from msgspec import Struct

from p2pdiloco.net.abuse_limits import Reputation
from p2pdiloco.net.flow_control import Granter, Grants
from p2pdiloco.net.handshake import Greeter
from p2pdiloco.net.limits import ConnectionLimits, TransportLimits
from p2pdiloco.net.rate_limit import Shaper
from p2pdiloco.timing import Timers
from p2pdiloco.wire.buffer_pool import Blocks

if TYPE_CHECKING:
    from p2pdiloco.net.connection import Connection
    from p2pdiloco.net.events import Event


class EventQueue:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.touched: dict[Connection, None] = {}
        """Connections of which something was queued or has ended, longest waiting first."""
        self.unread: dict[Connection, None] = {}
        """Connections to which bytes came that were not looked at."""
        self.deadlines: Timers[Hashable] = Timers()
        self.now = 0.0
        """The time of the last call from outside."""

    def tell(self, event: Event) -> None:
        self.events.append(event)

    def touch(self, connection: Connection) -> None:
        self.touched[connection] = None


# -- Endpoint context --------------------------------------------------------------------------------------------------
# What all connections of one endpoint share.


class Due(Enum):
    """What a deadline is for."""

    LIFE = "life"
    QUESTION = "question"
    ASKING = "asking"
    LOOK = "look"


class EndpointContext(Struct, frozen=True):
    limits: ConnectionLimits
    agenda: EventQueue
    blocks: Blocks
    shaper: Shaper[Connection]
    grants: Grants
    greeter: Greeter
    scores: Reputation

    @classmethod
    def of(cls, greeter: Greeter, limits: TransportLimits) -> Self:
        """Of a new endpoint."""
        granter = Granter(
            window_bytes=limits.connection.window_bytes,
            total_bytes=limits.window_bytes,
            bytes_per_s=limits.down_bytes_per_s,
        )
        return cls(
            limits=limits.connection,
            agenda=EventQueue(),
            blocks=Blocks(limit_bytes=limits.reused_bytes),
            shaper=Shaper(None if limits.up_bytes_per_s == "auto" else limits.up_bytes_per_s),
            grants=Grants(granter),
            greeter=greeter,
            scores=Reputation(),
        )
