"""Send queue of one connection: the data that is still to be sent, and its order.

Rules of this file:
1. Control frames go first, in the order in which they were queued.
2. Chunks go next: the stream with the lowest priority number first, streams of equal priority in turns.
3. The GOODBYE goes last, after all other data.
4. Control bytes and payload bytes are bounded; ``put`` returns False when there is no room.
5. Payloads are shared, not copied: their owner must not change them until they are sent.
6. Streams take turns while there are fewer than GROUP of them with fewer than GROUP_BYTES left, because the receiver
   holds memory for all open streams. A more urgent one may open beyond that, up to OPEN_STREAMS_LIMIT.
7. A stream is announced (its START goes out) as soon as it may take turns, even while no chunk may be sent: the
   receiver grants credit to announced streams (net/flow_control.py).
8. A payload with a topic is dropped if a newer one of the same topic is queued before its first chunk was sent.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from p2pdiloco.net.frames import (
    CHUNK_LIMIT,
    OPEN_STREAMS_LIMIT,
    STREAM_WRAP,
    FrameKind,
    Start,
    Use,
    encode_frame,
    encode_header,
    encode_start,
)

GROUP = 16
"""Maximum number of streams that take turns."""
GROUP_BYTES = 8 << 20
"""Bytes left in streams that take turns. Payloads of 64 MiB in 16 turns would make the receiver touch a GiB of fresh
pages (measured: 1.7 times the CPU)."""
URGENT = 0.0
"""Priority of payloads that others wait for: contributions and commits."""
BATCH_BYTES = 64 << 10
"""Small control frames are joined up to this many bytes."""

NOTHING = memoryview(b"")


class Slice(NamedTuple):
    """The next bytes to write: ``head`` (headers and control bodies), then ``chunk`` (payload data, not copied)."""

    head: bytes
    chunk: memoryview
    ends_turn: bool = False
    """Whether other peers' payloads go next: a payload has ended, or it is not urgent."""


class _Stream(Struct, eq=False):
    """An outgoing stream."""

    number: int
    start: Start
    start_frame: bytes
    payload: memoryview
    priority: float
    topic: Hashable | None
    urgency: tuple[float, int]
    """Sort key, lowest first: the priority, and the number of the last turn."""
    sent: int = 0
    is_announced: bool = False

    @property
    def bytes_left(self) -> int:
        return len(self.payload) - self.sent


_urgency = attrgetter("urgency")


