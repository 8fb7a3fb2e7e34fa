"""Frames out of bytes, with payloads read straight into their place.

The driver asks for a ``buffer`` to read into, reads n bytes, and goes through the events of ``advance(n)``. Small reads
land in a staging buffer of 16 KiB; the rest of a chunk lands in its payload, without a copy.

Rules of this file:
1. No sockets, no clock. Everything is bounded: a frame, the open streams, the payload bytes in progress.
2. ``admit`` is asked at a stream's start, before a byte of it is allocated. What is not admitted is read and dropped,
   and reported as Skipped, so that the driver can tell the sender to stop.
3. Chunks beyond what was ``granted`` break the format: a sender keeps to its credit (wire/credit.py).
4. Events come lazily: ``admit`` for a frame is asked after the driver has handled all frames before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from p2pdiloco.wire.frames import (
    FIRST_CREDIT,
    HANDSHAKE_KINDS,
    HEADER,
    OPEN_KINDS,
    OPEN_STREAMS_LIMIT,
    FrameError,
    Header,
    Kind,
    parse_header,
    split_size,
)

STAGING_BYTES = 16 << 10
"""One TLS record."""

START_OF_CHUNK = {
    Kind.BULK_CHUNK: Kind.BULK_START,
    Kind.RESPONSE_CHUNK: Kind.RESPONSE_START,
    Kind.PART_CHUNK: Kind.PART_START,
}
START_OF_ABORT = {
    Kind.BULK_ABORT: Kind.BULK_START,
    Kind.RESPONSE_ABORT: Kind.RESPONSE_START,
    Kind.PART_ABORT: Kind.PART_START,
}

START_KINDS = frozenset(START_OF_CHUNK.values())

Admit = Callable[[Kind, int, bytes, int], bool]
"""(BULK_START or RESPONSE_START, stream, control body, payload bytes) -> whether to take the payload."""

Place = Callable[[bytes, int], memoryview | None]
"""(body of a PART_START, bytes of the part) -> where it goes; None: nowhere."""


class Received(Struct, frozen=True):
    """A whole frame without payload. Its ``body`` still has the size field if the kind has one."""

    kind: Kind
    stream: int
    body: bytes


class Completed(Struct, frozen=True):
    """A whole stream. ``kind`` is that of its start; ``payload`` is the receiver's own, writable memory."""

    kind: Kind
    stream: int
    body: bytes
    payload: memoryview


class Skipped(Struct, frozen=True):
    """A stream that was not admitted; its bytes are dropped."""

    kind: Kind
    stream: int


class Aborted(Struct, frozen=True):
    """An admitted stream that its sender gave up."""

    kind: Kind
    stream: int
    body: bytes


Event = Received | Completed | Skipped | Aborted


class _Stream:
    """One payload on its way in. ``payload`` is None if it was not admitted."""

    __slots__ = ("body", "filled", "payload", "reserved", "size")

    def __init__(self, body: bytes, size: int, payload: memoryview | None, reserved: int) -> None:
        self.body, self.size, self.payload, self.reserved = body, size, payload, reserved
        self.filled = 0


def nowhere(body: bytes, size: int) -> memoryview | None:
    """For connections on which no parts come."""
    raise FrameError("a part of a payload has no place here")


