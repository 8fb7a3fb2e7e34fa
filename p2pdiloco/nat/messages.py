"""Messages of a rendezvous: requests to a *meeting point* that both peers can dial, and what is sent on a *line* to it.

Requests go over ordinary connections, so both keys are proved. A line is a TCP connection of its own to the meeting
point's data port. It begins with 34 bytes: OPENING, the local port, and a ticket that the point gave this peer alone:

    line -> point   OPENING, u16 local port, ticket
    point -> line   u16 length, Seen                  both lines are there: each is told how the point sees both
    line -> point   RELAY                             no direct connection came about
    point -> line   RELAYED                           from here on: the other line's bytes
    point -> line   REFUSED, u8 length, text          not here

A line that begins with PROBE instead is a dial-back: whoever listens answers with ``echo`` of the token in it.

Rules of this file:
1. Bytes only. What is out of bounds is ValueError.
2. What a line carries after RELAYED is TLS between the two, which signs the listener's certificate with both keys: the
   point can neither read nor change it.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdiloco.wire.control_messages import decode_as, encode
from p2pdiloco.wire.directory_records import PeerRecord

OPENING = b"p2pdiloco line 1"
PROBE = b"p2pdiloco dial 1"
TICKET_BYTES = 16
OPENING_BYTES = len(OPENING) + 2 + TICKET_BYTES
RELAY, RELAYED, REFUSED = b"R", b".", b"!"
SEEN_LIMIT = 256
TEXT_LIMIT = 255
ECHO_CONTEXT = b"p2pdiloco dial-back 1\x00"
_PORT = struct.Struct(">H")

Port = Annotated[int, Meta(ge=1, le=65535)]
Host = Annotated[str, Meta(min_length=2, max_length=45)]
Peer = Annotated[str, Meta(min_length=1, max_length=64)]
Ticket = Annotated[bytes, Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]


class Attend(msgspec.Struct, frozen=True, array_like=True, tag="attend?"):
    """The sender may be called over this connection. Answer: ``Attended``."""

    ports: Annotated[tuple[Port, ...], Meta(max_length=2)] = ()
    """To dial back, at the address that this connection comes from, and nowhere else."""
    token: Annotated[bytes, Meta(max_length=TICKET_BYTES)] = b""
    """Known to the listener at the first port, which proves itself by it."""


class Attended(msgspec.Struct, frozen=True, array_like=True):
    """How a peer is seen, and which of its ports answer from outside."""

    host: Host
    port: Port
    answers: Annotated[tuple[bool, ...], Meta(max_length=2)] = ()
    relays: bool = False


class Meet(msgspec.Struct, frozen=True, array_like=True, tag="meet?"):
    """Introduce the sender to ``peer``. Answer: ``Introduced``, or a refusal with the reason."""

    peer: Peer
    dials: bool
    """The asker is the dialler of what comes about, else its listener."""


class Introduced(msgspec.Struct, frozen=True, array_like=True):
    """Open a line with this ticket."""

    ticket: Ticket


class Called(msgspec.Struct, frozen=True, array_like=True, tag="called?"):
    """From the meeting point: ``peer`` wants to meet the receiver. Any answer but a refusal agrees."""

    peer: Peer
    ticket: Ticket
    dials: bool
    """The receiver is the dialler."""


class Reachable(msgspec.Struct, frozen=True, array_like=True, tag="reach."):
    """To connected peers: how the sender can be reached now. The answer is empty."""

    record: PeerRecord


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """Where the two lines come from, as the meeting point sees it."""

    host: Host
    port: Port
    other_host: Host
    other_port: Port
    is_hopeful: bool
    """Both come from the ports that they say they have: a router in between, if any, keeps ports."""


def encode_opening(ticket: bytes, local_port: int, start: bytes = OPENING) -> bytes:
    """The first bytes of a line."""
    return start + _PORT.pack(local_port) + ticket


def decode_opening(data: bytes) -> tuple[bytes, int, bytes]:
    """OPENING or PROBE, the local port that is claimed, and the ticket.

    Raises:
        ValueError: no line.
    """
    start, rest = data[: len(OPENING)], data[len(OPENING) :]
    if len(data) != OPENING_BYTES or start not in (OPENING, PROBE):
        raise ValueError("no line begins so")
    return start, _PORT.unpack_from(rest)[0], rest[_PORT.size :]


def encode_seen(seen: Seen) -> bytes:
    body = encode(seen)
    return _PORT.pack(len(body)) + body


def seen_size(head: bytes) -> int:
    """Bytes of the Seen that follows these two.

    Raises:
        ValueError: too many.
    """
    (size,) = _PORT.unpack(head)
    if not 0 < size <= SEEN_LIMIT:
        raise ValueError(f"{size} bytes are no Seen")
    return int(size)


def decode_seen(body: bytes) -> Seen:
    """Raises ValueError if it is malformed."""
    return decode_as(body, Seen)


def encode_refusal(text: str) -> bytes:
    data = text.encode()[:TEXT_LIMIT]
    return REFUSED + bytes([len(data)]) + data


def echo(token: bytes) -> bytes:
    """Answer of a listener to a probe with a token that it knows."""
    return hashlib.sha256(ECHO_CONTEXT + token).digest()[:TICKET_BYTES]
