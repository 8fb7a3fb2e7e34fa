"""Frames out of bytes, with payloads read straight into their place.

The driver asks for a ``buffer`` to read into, reads n bytes, calls ``advance(n)``, and takes events from ``next_event``
until there is none. Small reads land in a staging buffer of 16 KiB; the rest of a chunk lands in its payload, without
a copy.

Rules of this file:
1. No sockets, no clock. Everything is bounded: a frame, the open streams, and payload bytes, for which ``receive_into``
   gives the memory.
2. A stream that begins is an event, before a byte of it is allocated. Its bytes are read and dropped until
   ``receive_into`` gives it a place.
3. Chunks beyond what was ``granted`` break the format: a sender keeps to its credit (net/flow_control.py).
4. Events come lazily: the bytes after a frame are parsed after the frame's event was taken.
"""

from __future__ import annotations

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
"""One TLS record."""


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
    """A whole stream. ``payload`` is the memory that ``receive_into`` was given."""

    stream: int
    start: Start
    body: bytes
    payload: memoryview


class Aborted(Struct, frozen=True):
    """A stream that its sender has given up."""

    stream: int
    start: Start


Event = Frame | Begun | Completed | Aborted


class _Stream:
    """A stream that is being received. ``payload`` is None while it has no place."""

    __slots__ = ("body", "filled", "payload", "start")

    def __init__(self, start: Start, body: bytes) -> None:
        self.start, self.body = start, body
        self.payload: memoryview | None = None
        self.filled = 0


class ReceiveBuffer:
    """Parser of one connection's received bytes; see the module's rules."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._allowed = HANDSHAKE_KINDS
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._position = self._end = 0
        """Begin and end of the staged bytes that were not parsed."""
        self._header: Header | None = None
        self._target: memoryview | None = None
        """Where the current body goes; None while it is dropped."""
        self._filled = 0
        """Bytes of the current body that were received."""
        self.control_bytes = 0
        self.bulk_bytes = 0
        """Bytes received in whole frames; ``bulk`` is the content of chunks, dropped ones included."""
        self.granted = FIRST_CREDIT
        """Chunk bytes that the sender may send, since the start."""
        self.demand_bytes = 0
        """Announced payload bytes that were not received yet in whole frames, dropped ones included."""
        self.held_bytes = 0
        """Memory of the streams in progress that are payloads of their own."""

    @property
    def arrived_bytes(self) -> int:
        """As ``bulk_bytes``, and the part that is here of a chunk that is not whole yet."""
        header = self._header
        return self.bulk_bytes + (self._filled if header is not None and header.kind is FrameKind.CHUNK else 0)

    def open(self) -> None:
        """The handshake is done: allow messages, and handshake frames no more."""
        self._allowed = OPEN_KINDS

    def buffer(self) -> memoryview:
        """Where the next bytes are to be read. Never empty; valid until ``advance``."""
        if self._header is not None and self._target is not None:
            return self._target[self._filled : self._header.length]
        if self._position == self._end:
            self._position = self._end = 0  # else frames that end where the staging buffer ends would leave no room
        return self._staging[self._end :]

    def advance(self, count: int) -> bool:
        """``count`` bytes were read into ``buffer()``. False: a body is not whole yet, there is no event."""
        if self._header is not None and self._target is not None:
            self._filled += count
            return self._filled == self._header.length
        self._end += count
        return not self._is_in_chunk()

    @property
    def has_more(self) -> bool:
        """Whether there are bytes that were not parsed."""
        return self._position < self._end

    def next_event(self) -> Event | None:
        """The next event; None: everything is parsed, read more.

        Raises:
            FrameError: the peer broke the format; the connection is of no use any more.
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

    def receive_into(self, stream: int, place: memoryview) -> None:
        """Receive a stream that has just begun into ``place``, which is as long as the stream."""
        entry = self._streams[stream]
        entry.payload = place
        if entry.start.part is None:
            self.held_bytes += entry.start.size

    def drop(self, payload: int) -> list[int]:
        """Drop what is received of this payload's parts from now on; the numbers of the streams that bring them."""
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
        """Forget everything, and release the memory."""
        self._streams.clear()
        self._target = self._header = None
        self._position = self._end = self.demand_bytes = self.held_bytes = 0

    def _is_in_chunk(self) -> bool:
        """Whether all that is staged is a chunk's header and the beginning of its body; then the body is begun. Most
        reads are that, and spare the driver a turn."""
        rest = self._end - self._position - HEADER.size
        if self._header is not None or rest < 0:
            return False
        try:
            header = parse_header(self._staging, self._position)
            if header.kind is not FrameKind.CHUNK or rest >= header.length:
                return False
            self._begin(header)
        except FrameError:
            return False  # ``next_event`` says what is wrong
        self._position += HEADER.size
        self._take_staged(header)
        self._keep_rest()
        return True

    def _whole(self, header: Header) -> Event | None:
        """Parse a frame all of which is staged."""
        begin = self._position
        self._position += header.length
        return self._control(header, bytes(self._staging[begin : self._position]))

    def _check_allowed(self, kind: FrameKind) -> None:
        if kind not in self._allowed:
            raise FrameError(f"a {kind.name} frame has no place here")

    def _begin(self, header: Header) -> None:
        self._check_allowed(header.kind)
        if header.kind is not FrameKind.CHUNK:
            self._header, self._filled, self._target = header, 0, memoryview(bytearray(header.length))
            return
        stream = self._streams.get(header.stream)
        if stream is None:
            raise FrameError(f"a CHUNK of stream {header.stream}, which was not begun")
        size = stream.start.size
        if not 0 < header.length <= size - stream.filled:
            raise FrameError(f"stream {header.stream} has {size} bytes, and {header.length} more than that came")
        if self.bulk_bytes + header.length > self.granted:
            raise FrameError(f"more than the {self.granted} payload bytes that were granted came")
        self._header, self._filled, self._target = header, 0, None
        if stream.payload is not None:
            self._target = stream.payload[stream.filled : stream.filled + header.length]

    def _take_staged(self, header: Header) -> None:
        """Move what belongs to the current body out of the staging buffer."""
        count = min(self._end - self._position, header.length - self._filled)
        if self._target is not None:
            self._target[self._filled : self._filled + count] = self._staging[self._position : self._position + count]
        self._filled += count
        self._position += count

    def _keep_rest(self) -> None:
        """Make room for more: everything is parsed, except less than a header."""
        left = self._end - self._position
        if self._position:
            self._staging[:left] = bytes(self._staging[self._position : self._end])
        self._position, self._end = 0, left

    def _finish(self, header: Header) -> Event | None:
        """Handle the current frame, which is whole."""
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
            raise FrameError(f"stream {stream} was begun twice")
        if len(self._streams) >= 2 * OPEN_STREAMS_LIMIT:
            raise FrameError(f"more than {2 * OPEN_STREAMS_LIMIT} streams at once")
        if start.size:
            self.demand_bytes += start.size
            self._streams[stream] = _Stream(start, body)
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
