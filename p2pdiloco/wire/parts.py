"""Payloads in parts: one payload over several connections ("lanes") of one pair.

A payload is cut into parts of PART_BYTES. Every part travels as a stream of its own on whichever lane has room next,
and says where it belongs (PartHeader, before the message's control body), so that lanes need no order among each other
and each part is read straight into its place. The receiver acknowledges every part on its lane. What a lost lane has
not acknowledged is sent again on the others; what comes twice is counted once.

Why parts and acknowledgements, and not one stream to each lane: a single large payload must fill the link too, and a
slow lane must not hold up what was given to it early. Why send parts again, and not fail: what a dead lane had taken is
a few MiB, and the other lanes live.

Rules of this file:
1. Bytes and decisions only: no sockets, no clock. Lanes are any hashable names.
2. Bounded: payload bytes that wait, messages in progress, what is remembered of those that are over.
3. The lowest priority number goes first, and at equal priority what was put first: few payloads are in progress.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from p2pdiloco.wire.frames import OPEN_STREAMS_LIMIT, PAYLOAD_LIMIT, FrameError, Kind

PART_BYTES = 1 << 20
REMEMBERED = 1024
"""Messages that are over, whose late parts are known to be late."""

LaneName = TypeVar("LaneName", bound=Hashable)

_HEADER = struct.Struct(">BIQQQ")


class PartHeader(NamedTuple):
    """Where a part belongs."""

    kind: Kind
    """BULK_START or RESPONSE_START."""
    stream: int
    """Of a response: the request's number."""
    message: int
    """Counts the sender's messages on this connection."""
    total: int
    offset: int

    def encode(self) -> bytes:
        return _HEADER.pack(*self)


def split_part(body: bytes) -> tuple[PartHeader, bytes]:
    """Header and control body of a PART_START (after its size).

    Raises:
        FrameError: it cannot be.
    """
    if len(body) < _HEADER.size:
        raise FrameError("a part without a header")
    kind, stream, message, total, offset = _HEADER.unpack_from(body)
    if kind not in (Kind.BULK_START, Kind.RESPONSE_START) or total > PAYLOAD_LIMIT:
        raise FrameError("a part of something that cannot come in parts")
    return PartHeader(Kind(kind), stream, message, total, offset), body[_HEADER.size :]


class Part(NamedTuple):
    """A part to be sent."""

    header: PartHeader
    body: bytes
    """The message's control body."""
    data: memoryview
    priority: float


class _Outgoing:
    """A message of which some part is not acknowledged."""

    __slots__ = (
        "body",
        "is_known",
        "kind",
        "message",
        "payload",
        "priority",
        "stream",
        "todo",
        "topic",
        "unacknowledged",
    )

    def __init__(
        self,
        kind: Kind,
        stream: int,
        message: int,
        body: bytes,
        payload: memoryview,
        priority: float,
        topic: Hashable | None,
    ) -> None:
        self.kind, self.stream, self.message = kind, stream, message
        self.body, self.payload, self.priority = body, payload, priority
        self.todo = deque(range(0, len(payload), PART_BYTES))
        self.unacknowledged = set(self.todo)
        self.topic = topic
        self.is_known = False
        """The other side may have heard of it."""

    @property
    def is_begun(self) -> bool:
        return len(self.todo) * PART_BYTES < len(self.payload)


class Spreader(Generic[LaneName]):
    """The sender's side. ``payload_limit`` bounds the bytes of messages in progress."""

    def __init__(self, *, payload_limit: int) -> None:
        self._payload_limit = payload_limit
        self._messages: dict[int, _Outgoing] = {}
        self._lanes: dict[LaneName, dict[int, tuple[int, int]]] = {}
        """For each lane and part stream that is not acknowledged: message and offset."""
        self._held_bytes = 0
        self._next_message = 0

    @property
    def is_idle(self) -> bool:
        """Everything is acknowledged."""
        return not self._messages

    @property
    def queued_bytes(self) -> int:
        """Not given to any lane."""
        return sum(
            min(PART_BYTES, len(message.payload) - offset)
            for message in self._messages.values()
            for offset in message.todo
        )

    def put(
        self,
        kind: Kind,
        stream: int,
        body: bytes,
        payload: memoryview,
        priority: float,
        topic: Hashable | None = None,
    ) -> bool:
        """Queue a message with a payload (not an empty one); it takes the place of one with its ``topic`` of which no
        part is out. False: no room."""
        assert len(payload)
        if topic is not None:
            for message in list(self._messages.values()):
                if message.topic == topic and not message.is_known:
                    self._forget(message.message)
        if self._held_bytes + len(payload) > self._payload_limit:
            return False
        self._held_bytes += len(payload)
        self._messages[self._next_message] = _Outgoing(kind, stream, self._next_message, body, payload, priority, topic)
        self._next_message += 1
        return True

    def next(self, lane: LaneName, stream: int) -> Part | None:
        """The next part, for ``lane`` as its ``stream``; None: nothing waits."""
        waiting = [message for message in self._messages.values() if message.todo]
        if len(self._messages) - len(waiting) + sum(message.is_begun for message in waiting) >= OPEN_STREAMS_LIMIT:
            waiting = [message for message in waiting if message.is_begun]
        if not waiting:
            return None
        chosen = min(waiting, key=lambda message: (message.priority, message.message))
        offset = chosen.todo.popleft()
        chosen.is_known = True
        self._lanes.setdefault(lane, {})[stream] = (chosen.message, offset)
        header = PartHeader(chosen.kind, chosen.stream, chosen.message, len(chosen.payload), offset)
        return Part(header, chosen.body, chosen.payload[offset : offset + PART_BYTES], chosen.priority)

    def acknowledge(self, lane: LaneName, stream: int) -> None:
        """The part is there. Raises nothing: one of a message that was given up is no error."""
        number, offset = self._lanes.get(lane, {}).pop(stream, (-1, -1))
        if (message := self._messages.get(number)) is None:
            return
        message.unacknowledged.discard(offset)
        if not message.unacknowledged:
            self._forget(number)

    def put_back(self, lane: LaneName, stream: int) -> None:
        """The lane has no room for the part that it was given."""
        number, offset = self._lanes[lane].pop(stream)
        self._messages[number].todo.appendleft(offset)

    def lose(self, lane: LaneName) -> None:
        """The lane is lost: what it has not acknowledged waits again, first of its message."""
        for number, offset in self._lanes.pop(lane, {}).values():
            if (message := self._messages.get(number)) is not None:
                message.todo.appendleft(offset)

    def refuse(self, lane: LaneName, stream: int) -> list[tuple[LaneName, int]]:
        """The receiver does not want the message of this part (or has it): forget it. The parts that are out."""
        number, _ = self._lanes.get(lane, {}).get(stream, (-1, -1))
        return self._give_up(number)

    def cancel_response(self, request: int) -> list[tuple[LaneName, int]]:
        """The asker does not want the answer to ``request``. The parts that are out."""
        found = [m.message for m in self._messages.values() if m.kind is Kind.RESPONSE_START and m.stream == request]
        return [part for number in found for part in self._give_up(number)]

    def clear(self) -> None:
        self._messages.clear()
        self._lanes.clear()
        self._held_bytes = 0

    def _give_up(self, number: int) -> list[tuple[LaneName, int]]:
        if number not in self._messages:
            return []
        self._forget(number)
        out = []
        for lane, parts in self._lanes.items():
            streams = [stream for stream, (message, _) in parts.items() if message == number]
            for stream in streams:
                del parts[stream]
            out += [(lane, stream) for stream in streams]
        return out

    def _forget(self, number: int) -> None:
        self._held_bytes -= len(self._messages.pop(number).payload)


