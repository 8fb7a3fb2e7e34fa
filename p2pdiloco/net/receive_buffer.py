"""Incremental parser of frames, with payloads read straight into their place.

The driver asks for a ``buffer`` to read into, reads n bytes, calls ``advance(n)``, and takes events from ``next_event``
until there is none. Small reads land in a staging buffer of 16 KiB. The rest of a chunk lands in its payload, without a
copy.

Rules of this file:
1. No sockets, no clock. Everything is bounded: a frame, the open streams, and payload bytes, whose memory comes from
   ``receive_into``.
2. A beginning stream is an event, before any of it is allocated. Its bytes are read and dropped until ``receive_into``
   gives it a place.
3. Chunks beyond ``granted`` break the format: a sender must keep to its credit (net/flow_control.py).
4. Events are lazy: the bytes after a frame are parsed once the frame's event was taken.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from p2pdiloco.net.frames import (
    FIRST_CREDIT,
    HANDSHAKE_KINDS,
    HEADER,
    OPEN_KINDS,
    OPEN_STREAMS_LIMIT,
    FrameError,
    FrameKind,
    Header,
    Start,
    decode_start,
    parse_header,
)

STAGING_BYTES = 16 << 10
"""Size of one TLS record."""


class Frame(Struct, frozen=True):
    """A whole frame that does not belong to a stream."""

    kind: FrameKind
    stream: int
    body: bytes


class Begun(Struct, frozen=True):
    """A stream begins. Without ``receive_into`` its bytes are dropped."""

    stream: int
    start: Start
    body: bytes


class Completed(Struct, frozen=True):
    """A stream is complete. ``payload`` and ``body`` are those passed to ``receive_into``."""

    stream: int
    start: Start
    body: Any
    payload: memoryview


class Aborted(Struct, frozen=True):
    """The sender has abandoned a stream."""

    stream: int
    start: Start


Event = Frame | Begun | Completed | Aborted


class _Stream(Struct, eq=False):
    """A stream that is being received. ``payload`` is None while it has no place."""

    start: Start
    body: Any = None
    payload: memoryview | None = None
    filled: int = 0


class ReceiveBuffer:
    """Parser of one connection's received bytes; see the module's rules."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._allowed = HANDSHAKE_KINDS
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._position = self._end = 0
        """Begin and end of the staged bytes that have not been parsed."""
        self._header: Header | None = None
        self._target: memoryview | None = None
        """Destination of the current body; None while it is dropped."""
        self._filled = 0
        """Bytes of the current body received so far."""
        self.control_bytes = 0
        self.bulk_bytes = 0
        """Bytes received in whole frames; ``bulk`` is the content of chunks, dropped ones included."""
        self.granted = FIRST_CREDIT
        """Chunk bytes that the sender may send, since the start."""
        self.demand_bytes = 0
        """Announced payload bytes not received yet in whole frames, dropped ones included."""
        self.held_bytes = 0
        """Memory of the streams in progress that are whole payloads."""

    @property
    def arrived_bytes(self) -> int:
        """``bulk_bytes`` plus the received part of an incomplete chunk."""
        header = self._header
        return self.bulk_bytes + (self._filled if header is not None and header.kind is FrameKind.CHUNK else 0)

    def open(self) -> None:
        """Allow messages instead of handshake frames, since the handshake is done."""
        self._allowed = OPEN_KINDS

    def buffer(self) -> memoryview:
        """Return memory for the next received bytes. It is never empty and valid until ``advance``."""
        if self._header is not None and self._target is not None:
            return self._target[self._filled : self._header.length]
        if self._position == self._end:
            self._position = self._end = 0  # otherwise frames that end with the staging buffer would leave no room
        return self._staging[self._end :]

    def advance(self, count: int) -> bool:
        """Take ``count`` bytes that were read into ``buffer()``. Return False if a body is incomplete: no event."""
        if self._header is not None and self._target is not None:
            self._filled += count
            return self._filled == self._header.length
        self._end += count
        return not self._is_in_chunk()

    @property
    def has_more(self) -> bool:
        """True if there are bytes that have not been parsed."""
        return self._position < self._end

    def next_event(self) -> Event | None:
        """Return the next event; None if everything is parsed and more must be read.

        Raises:
            FrameError: the peer broke the format; the connection is unusable.
        """
        while True:
            if self._header is None:
                if self._end - self._position < HEADER.size:
                    self._keep_rest()
                    return None
                header = parse_header(self._staging, self._position)
                self._position += HEADER.size
                if header.kind is not FrameKind.CHUNK and header.length <= self._end - self._position:
                    if (event := self._whole(header)) is not None:
                        return event
                    continue
                self._begin(header)
            assert self._header is not None
            if self._filled < self._header.length:
                self._take_staged(self._header)
                if self._filled < self._header.length:
                    self._keep_rest()
                    return None
            if (event := self._finish(self._header)) is not None:
                return event

    def receive_into(self, stream: int, place: memoryview, body: Any) -> None:
        """Receive a stream that has just begun into ``place``, which has the stream's length.

        ``body`` is kept until the stream is complete.
        """
        entry = self._streams[stream]
        entry.payload, entry.body = place, body
        if entry.start.part is None:
            self.held_bytes += entry.start.size

    def drop(self, payload: int) -> list[int]:
        """Drop further data of this payload's parts. Return the numbers of the streams that bring them."""
        dropped = []
        for number, stream in self._streams.items():
            part = stream.start.part
            if part is not None and part.payload == payload and stream.payload is not None:
                stream.payload = None
                dropped.append(number)
                if self._header is not None and (self._header.kind, self._header.stream) == (FrameKind.CHUNK, number):
                    self._target = None
        return dropped

    def clear(self) -> None:
        """Forget everything and release the memory."""
        self._streams.clear()
        self._target = self._header = None
        self._position = self._end = self.demand_bytes = self.held_bytes = 0

    def _is_in_chunk(self) -> bool:
        """Return whether the staged bytes are a chunk's header and the beginning of its body; if so, begin the body.

        Most reads are of this kind. The driver then need not look for events.
        """
        rest = self._end - self._position - HEADER.size
        if self._header is not None or rest < 0:
            return False
        try:
            header = parse_header(self._staging, self._position)
            if header.kind is not FrameKind.CHUNK or rest >= header.length:
                return False
            self._begin(header)
        except FrameError:
            return False  # ``next_event`` raises the error
        self._position += HEADER.size
        self._take_staged(header)
        self._keep_rest()
        return True

    def _whole(self, header: Header) -> Event | None:
        """Parse a frame that is staged completely."""
        begin = self._position
        self._position += header.length
        return self._control(header, bytes(self._staging[begin : self._position]))

    def _check_allowed(self, kind: FrameKind) -> None:
        if kind not in self._allowed:
            raise FrameError(f"a {kind.name} frame is not allowed at this point")

    def _begin(self, header: Header) -> None:
        self._check_allowed(header.kind)
        if header.kind is not FrameKind.CHUNK:
            self._header, self._filled, self._target = header, 0, memoryview(bytearray(header.length))
            return
        stream = self._streams.get(header.stream)
        if stream is None:
            raise FrameError(f"a CHUNK belongs to stream {header.stream}, which has not begun")
        size = stream.start.size
        if not 0 < header.length <= size - stream.filled:
            raise FrameError(f"stream {header.stream} has {size} bytes, but a CHUNK of {header.length} exceeds them")
        if self.bulk_bytes + header.length > self.granted:
            raise FrameError(f"the peer sent more than the {self.granted} payload bytes that were granted")
        self._header, self._filled, self._target = header, 0, None
        if stream.payload is not None:
            self._target = stream.payload[stream.filled : stream.filled + header.length]

    def _take_staged(self, header: Header) -> None:
        """Move the current body's bytes out of the staging buffer."""
        count = min(self._end - self._position, header.length - self._filled)
        if self._target is not None:
            self._target[self._filled : self._filled + count] = self._staging[self._position : self._position + count]
        self._filled += count
        self._position += count

    def _keep_rest(self) -> None:
        """Make room in the staging buffer: less than a header is left unparsed."""
        left = self._end - self._position
        if self._position:
            self._staging[:left] = bytes(self._staging[self._position : self._end])
        self._position, self._end = 0, left

    def _finish(self, header: Header) -> Event | None:
        target = self._target
        self._header = self._target = None
        if header.kind is not FrameKind.CHUNK:
            return self._control(header, bytes(target or b""))
        self.control_bytes += HEADER.size
        self.bulk_bytes += header.length
        self.demand_bytes -= header.length
        return self._chunk(header.stream, header.length)

    def _control(self, header: Header, body: bytes) -> Event | None:
        self._check_allowed(header.kind)
        self.control_bytes += HEADER.size + header.length
        if header.kind is FrameKind.START:
            return self._start(header.stream, body)
        if header.kind is FrameKind.ABORT:
            return self._abort(header.stream)
        return Frame(header.kind, header.stream, body)

    def _start(self, stream: int, data: bytes) -> Event:
        start, body = decode_start(data)
        if stream in self._streams:
            raise FrameError(f"stream {stream} began twice")
        if len(self._streams) >= 2 * OPEN_STREAMS_LIMIT:
            raise FrameError(f"more than {2 * OPEN_STREAMS_LIMIT} streams at once")
        if start.size:
            self.demand_bytes += start.size
            self._streams[stream] = _Stream(start)
        return Begun(stream, start, body)

    def _chunk(self, number: int, count: int) -> Event | None:
        stream = self._streams[number]
        stream.filled += count
        if stream.filled < stream.start.size:
            return None
        self._forget(number, stream)
        if stream.payload is None:
            return None
        return Completed(number, stream.start, stream.body, stream.payload)

    def _abort(self, number: int) -> Event | None:
        stream = self._streams.get(number)
        if stream is None:
            return None
        self._forget(number, stream)
        self.demand_bytes -= stream.start.size - stream.filled
        return Aborted(number, stream.start)

    def _forget(self, number: int, stream: _Stream) -> None:
        del self._streams[number]
        if stream.payload is not None and stream.start.part is None:
            self.held_bytes -= stream.start.size
