"""Frames: the units of data on a connection.

A frame is a header (length of the body, kind, stream; 9 bytes, big endian) and a body. A *message* is a control body
and perhaps a payload; a payload travels as a *stream* of chunks, so that a control message never waits behind it for
more than one chunk.

    HELLO, PROOF    handshake (net/handshake.py); nothing else but GOODBYE may come before
    MESSAGE         a message without payload
    REQUEST         u64 largest payload that the requester takes, control body; ``stream`` is the request's number
    ANSWER          answer without payload; ``stream`` is the request's number
    REFUSAL         reason why a request is not answered (UTF-8)
    WITHDRAW        requester to answerer: the answer to this request is not wanted any more
    START           head of a stream (class Start), control body of its message or answer; then its CHUNKs
    CHUNK           next bytes of a stream
    CANCEL          receiver to sender: stop this stream; the sender answers with ABORT
    ABORT           sender to receiver: the rest of this stream will not come
    ACK             receiver to sender: this part of a payload has arrived (net/multipath.py)
    CREDIT          u64: chunk bytes that the other side may send on this connection, since its start
    GOODBYE         a code byte and the reason (UTF-8); the last frame of its direction

Rules of this file:
1. Bytes only: no sockets, no clock, no state.
2. Each kind has a largest body, checked on the header alone, before anything is allocated.
3. A broken rule raises FrameError: it is the peer's fault and ends its connection.
4. Streams of all uses are numbered together, by their sender, for each connection. Requests have numbers of their own,
   given by the requester.
5. HELLO, PROOF and GOODBYE keep their numbers and their form in all versions of the protocol, so that incompatible
   releases can tell each other why.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from msgspec import Struct

HEADER = struct.Struct(">IBI")
SIZE = struct.Struct(">Q")
_START = struct.Struct(">BIQ")
_PART = struct.Struct(">QQQ")

CONTROL_LIMIT = 1 << 20
"""Maximum bytes of a control body."""
CHUNK_LIMIT = 256 << 10
"""Maximum bytes of a chunk."""
HANDSHAKE_LIMIT = 4096
"""Maximum bytes of a HELLO or PROOF."""
TEXT_LIMIT = 1024
"""Maximum bytes of the text in a GOODBYE or a REFUSAL."""
PAYLOAD_LIMIT = 1 << 40
"""Maximum bytes that a payload may claim; the receiver decides which payloads it accepts."""
FIRST_CREDIT = 64 << 10
"""Chunk bytes that may be sent on a connection before its first CREDIT."""
STREAM_WRAP = 1 << 32
OPEN_STREAMS_LIMIT = 64
"""Streams that a sender may have open at once in one direction; a receiver treats more as an attack."""


class FrameError(ValueError):
    """The other side broke the format."""


class FrameKind(IntEnum):
    HELLO = 1
    PROOF = 2
    MESSAGE = 3
    REQUEST = 4
    ANSWER = 5
    REFUSAL = 6
    WITHDRAW = 7
    START = 8
    CHUNK = 9
    CANCEL = 10
    ABORT = 11
    ACK = 12
    CREDIT = 13
    GOODBYE = 15


HANDSHAKE_KINDS = frozenset({FrameKind.HELLO, FrameKind.PROOF, FrameKind.GOODBYE})
OPEN_KINDS = frozenset(FrameKind) - {FrameKind.HELLO, FrameKind.PROOF}

BODY_LIMITS: dict[FrameKind, int] = {
    FrameKind.HELLO: HANDSHAKE_LIMIT,
    FrameKind.PROOF: HANDSHAKE_LIMIT,
    FrameKind.MESSAGE: CONTROL_LIMIT,
    FrameKind.REQUEST: CONTROL_LIMIT + SIZE.size,
    FrameKind.ANSWER: CONTROL_LIMIT,
    FrameKind.REFUSAL: TEXT_LIMIT,
    FrameKind.WITHDRAW: 0,
    FrameKind.START: CONTROL_LIMIT + _START.size + _PART.size,
    FrameKind.CHUNK: CHUNK_LIMIT,
    FrameKind.CANCEL: 0,
    FrameKind.ABORT: 0,
    FrameKind.ACK: 0,
    FrameKind.CREDIT: SIZE.size,
    FrameKind.GOODBYE: TEXT_LIMIT + 1,
}


_KINDS = {kind.value: kind for kind in FrameKind}


class GoodbyeCode(IntEnum):
    """Code of a GOODBYE: why the connection ends."""

    LEAVING = 0
    REFUSED = 1
    """The handshake failed; the text says why."""
    DUPLICATE = 2
    """Another connection of the same two peers stays."""
    BROKEN = 3
    """The other side broke the format."""


class Header(Struct, frozen=True, gc=False):
    """A validated frame header."""

    length: int
    kind: FrameKind
    stream: int


class Use(IntEnum):
    """Kind of message that a payload belongs to."""

    MESSAGE = 0
    ANSWER = 1


_USES = tuple(Use)


class Part(NamedTuple):
    """Place of a stream's bytes in a payload that comes in parts."""

    payload: int
    """Number of the payload among the sender's payloads in parts, on this connection and its lanes."""
    total: int
    offset: int


class Start(NamedTuple):
    """Head of a START frame: ``size`` bytes will come."""

    use: Use
    request: int
    """For an answer, the request's number; else 0."""
    size: int
    part: Part | None = None
    """None: the stream is the whole payload."""

    @property
    def total(self) -> int:
        """Size of the whole payload in bytes."""
        return self.size if self.part is None else self.part.total