class Whole(NamedTuple):
    """A message all of whose parts came."""

    kind: Kind
    stream: int
    body: bytes
    payload: memoryview


class _Incoming:
    """A message of which some part did not come."""

    __slots__ = ("body", "done", "filled", "header", "payload")

    def __init__(self, header: PartHeader, body: bytes, payload: memoryview) -> None:
        self.header, self.body, self.payload = header, body, payload
        self.done: set[int] = set()
        self.filled = 0


class Assembler:
    """The receiver's side. ``admit`` and ``allocate`` as the Inbox's; ``bytes_limit`` bounds messages in progress."""

    def __init__(
        self,
        admit: Callable[[Kind, int, bytes, int], bool],
        *,
        allocate: Callable[[int], memoryview],
        bytes_limit: int,
    ) -> None:
        self._admit = admit
        self._allocate = allocate
        self._bytes_limit = bytes_limit
        self._reserved_bytes = 0
        self._messages: dict[int, _Incoming] = {}
        self._over: dict[int, None] = {}
        """Delivered or not admitted."""

    @property
    def reserved_bytes(self) -> int:
        return self._reserved_bytes

    def place(self, body: bytes, size: int) -> memoryview | None:
        """Where the part whose PART_START has ``body`` goes; None: nowhere.

        Raises:
            FrameError: it does not fit its message.
        """
        header, control = split_part(body)
        if not 0 < size <= header.total - header.offset:
            raise FrameError(f"a part of {size} bytes at {header.offset} of {header.total}")
        if header.message in self._over:
            return None
        message = self._messages.get(header.message)
        if message is None:
            if len(self._messages) >= 2 * OPEN_STREAMS_LIMIT:
                raise FrameError(f"more than {2 * OPEN_STREAMS_LIMIT} payloads in parts at once")
            fits = self._reserved_bytes + header.total <= self._bytes_limit
            if not fits or not self._admit(header.kind, header.stream, control, header.total):
                self._end(header.message)
                return None
            self._reserved_bytes += header.total
            message = _Incoming(header, control, self._allocate(header.total))
            self._messages[header.message] = message
        elif message.header.total != header.total:
            raise FrameError("a part of another size of payload")
        return message.payload[header.offset : header.offset + size]

    def complete(self, body: bytes, size: int) -> Whole | None:
        """The part is there; the message, if that was the last of it."""
        header, _ = split_part(body)
        message = self._messages.get(header.message)
        if message is None or header.offset in message.done:
            return None
        message.done.add(header.offset)
        message.filled += size
        if message.filled < header.total:
            return None
        self._drop(header.message)
        return Whole(header.kind, header.stream, message.body, message.payload)

    def abort(self, body: bytes) -> None:
        """The sender gave the message of this part up."""
        header, _ = split_part(body)
        if header.message in self._messages:
            self._drop(header.message)

    def drop_response(self, request: int) -> None:
        """We do not want the answer to ``request`` any more."""
        for number, message in list(self._messages.items()):
            if message.header.kind is Kind.RESPONSE_START and message.header.stream == request:
                self._drop(number)

    def clear(self) -> None:
        self._messages.clear()
        self._reserved_bytes = 0

    def _drop(self, number: int) -> None:
        self._reserved_bytes -= self._messages.pop(number).header.total
        self._end(number)

    def _end(self, number: int) -> None:
        self._over[number] = None
        if len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]
