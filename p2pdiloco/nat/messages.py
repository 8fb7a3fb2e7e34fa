"""Messages of a rendezvous: requests to a *rendezvous server* that both peers can dial, and bytes on a *line* to it.

Requests use ordinary connections, on which both ends have proved their keys. A line is a separate TCP connection to the
server's data port. It begins with 34 bytes: OPENING, the local port, and a ticket that the server issued to this peer:

    line -> server   OPENING, u16 local port, ticket
    server -> line   u16 length, Seen                  both lines are open: the observed addresses of both
    line -> server   RELAY                             hole punching has failed
    server -> line   RELAYED                           from here on: the bytes of the other line
    server -> line   REFUSED, u8 length, text          an error

A line that begins with PROBE instead is a dial-back: the listener answers with ``echo`` of the token in it.

Rules of this file:
1. Bytes only. Data out of bounds raises ValueError.
2. After RELAYED a line carries TLS between the two peers, in which both keys sign the listener's certificate. The
   server can neither read nor change it.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdiloco.wire.control_messages import encode
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
    """Request to register with the server, which may then call the sender on this connection. Answer: ``Attended``."""

    ports: Annotated[tuple[Port, ...], Meta(max_length=2)] = ()
    """Ports to dial back. The server dials them only at the address from which this connection comes."""
    token: Annotated[bytes, Meta(max_length=TICKET_BYTES)] = b""
    """Token that the listener at the first port knows, and by which it proves that it is the sender."""


class Attended(msgspec.Struct, frozen=True, array_like=True):
    """Observed address of a peer, and for each of its ports whether a dial-back succeeded."""

    host: Host
    port: Port
    answers: Annotated[tuple[bool, ...], Meta(max_length=2)] = ()


class Meet(msgspec.Struct, frozen=True, array_like=True, tag="meet?"):
    """Request to introduce the sender to ``peer``. Answer: ``Introduced``, or a refusal with the reason."""

    peer: Peer
    dials: bool
    """True if the sender takes the dialler's role in the resulting connection, else the listener's."""


class Introduced(msgspec.Struct, frozen=True, array_like=True):
    """Ticket with which the asking peer opens its line."""

    ticket: Ticket


class Called(msgspec.Struct, frozen=True, array_like=True, tag="called?"):
    """Call by the rendezvous server: ``peer`` wants to connect to the receiver. Any answer but a refusal agrees."""

    peer: Peer
    ticket: Ticket
    dials: bool
    """True if the receiver takes the dialler's role."""


class Reachable(msgspec.Struct, frozen=True, array_like=True, tag="reach."):
    """Notice to connected peers: the addresses of the sender have changed to this record. The answer is empty."""

    record: PeerRecord


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """Addresses of both lines as the rendezvous server observes them."""

    host: Host
    port: Port
    other_host: Host
    other_port: Port
    is_hopeful: bool
    """True if both observed ports equal the local ports: routers in between preserve ports, so punching may work."""


def encode_opening(ticket: bytes, local_port: int, start: bytes = OPENING) -> bytes:
    """Return the first bytes of a line."""
    return start + _PORT.pack(local_port) + ticket


def decode_opening(data: bytes) -> tuple[bytes, int, bytes]:
    """Return OPENING or PROBE, the claimed local port, and the ticket.

    Raises:
        ValueError: these are not the first bytes of a line.
    """
    start, rest = data[: len(OPENING)], data[len(OPENING) :]
    if len(data) != OPENING_BYTES or start not in (OPENING, PROBE):
        raise ValueError("these are not the first bytes of a line")
    return start, _PORT.unpack_from(rest)[0], rest[_PORT.size :]


def encode_seen(seen: Seen) -> bytes:
    """Encode a Seen with its length prefix."""
    body = encode(seen)
    return _PORT.pack(len(body)) + body


def seen_size(head: bytes) -> int:
    """Return the length of the Seen that follows its two-byte prefix ``head``.

    Raises:
        ValueError: the length is zero or above the limit.
    """
    (size,) = _PORT.unpack(head)
    if not 0 < size <= SEEN_LIMIT:
        raise ValueError(f"a Seen of {size} bytes is not valid; the limit is {SEEN_LIMIT}")
    return int(size)


def encode_refusal(text: str) -> bytes:
    """Encode a refusal; its text is cut at TEXT_LIMIT bytes."""
    data = text.encode()[:TEXT_LIMIT]
    return REFUSED + bytes([len(data)]) + data


def echo(token: bytes) -> bytes:
    """Return the answer of a listener to a probe with its token."""
    return hashlib.sha256(ECHO_CONTEXT + token).digest()[:TICKET_BYTES]
