"""Frames: the units that one connection is made of.

A frame is a header (length of the body, kind, stream; 9 bytes, big endian) and a body. A *message* is a control body
and perhaps a payload; a payload travels as a *stream* of chunks, so that a control message never waits behind it for
more than one chunk.

    HELLO, PROOF              handshake (wire/handshake.py); nothing else but GOODBYE may come before
    MESSAGE                   a message without payload
    BULK_START                u64 payload size, control body; then its BULK_CHUNKs
    REQUEST                   u64 largest payload that the asker takes, control body; ``stream`` is the request's id
    RESPONSE                  answer without payload
    RESPONSE_START            u64 payload size, control body; then its RESPONSE_CHUNKs
    REFUSAL                   why a request is not answered (UTF-8)
    *_CANCEL                  receiver to sender: stop this stream; the sender answers with *_ABORT
    *_ABORT                   sender to receiver: the rest of this stream will not come
    PART_START                u64 size of the part, where it belongs (wire/parts.py), control body; then PART_CHUNKs
    PART_ACK                  receiver to sender: this part is there
    CREDIT                    u64: chunk bytes that the other side may send on this connection, since its start
    GOODBYE                   a code byte and the reason (UTF-8); the last frame of its direction

Rules of this file:
1. Bytes only: no sockets, no clock, no state.
2. Each kind has a largest body, checked on the header alone, before anything is allocated.
3. What breaks a rule is FrameError: the peer's fault, and the end of its connection.
4. Bulk stream ids and request ids are two spaces, each numbered by the side that begins (sender, asker).
"""

from __future__ import annotations

import struct
from enum import IntEnum

from msgspec import Struct

HEADER = struct.Struct(">IBI")
SIZE = struct.Struct(">Q")

CONTROL_LIMIT = 1 << 20
"""Bytes of a control body."""
PART_HEADER_LIMIT = 32
"""Bytes that say where a part belongs."""
CHUNK_LIMIT = 256 << 10
"""Bytes of a chunk."""
HANDSHAKE_LIMIT = 4096
"""Bytes of a HELLO or PROOF."""
TEXT_LIMIT = 1024
"""Bytes of the text in a GOODBYE or a REFUSAL."""
PAYLOAD_LIMIT = 1 << 40
"""Bytes that a payload may claim; what is admitted is the receiver's decision."""
FIRST_CREDIT = 64 << 10
"""Chunk bytes that may be sent on a connection before its first CREDIT."""
STREAM_WRAP = 1 << 32
OPEN_STREAMS_LIMIT = 64
"""Streams that a sender may have open at once in one direction; a receiver takes more for an attack."""


class FrameError(ValueError):
    """The other side broke the format."""


class Kind(IntEnum):
    HELLO = 1
    PROOF = 2
    MESSAGE = 3
    BULK_START = 4
    BULK_CHUNK = 5
    BULK_CANCEL = 6
    BULK_ABORT = 7
    REQUEST = 8
    RESPONSE = 9
    RESPONSE_START = 10
    RESPONSE_CHUNK = 11
    RESPONSE_CANCEL = 12
    RESPONSE_ABORT = 13
    REFUSAL = 14
    GOODBYE = 15
    CREDIT = 16
    PART_START = 17
    PART_CHUNK = 18
    PART_CANCEL = 19
    PART_ABORT = 20
    PART_ACK = 21


HANDSHAKE_KINDS = frozenset({Kind.HELLO, Kind.PROOF, Kind.GOODBYE})
OPEN_KINDS = frozenset(Kind) - {Kind.HELLO, Kind.PROOF}

BODY_LIMITS: dict[Kind, int] = {
    Kind.HELLO: HANDSHAKE_LIMIT,
    Kind.PROOF: HANDSHAKE_LIMIT,
    Kind.MESSAGE: CONTROL_LIMIT,
    Kind.BULK_START: CONTROL_LIMIT + SIZE.size,
    Kind.BULK_CHUNK: CHUNK_LIMIT,
    Kind.BULK_CANCEL: 0,
    Kind.BULK_ABORT: 0,
    Kind.REQUEST: CONTROL_LIMIT + SIZE.size,
    Kind.RESPONSE: CONTROL_LIMIT,
    Kind.RESPONSE_START: CONTROL_LIMIT + SIZE.size,
    Kind.RESPONSE_CHUNK: CHUNK_LIMIT,
    Kind.RESPONSE_CANCEL: 0,
    Kind.RESPONSE_ABORT: 0,
    Kind.REFUSAL: TEXT_LIMIT,
    Kind.GOODBYE: TEXT_LIMIT + 1,
    Kind.CREDIT: SIZE.size,
    Kind.PART_START: CONTROL_LIMIT + PART_HEADER_LIMIT + SIZE.size,
    Kind.PART_CHUNK: CHUNK_LIMIT,
    Kind.PART_CANCEL: 0,
    Kind.PART_ABORT: 0,
    Kind.PART_ACK: 0,
}


