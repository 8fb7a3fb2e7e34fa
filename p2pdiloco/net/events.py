"""What an endpoint tells whoever drives it.

The first group is for the user of the transport, the second for whoever holds the sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from p2pdiloco.net.frames import Start
from p2pdiloco.wire.request_reply import RequestError, Response

if TYPE_CHECKING:
    from p2pdiloco.net.connection import Connection
    from p2pdiloco.net.session import Session


class Question(Struct, frozen=True):
    """One of our requests."""

    connection: Connection
    number: int


class Asking(Struct, frozen=True):
    """One of the peer's requests."""

    connection: Connection
    number: int


# --------------------------------------------------------------------------------------------------- for the user


class Connected(Struct, frozen=True):
    """The peer of ``connection`` can be sent to."""

    connection: Connection


class Disconnected(Struct, frozen=True):
    """The peer is gone. What was queued for it is lost."""

    connection: Connection
    reason: str


class TwinRefused(Struct, frozen=True):
    """Two processes have the identity of ``kept``'s peer: the earlier one came back as ``connection``, and was refused.
    Told once a peer."""

    connection: Connection
    kept: Connection


class Message(Struct, frozen=True):
    """A message came. ``payload`` is the user's own, writable memory. ``Endpoint.hold``: it is not taken yet."""

    connection: Connection
    body: bytes
    payload: memoryview | None


class Offered(Struct, frozen=True):
    """A payload of ``size`` bytes is to come with a message. ``Endpoint.accept`` takes it, before the next event is
    looked at; else it is refused, and the sender stops."""

    connection: Connection
    receiver: Session
    """Of the connection or of one of its lanes."""
    stream: int
    start: Start
    body: bytes

    @property
    def size(self) -> int:
        return self.start.total


class Asked(Struct, frozen=True):
    """The peer asks: ``Endpoint.answer`` or ``Endpoint.refuse``."""

    asking: Asking
    body: bytes


class Withdrawn(Struct, frozen=True):
    """Nobody waits for this answer any more."""

    asking: Asking


class Answered(Struct, frozen=True):
    """The answer to a question of ours."""

    question: Question
    response: Response


class Unanswered(Struct, frozen=True):
    """There will be no answer."""

    question: Question
    error: RequestError


# --------------------------------------------------------------------------------------------------- for the sockets


class Proved(Struct, frozen=True):
    """The handshake is done."""

    connection: Connection


class Failed(Struct, frozen=True):
    """There will be no proof: HandshakeError, or ConnectionError if the connection was lost before."""

    connection: Connection
    error: Exception


class Closing(Struct, frozen=True):
    """Close the connection's socket: ``is_flushed`` after all that was written is out, else at once. Then say
    ``Endpoint.lost``."""

    connection: Connection
    is_flushed: bool


class Ended(Struct, frozen=True):
    """The last of a connection."""

    connection: Connection
    reason: str


class Paced(Struct, frozen=True):
    """Let the kernel send at most at this rate on the connection; None: no limit."""

    connection: Connection
    bytes_per_s: float | None


class LaneWanted(Struct, frozen=True):
    """Dial a further connection beside ``primary``, and tell ``Endpoint.lane_dialled`` whether that went well."""

    primary: Connection
    lane: int
    bond: bytes


class LookWanted(Struct, frozen=True):
    """Tell ``Endpoint.saw`` what the kernel knows of these connections."""

    connections: tuple[Connection, ...]


class Learned(Struct, frozen=True):
    """What the link up carries was measured anew."""

    bytes_per_s: float


Event = (
    Connected
    | Disconnected
    | TwinRefused
    | Message
    | Offered
    | Asked
    | Withdrawn
    | Answered
    | Unanswered
    | Proved
    | Failed
    | Closing
    | Ended
    | Paced
    | LaneWanted
    | LookWanted
    | Learned
)
