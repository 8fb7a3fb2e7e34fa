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
    """One of our requests."""

    connection: ConnectionId
    number: int


class IncomingRequest(Struct, frozen=True):
    """One of the peer's requests."""

    connection: ConnectionId
    number: int


# --------------------------------------------------------------------------------------------------- for the user


class Connected(Struct, frozen=True):
    """The peer of ``connection`` can be sent to."""

    connection: ConnectionId


class Disconnected(Struct, frozen=True):
    """The peer is gone. What was queued for it is lost."""

    connection: ConnectionId
    reason: str


class TwinRefused(Struct, frozen=True):
    """Two processes have the identity of ``kept``'s peer: the earlier one came back as ``connection``, and was refused.
    Told once a peer."""

    connection: ConnectionId
    kept: ConnectionId


class Message(Struct, frozen=True):
    """A message came. ``payload`` is the user's own, writable memory. ``Endpoint.hold``: it is not taken yet."""

    connection: ConnectionId
    body: bytes
    payload: memoryview | None


class Offered(Struct, frozen=True):
    """A payload of ``size`` bytes is to come with a message. ``Endpoint.accept`` takes it, before the next event is
    looked at; else it is refused, and the sender stops."""

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
    """The peer asks: ``Endpoint.answer`` or ``Endpoint.refuse``."""

    request: IncomingRequest
    body: bytes


class RequestWithdrawn(Struct, frozen=True):
    """Nobody waits for this answer any more."""

    request: IncomingRequest


class AnswerReceived(Struct, frozen=True):
    """The answer to a question of ours."""

    request: OutgoingRequest
    response: Response


class RequestFailed(Struct, frozen=True):
    """There will be no answer."""

    request: OutgoingRequest
    error: RequestError


# --------------------------------------------------------------------------------------------------- for the sockets


class Proved(Struct, frozen=True):
    """The handshake is done."""

    connection: ConnectionId


class Failed(Struct, frozen=True):
    """There will be no proof: HandshakeError, or ConnectionError if the connection was lost before."""

    connection: ConnectionId
    error: Exception


class Closing(Struct, frozen=True):
    """Close the connection's socket: ``is_flushed`` after all that was written is out, else at once. Then say
    ``Endpoint.lost``."""

    connection: ConnectionId
    is_flushed: bool


class Ended(Struct, frozen=True):
    """The connection's last event: its id names nothing any more."""

    connection: ConnectionId
    reason: str


class Paced(Struct, frozen=True):
    """Let the kernel send at most at this rate on the connection; None: no limit."""

    connection: ConnectionId
    bytes_per_s: float | None


class LaneWanted(Struct, frozen=True):
    """Dial a further connection beside ``primary``, and tell ``Endpoint.lane_dialled`` whether that went well."""

    primary: ConnectionId
    lane: int
    bond: bytes


class PathInfoWanted(Struct, frozen=True):
    """Tell ``Endpoint.saw`` what the kernel knows of these connections."""

    connections: tuple[ConnectionId, ...]


class UplinkMeasured(Struct, frozen=True):
    """What the link up carries was measured anew."""

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
