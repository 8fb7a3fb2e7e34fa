"""Events that an endpoint hands to its driver.

The first group is for the user of the transport, the second for the owner of the sockets. Events name connections by
their ids; ``Endpoint.connection`` returns the connection until its ``Ended`` was handed out.
"""

from __future__ import annotations

from typing import Any, NewType

from msgspec import Struct

from p2pdiloco.net.frames import Start
from p2pdiloco.wire.request_reply import RequestError, Response

ConnectionId = NewType("ConnectionId", int)
"""Names one connection of an endpoint; never used twice."""


class OutgoingRequest(Struct, frozen=True):
    """Names a request of this peer."""

    connection: ConnectionId
    number: int


class IncomingRequest(Struct, frozen=True):
    """Names a request of the other peer."""

    connection: ConnectionId
    number: int


# --------------------------------------------------------------------------------------------------- for the user


class Connected(Struct, frozen=True):
    """The peer of ``connection`` is connected: messages can be sent to it."""

    connection: ConnectionId


class Disconnected(Struct, frozen=True):
    """The peer of ``connection`` is disconnected. Queued data for it is lost."""

    connection: ConnectionId
    reason: str


class TwinRefused(Struct, frozen=True):
    """Two processes use the identity of one peer. Reported once a peer.

    The earlier one came back as ``connection`` and was refused, because the later one is connected as ``kept``.
    """

    connection: ConnectionId
    kept: ConnectionId


class Message(Struct, frozen=True):
    """A message has arrived. ``payload`` is writable memory that belongs to the user.

    Call ``Endpoint.hold_payload`` if the user has not taken it yet.
    """

    connection: ConnectionId
    body: Any
    """The message's bytes; with a payload, the ``body`` passed to ``Endpoint.accept_payload``."""
    payload: memoryview | None


class Offered(Struct, frozen=True):
    """A payload of ``size`` bytes will come with a message.

    Call ``Endpoint.accept_payload`` before taking the next event. Otherwise the payload is refused, and the sender
    stops.
    """

    connection: ConnectionId
    receiver: ConnectionId
    """The connection, or its lane, over which the payload comes."""
    stream: int
    start: Start
    body: bytes

    @property
    def size(self) -> int:
        return self.start.total


class RequestReceived(Struct, frozen=True):
    """The other peer sent a request: call ``Endpoint.send_answer`` or ``Endpoint.refuse_request``."""

    request: IncomingRequest
    body: bytes


class RequestWithdrawn(Struct, frozen=True):
    """The other peer has cancelled its request."""

    request: IncomingRequest


class AnswerReceived(Struct, frozen=True):
    """A request of this peer was answered."""

    request: OutgoingRequest
    response: Response


class RequestFailed(Struct, frozen=True):
    """A request of this peer gets no answer."""

    request: OutgoingRequest
    error: RequestError


# --------------------------------------------------------------------------------------------------- for the sockets


class Proved(Struct, frozen=True):
    """The peer of ``connection`` has proved its identity."""

    connection: ConnectionId


class Failed(Struct, frozen=True):
    """The handshake has failed, with HandshakeError, or with ConnectionError if the connection was lost before."""

    connection: ConnectionId
    error: Exception


class Closing(Struct, frozen=True):
    """Close the connection's socket, after all written data was flushed (``is_flushed``) or at once.

    Then call ``Endpoint.handle_connection_lost``.
    """

    connection: ConnectionId
    is_flushed: bool


class Ended(Struct, frozen=True):
    """Last event of the connection: its id is no longer valid."""

    connection: ConnectionId
    reason: str


class Paced(Struct, frozen=True):
    """Set the kernel's maximum send rate for the connection; None: no limit."""

    connection: ConnectionId
    bytes_per_s: float | None


class LaneWanted(Struct, frozen=True):
    """Dial another connection beside ``primary``, then call ``Endpoint.handle_lane_dialled``."""

    primary: ConnectionId
    lane: int
    bond: bytes


class PathInfoWanted(Struct, frozen=True):
    """Call ``Endpoint.handle_path_info`` with the kernel's measurements of these connections."""

    connections: tuple[ConnectionId, ...]


class UplinkMeasured(Struct, frozen=True):
    """New estimate of the link's upload rate."""

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