class Inbox:
    """See the module's rules. ``allocate`` gives the memory for a payload (wire/blocks.py); ``bytes_limit`` bounds the
    payload bytes in progress; ``place`` says where parts go."""

    def __init__(
        self, admit: Admit, *, allocate: Callable[[int], memoryview], bytes_limit: int, place: Place = nowhere
    ) -> None:
        self._admit = admit
        self._place = place
        self._allocate = allocate
        self._bytes_limit = bytes_limit
        self._reserved_bytes = 0
        self._streams: dict[tuple[Kind, int], _Stream] = {}
        self._allowed = HANDSHAKE_KINDS
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._staged = 0
        self._header: Header | None = None
        self._target: memoryview | None = None
        """Where the current body goes; None while it is dropped."""
        self._filled = 0
        """Bytes of the current body that came."""
        self.control_bytes = 0
        self.bulk_bytes = 0
        """Received so far in whole frames; ``bulk`` is what chunks carry, dropped ones included."""
        self.granted = FIRST_CREDIT
        """Chunk bytes that may come, since the start."""
        self.demand_bytes = 0
        """Announced payload bytes that did not come yet (of whole frames), dropped ones included."""

    @property
    def reserved_bytes(self) -> int:
        """Payload bytes of streams in progress, allocated or promised."""
        return self._reserved_bytes

    @property
    def arrived_bytes(self) -> int:
        """As ``bulk_bytes``, with what is here of a chunk that is not whole yet."""
        header = self._header
        return self.bulk_bytes + (self._filled if header is not None and header.kind in START_OF_CHUNK else 0)

    def open(self) -> None:
        """The handshake is done: messages may come, handshakes may not."""
        self._allowed = OPEN_KINDS

    def buffer(self) -> memoryview:
        """Where the next bytes are to be read. Never empty; valid until ``advance``."""
        if self._header is not None and self._target is not None:
            return self._target[self._filled : self._header.length]
        return self._staging[self._staged :]

    def advance(self, count: int) -> Iterator[Event]:
        """Take the ``count`` bytes that were read into ``buffer()``. Go through all events before the next read.

        Raises:
            FrameError: the peer broke the format; the connection is of no use any more.
        """
        if self._header is not None and self._target is not None:
            self._filled += count
            yield from self._finish_if_whole()
            return
        end = self._staged + count
        self._staged = 0
        position = 0
        while position < end or self._header is not None:
            if self._header is None:
                if end - position < HEADER.size:
                    break
                self._begin(parse_header(self._staging, position))
                position += HEADER.size
            position += self._take(self._staging[position:end])
            yield from self._finish_if_whole()
            if self._header is not None:
                return
        self._staging[: end - position] = bytes(self._staging[position:end])
        self._staged = end - position

    def clear(self) -> None:
        """Forget everything, and release the memory."""
        self._streams.clear()
        self._target = self._header = None
        self._reserved_bytes = self._staged = self.demand_bytes = 0

    def _begin(self, header: Header) -> None:
        if header.kind not in self._allowed:
            raise FrameError(f"a {header.kind.name} frame has no place here")
        self._header, self._filled = header, 0
        start = START_OF_CHUNK.get(header.kind)
        if start is None:
            self._target = memoryview(bytearray(header.length))
            return
        stream = self._streams.get((start, header.stream))
        if stream is None:
            raise FrameError(f"a {header.kind.name} of stream {header.stream}, which was not begun")
        if not 0 < header.length <= stream.size - stream.filled:
            raise FrameError(f"stream {header.stream} has {stream.size} bytes, and {header.length} more than that came")
        if self.bulk_bytes + header.length > self.granted:
            raise FrameError(f"more than the {self.granted} payload bytes that were granted came")
        self._target = None
        if stream.payload is not None:
            self._target = stream.payload[stream.filled : stream.filled + header.length]

    def _take(self, data: memoryview) -> int:
        """Move what belongs to the current body out of the staging buffer; how many bytes that was."""
        assert self._header is not None
        count = min(len(data), self._header.length - self._filled)
        if self._target is not None:
            self._target[self._filled : self._filled + count] = data[:count]
        self._filled += count
        return count

    def _finish_if_whole(self) -> Iterator[Event]:
        header, target = self._header, self._target
        assert header is not None
        if self._filled < header.length:
            return
        self._header = self._target = None
        self.control_bytes += HEADER.size
        if header.kind in START_OF_CHUNK:
            self.bulk_bytes += header.length
            self.demand_bytes -= header.length
            yield from self._chunk(START_OF_CHUNK[header.kind], header.stream, header.length)
            return
        self.control_bytes += header.length
        assert target is not None
        body = bytes(target)
        if header.kind in START_OF_ABORT:
            yield from self._abort(START_OF_ABORT[header.kind], header.stream)
        elif header.kind in START_KINDS:
            yield from self._start(header.kind, header.stream, body)
        else:
            yield Received(header.kind, header.stream, body)

    def _start(self, kind: Kind, stream: int, body: bytes) -> Iterator[Event]:
        size, control = split_size(body)
        if (kind, stream) in self._streams:
            raise FrameError(f"stream {stream} was begun twice")
        if len(self._streams) >= 2 * OPEN_STREAMS_LIMIT:
            raise FrameError(f"more than {2 * OPEN_STREAMS_LIMIT} streams at once")
        self.demand_bytes += size
        if kind is Kind.PART_START:
            place = self._place(control, size)
            self._streams[kind, stream] = _Stream(control, size, place, 0)
            if place is None:
                yield Skipped(kind, stream)
            return
        fits = self._reserved_bytes + size <= self._bytes_limit
        is_admitted = fits and self._admit(kind, stream, control, size)
        if is_admitted and size == 0:
            yield Completed(kind, stream, control, memoryview(bytearray()))
            return
        if not is_admitted:
            if size:
                self._streams[kind, stream] = _Stream(b"", size, None, 0)
            yield Skipped(kind, stream)
            return
        self._reserved_bytes += size
        self._streams[kind, stream] = _Stream(control, size, self._allocate(size), size)

    def _chunk(self, kind: Kind, stream: int, count: int) -> Iterator[Event]:
        entry = self._streams[kind, stream]
        entry.filled += count
        if entry.filled < entry.size:
            return
        del self._streams[kind, stream]
        if entry.payload is not None:
            self._reserved_bytes -= entry.reserved
            yield Completed(kind, stream, entry.body, entry.payload)

    def _abort(self, kind: Kind, stream: int) -> Iterator[Event]:
        entry = self._streams.pop((kind, stream), None)
        if entry is not None:
            self.demand_bytes -= entry.size - entry.filled
        if entry is not None and entry.payload is not None:
            self._reserved_bytes -= entry.reserved
            yield Aborted(kind, stream, entry.body)
