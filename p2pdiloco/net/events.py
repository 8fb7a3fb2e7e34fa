"""Events that an endpoint hands to whoever drives it.

The first group is for the user of the transport, the second for whoever holds the sockets. Events name connections by
their ids; ``Endpoint.connection`` gives the connection, until its ``Ended`` was handed out.
"""

from __future__ import annotations

from typing import NewType

from msgspec import Struct

from p2pdiloco.net.frames import Start
from p2pdiloco.wire.request_reply import RequestError, Response

ConnectionId = NewType("ConnectionId", int)
"""Names one connection of an endpoint; never used twice."""


class OutgoingRequest(Struct, frozen=True):
    """Names one of our requests."""

    connection: ConnectionId
    number: int


class IncomingRequest(Struct, frozen=True):
    """Names one of the peer's requests."""

    connection: ConnectionId
    number: int


# --------------------------------------------------------------------------------------------------- for the user


class Connected(Struct, frozen=True):
    """The peer of ``connection`` can be sent to."""

    connection: ConnectionId


class Disconnected(Struct, frozen=True):
    """The peer of ``connection`` is gone. What was queued for it is lost."""

    connection: ConnectionId
    reason: str


class TwinRefused(Struct, frozen=True):
    """Two processes have the identity of one peer: the earlier one came back as ``connection``, and was refused, since
    the later one is connected as ``kept``. Reported once a peer."""

    connection: ConnectionId
    kept: ConnectionId


class Message(Struct, frozen=True):
    """A message. ``payload`` is the user's own, writable memory. ``Endpoint.hold_payload`` if the user has not taken it
    yet."""

    connection: ConnectionId
    body: bytes
    payload: memoryview | None


class Offered(Struct, frozen=True):
    """A payload of ``size`` bytes is to come with a message. Call ``Endpoint.accept_payload`` before the next event is
    taken; else it is refused, and the sender stops."""

    connection: ConnectionId
    receiver: ConnectionId
    """The connection, or the lane of it, over which the payload comes."""
    stream: int
    start: Start
    body: bytes

    @property
    def size(self) -> int:
        return self.start.total


class RequestReceived(Struct, frozen=True):
    """A request of the peer's: call ``Endpoint.send_answer`` or ``Endpoint.refuse_request``."""

    request: IncomingRequest
    body: bytes


class RequestWithdrawn(Struct, frozen=True):
    """The peer does not want the answer to its request any more."""

    request: IncomingRequest


class AnswerReceived(Struct, frozen=True):
    """The answer to a request of ours."""

    request: OutgoingRequest
    response: Response


class RequestFailed(Struct, frozen=True):
    """A request of ours gets no answer."""

    request: OutgoingRequest
    error: RequestError


# --------------------------------------------------------------------------------------------------- for the sockets


class Proved(Struct, frozen=True):
    """The peer of ``connection`` has proved its identity."""

    connection: ConnectionId


class Failed(Struct, frozen=True):
    """The handshake has failed: HandshakeError, or ConnectionError if the connection was lost before."""

    connection: ConnectionId
    error: Exception


class Closing(Struct, frozen=True):
    """Close the connection's socket: after all that was written is out (``is_flushed``), or at once. Then call
    ``Endpoint.handle_connection_lost``."""

    connection: ConnectionId
    is_flushed: bool


class Ended(Struct, frozen=True):
    """The connection's last event: its id names nothing any more."""

    connection: ConnectionId
    reason: str


class Paced(Struct, frozen=True):
    """Have the kernel send at most at this rate on the connection; None: no limit."""

    connection: ConnectionId
    bytes_per_s: float | None


class LaneWanted(Struct, frozen=True):
    """Dial a further connection beside ``primary``, then call ``Endpoint.handle_lane_dialled``."""

    primary: ConnectionId
    lane: int
    bond: bytes


class PathInfoWanted(Struct, frozen=True):
    """Call ``Endpoint.handle_path_info`` with what the kernel knows of these connections."""

    connections: tuple[ConnectionId, ...]


class UplinkMeasured(Struct, frozen=True):
    """A new estimate of what the link carries upwards."""

    bytes_per_s: float


Event = (
    Connected
    | Disconnected
    | TwinRefused
    | Message
    | Offered
    | RequestReceived
    | RequestWithdrawn
    | AnswerReceived
    | RequestFailed
    | Proved
    | Failed
    | Closing
    | Ended
    | Paced
    | LaneWanted
    | PathInfoWanted
    | UplinkMeasured
)