IN_PARTS = 2
"""Flag in the use's code: the payload comes in parts."""


def parse_header(data: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Parse the header at ``offset``, where HEADER.size bytes must be present.

    Raises:
        FrameError: the kind is unknown, or the body longer than the kind allows.
    """
    length, code, stream = HEADER.unpack_from(data, offset)
    kind = _KINDS.get(code)
    if kind is None:
        raise FrameError(f"unknown frame kind {code}")
    if length > BODY_LIMITS[kind]:
        raise FrameError(f"a {kind.name} frame of {length} bytes; the limit is {BODY_LIMITS[kind]}")
    return Header(length, kind, stream)


def encode_header(kind: FrameKind, stream: int, length: int) -> bytes:
    """Return the header of a body of ``length`` bytes."""
    assert length <= BODY_LIMITS[kind]
    return HEADER.pack(length, kind, stream)


def encode_frame(kind: FrameKind, stream: int, body: bytes = b"") -> bytes:
    """Return a whole frame.

    Raises:
        ValueError: ``body`` is too long for ``kind`` (the caller's fault).
    """
    if len(body) > BODY_LIMITS[kind]:
        raise ValueError(f"a {kind.name} body of {len(body)} bytes; the limit is {BODY_LIMITS[kind]}")
    return HEADER.pack(len(body), kind, stream) + body


def encode_start(stream: int, start: Start, body: bytes) -> bytes:
    """Return a START frame.

    Raises:
        ValueError: ``body`` is longer than CONTROL_LIMIT.
    """
    _check_control(body)
    code = start.use + (IN_PARTS if start.part is not None else 0)
    head = _START.pack(code, start.request, start.size)
    if start.part is not None:
        head += _PART.pack(*start.part)
    return HEADER.pack(len(head) + len(body), FrameKind.START, stream) + head + body


def decode_start(body: bytes) -> tuple[Start, bytes]:
    """Return head and control body of a START.

    Raises:
        FrameError: ``body`` is malformed.
    """
    if len(body) < _START.size:
        raise FrameError("the START is too short")
    code, request, size = _START.unpack_from(body)
    if code >= IN_PARTS + len(_USES):
        raise FrameError(f"the START has an unknown use ({code})")
    if code < IN_PARTS:
        if size > PAYLOAD_LIMIT:
            raise FrameError(f"the START announces a payload of {size} bytes; the limit is {PAYLOAD_LIMIT}")
        return Start(_USES[code], request, size), body[_START.size :]
    end = _START.size + _PART.size
    if len(body) < end:
        raise FrameError("the START of a part is too short")
    part = Part(*_PART.unpack_from(body, _START.size))
    if part.total > PAYLOAD_LIMIT or not 0 < size <= part.total - part.offset:
        raise FrameError(f"a part of {size} bytes at {part.offset} of {part.total}")
    return Start(_USES[code - IN_PARTS], request, size, part), body[end:]


def encode_request(number: int, max_payload: int, body: bytes) -> bytes:
    """Return a REQUEST frame.

    Raises:
        ValueError: ``body`` is longer than CONTROL_LIMIT.
    """
    _check_control(body)
    return encode_frame(FrameKind.REQUEST, number, SIZE.pack(min(max_payload, PAYLOAD_LIMIT)) + body)


def decode_request(body: bytes) -> tuple[int, bytes]:
    """Return largest payload and control body of a REQUEST.

    Raises:
        FrameError: ``body`` is too short, or the size beyond the limit.
    """
    if len(body) < SIZE.size:
        raise FrameError("the REQUEST is too short")
    (size,) = SIZE.unpack_from(body)
    if size > PAYLOAD_LIMIT:
        raise FrameError(f"the REQUEST allows an answer of {size} bytes; the limit is {PAYLOAD_LIMIT}")
    return size, body[SIZE.size :]


def encode_credit(granted: int) -> bytes:
    """Return a CREDIT frame."""
    return encode_frame(FrameKind.CREDIT, 0, SIZE.pack(granted))


def decode_credit(body: bytes) -> int:
    """Return the count in a CREDIT.

    Raises:
        FrameError: ``body`` is not a count.
    """
    if len(body) != SIZE.size:
        raise FrameError(f"a CREDIT of {len(body)} bytes")
    (granted,) = SIZE.unpack(body)
    return int(granted)


def encode_text(text: str) -> bytes:
    """Encode ``text`` for a REFUSAL or GOODBYE, cut to TEXT_LIMIT bytes."""
    return text.encode("utf-8", "replace")[:TEXT_LIMIT]


def decode_text(data: bytes) -> str:
    """Decode a peer's text: bounded, one line, printable."""
    text = data[:TEXT_LIMIT].decode("utf-8", "replace")
    return "".join(character if character.isprintable() else " " for character in text)


def encode_goodbye(code: GoodbyeCode, reason: str) -> bytes:
    """Return a GOODBYE frame."""
    return encode_frame(FrameKind.GOODBYE, 0, bytes([code]) + encode_text(reason))


def decode_goodbye(body: bytes) -> tuple[GoodbyeCode, str]:
    """Return code and reason of a GOODBYE.

    Raises:
        FrameError: the code is missing or unknown.
    """
    if not body:
        raise FrameError("a GOODBYE without a code")
    try:
        return GoodbyeCode(body[0]), decode_text(body[1:])
    except ValueError:
        raise FrameError(f"unknown GOODBYE code {body[0]}") from None


def _check_control(body: bytes) -> None:
    if len(body) > CONTROL_LIMIT:
        raise ValueError(f"a control body of {len(body)} bytes; the limit is {CONTROL_LIMIT}")