class SendQueue:
    """Outgoing frames and payloads of one connection; see the module's rules. All sizes are in bytes."""

    def __init__(self, *, control_limit: int, payload_limit: int, chunk_bytes: int = CHUNK_LIMIT) -> None:
        assert 0 < chunk_bytes <= CHUNK_LIMIT
        self._control_limit = control_limit
        self._payload_limit = payload_limit
        self._chunk_bytes = chunk_bytes
        self._control: deque[bytes] = deque()
        self._control_bytes = 0
        self.payload_bytes = 0
        """Payload bytes that have not been handed out yet."""
        self._waiting: list[tuple[float, int, _Stream]] = []
        self._open: list[_Stream] = []
        self._open_bytes = 0
        """Bytes of open streams that have not been handed out yet."""
        self._streams: dict[int, _Stream] = {}
        self._topics: dict[Hashable, _Stream] = {}
        """Latest unfinished stream of each topic."""
        self._parting: bytes | None = None
        self._counter = itertools.count(1)
        self._next_number = 0

    @property
    def is_empty(self) -> bool:
        """True if nothing is left to send, not even the GOODBYE."""
        return not (self._control or self._streams or self._parting)

    @property
    def has_bulk(self) -> bool:
        """True if there are payload bytes to send."""
        return self.payload_bytes > 0

    @property
    def queued_bytes(self) -> int:
        """Control and payload bytes that have not been handed out yet."""
        return self._control_bytes + self.payload_bytes

    def put(self, frame: bytes) -> bool:
        """Queue a control frame. Return False if there is no room."""
        if self._control_bytes + len(frame) > self._control_limit:
            return False
        self._control.append(frame)
        self._control_bytes += len(frame)
        return True

    def put_payload(
        self, start: Start, body: bytes, payload: memoryview, priority: float, topic: Hashable | None = None
    ) -> int | None:
        """Queue a stream and return its number, or None if there is no room.

        It replaces an earlier stream with the same ``topic`` that has not begun. Without room, that one stays.

        Raises:
            ValueError: ``body`` is longer than CONTROL_LIMIT.
        """
        old = self._topics.get(topic)
        replaced = old if old is not None and not old.sent else None
        number = self._free_number()
        frame = encode_start(number, start, body)
        payload_bytes, control_bytes = self.payload_bytes + len(payload), self._control_bytes + len(frame)
        if replaced is not None:
            payload_bytes -= replaced.bytes_left
            control_bytes -= 0 if replaced.is_announced else len(replaced.start_frame)
        if payload_bytes > self._payload_limit or control_bytes > self._control_limit:
            return None
        if replaced is not None:
            self.cancel(replaced.number)
        stream = _Stream(number, start, frame, payload, priority, topic, (priority, 0))
        heapq.heappush(self._waiting, (priority, next(self._counter), stream))
        self._streams[number] = stream
        if topic is not None:
            self._topics[topic] = stream
        self.payload_bytes += len(payload)
        self._control_bytes += len(frame)
        return number

    def withdraw(self, request: int) -> None:
        """Drop the rest of the answer to ``request``, which was withdrawn."""
        for stream in list(self._streams.values()):
            start = stream.start
            if start.use is Use.ANSWER and start.request == request and start.part is None:
                self.cancel(stream.number)

    def cancel(self, number: int) -> None:
        """Drop the rest of a stream that the receiver does not want. A finished stream is ignored."""
        found = self._streams.get(number)
        if found is None:
            return
        self._forget(found)
        self.payload_bytes -= found.bytes_left
        if found in self._open:
            self._open.remove(found)
            self._open_bytes -= found.bytes_left
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not found]
            heapq.heapify(self._waiting)
        if found.is_announced:
            # Deliberately beyond the limit: without ABORT the receiver would keep the stream's buffer.
            self._control.append(abort := encode_frame(FrameKind.ABORT, number))
            self._control_bytes += len(abort)
        else:
            self._control_bytes -= len(found.start_frame)

    def put_goodbye(self, frame: bytes) -> None:
        """Send a GOODBYE frame after all other data."""
        self._parting = frame

    def clear(self) -> None:
        """Drop everything and release the payloads."""
        self._control.clear()
        self._waiting.clear()
        self._open.clear()
        self._streams.clear()
        self._topics.clear()
        self._parting = None
        self._control_bytes = self.payload_bytes = self._open_bytes = 0

    def next(self, bulk_bytes: int = CHUNK_LIMIT) -> Slice | None:
        """Return the next bytes to write, with at most ``bulk_bytes`` of a payload.

        The result is None if nothing is queued, or only payloads while ``bulk_bytes`` is 0.
        """
        if self._control:
            return Slice(self._join_control(), NOTHING)
        starts = self._announce()
        if bulk_bytes > 0 and self._open:
            header, chunk, ends_turn = self._next_chunk(min(bulk_bytes, self._chunk_bytes))
            return Slice(starts + header, chunk, ends_turn)
        if starts:
            return Slice(starts, NOTHING)
        if self._parting is not None and not self._streams:
            parting, self._parting = self._parting, None
            return Slice(parting, NOTHING)
        return None

    def _free_number(self) -> int:
        while self._next_number in self._streams:
            self._next_number = (self._next_number + 1) % STREAM_WRAP
        number = self._next_number
        self._next_number = (number + 1) % STREAM_WRAP
        return number

    def _join_control(self) -> bytes:
        frames = [self._control.popleft()]
        size = len(frames[0])
        while self._control and size + len(self._control[0]) <= BATCH_BYTES:
            frames.append(self._control.popleft())
            size += len(frames[-1])
        self._control_bytes -= size
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _announce(self) -> bytes:
        """Open the streams that may take turns; return their START frames."""
        if not self._waiting:
            return b""
        starts = []
        while self._waiting and self._may_open(self._waiting[0][0]):
            stream = heapq.heappop(self._waiting)[2]
            stream.is_announced = True
            starts.append(stream.start_frame)
            self._control_bytes -= len(stream.start_frame)
            if stream.bytes_left:
                self._open.append(stream)
                self._open_bytes += stream.bytes_left
            else:
                self._forget(stream)
        return b"".join(starts)

    def _next_chunk(self, most: int) -> tuple[bytes, memoryview, bool]:
        """Return header and data of the next chunk, and whether it ends a turn. At least one stream must be open."""
        stream = self._open[0] if len(self._open) == 1 else min(self._open, key=_urgency)
        stream.urgency = (stream.priority, next(self._counter))
        chunk = stream.payload[stream.sent : stream.sent + most]
        stream.sent += len(chunk)
        self.payload_bytes -= len(chunk)
        self._open_bytes -= len(chunk)
        if not stream.bytes_left:
            self._open.remove(stream)
            self._forget(stream)
        ends_turn = not stream.bytes_left or stream.priority > URGENT
        return encode_header(FrameKind.CHUNK, stream.number, len(chunk)), chunk, ends_turn

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.number]
        if self._topics.get(stream.topic) is stream:
            del self._topics[stream.topic]

    def _may_open(self, priority: float) -> bool:
        if len(self._open) < GROUP and self._open_bytes < GROUP_BYTES:
            return True
        return len(self._open) < OPEN_STREAMS_LIMIT and all(priority < stream.priority for stream in self._open)