class Parting(IntEnum):
    """Why a side says GOODBYE."""

    LEAVING = 0
    REFUSED = 1
    """The handshake failed; the text says why."""
    DUPLICATE = 2
    """Another connection of the same two peers stays."""
    BROKEN = 3
    """The other side broke the format."""


class Header(Struct, frozen=True, gc=False):
    """A checked header."""

    length: int
    kind: Kind
    stream: int


def parse_header(data: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """The header at ``offset`` (HEADER.size bytes must be there).

    Raises:
        FrameError: unknown kind, or a body longer than the kind allows.
    """
    length, code, stream = HEADER.unpack_from(data, offset)
    try:
        kind = Kind(code)
    except ValueError:
        raise FrameError(f"unknown frame kind {code}") from None
    if length > BODY_LIMITS[kind]:
        raise FrameError(f"a {kind.name} frame of {length} bytes; the limit is {BODY_LIMITS[kind]}")
    return Header(length, kind, stream)


def encode_header(kind: Kind, stream: int, length: int) -> bytes:
    """The header of a body of ``length`` bytes."""
    assert length <= BODY_LIMITS[kind]
    return HEADER.pack(length, kind, stream)


def encode_frame(kind: Kind, stream: int, body: bytes) -> bytes:
    """A whole frame.

    Raises:
        ValueError: ``body`` is too long for ``kind`` (the caller's fault).
    """
    if len(body) > BODY_LIMITS[kind]:
        raise ValueError(f"a {kind.name} body of {len(body)} bytes; the limit is {BODY_LIMITS[kind]}")
    return HEADER.pack(len(body), kind, stream) + body


def encode_sized(kind: Kind, stream: int, size: int, body: bytes) -> bytes:
    """A BULK_START, RESPONSE_START or REQUEST frame: ``size`` bytes are announced or allowed.

    Raises:
        ValueError: ``body`` is longer than CONTROL_LIMIT.
    """
    if len(body) > CONTROL_LIMIT + (PART_HEADER_LIMIT if kind is Kind.PART_START else 0):
        raise ValueError(f"a control body of {len(body)} bytes; the limit is {CONTROL_LIMIT}")
    return HEADER.pack(SIZE.size + len(body), kind, stream) + SIZE.pack(size) + body


def split_size(body: bytes) -> tuple[int, bytes]:
    """Size and control body of a BULK_START, RESPONSE_START or REQUEST.

    Raises:
        FrameError: too short, or an absurd size.
    """
    if len(body) < SIZE.size:
        raise FrameError("the frame is too short for its size field")
    (size,) = SIZE.unpack_from(body)
    if size > PAYLOAD_LIMIT:
        raise FrameError(f"a payload of {size} bytes is announced")
    return size, body[SIZE.size :]


def encode_credit(granted: int) -> bytes:
    """A CREDIT frame."""
    return encode_frame(Kind.CREDIT, 0, SIZE.pack(granted))


def decode_credit(body: bytes) -> int:
    """The count in a CREDIT.

    Raises:
        FrameError: not a count.
    """
    if len(body) != SIZE.size:
        raise FrameError(f"a CREDIT of {len(body)} bytes")
    (granted,) = SIZE.unpack(body)
    return int(granted)


def encode_text(text: str) -> bytes:
    """``text`` for a REFUSAL or GOODBYE, cut to TEXT_LIMIT bytes."""
    return text.encode("utf-8", "replace")[:TEXT_LIMIT]


def decode_text(data: bytes) -> str:
    """A text from a peer: bounded, one line, printable."""
    text = data[:TEXT_LIMIT].decode("utf-8", "replace")
    return "".join(character if character.isprintable() else " " for character in text)


def encode_goodbye(parting: Parting, reason: str) -> bytes:
    """The GOODBYE frame."""
    return encode_frame(Kind.GOODBYE, 0, bytes([parting]) + encode_text(reason))


def decode_goodbye(body: bytes) -> tuple[Parting, str]:
    """Code and reason of a GOODBYE.

    Raises:
        FrameError: no code, or an unknown one.
    """
    if not body:
        raise FrameError("a GOODBYE without a code")
    try:
        return Parting(body[0]), decode_text(body[1:])
    except ValueError:
        raise FrameError(f"unknown GOODBYE code {body[0]}") from None
