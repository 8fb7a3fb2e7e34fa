"""Payloads in parts: one payload over several connections ("lanes") of one pair of peers.

A payload is split into parts of PART_BYTES. Each part is a stream of its own on the next lane with room, and names its
place (frames.Part). So lanes need no common order, and each part is read straight into its place. The receiver
acknowledges every part on its lane. Parts that a lost lane has not acknowledged are sent again on the others. A part
that arrives twice counts once.

Parts with acknowledgements are used instead of one stream for each lane, because a single large payload must fill the
link, and a slow lane must not hold up what it was given early. Parts are sent again instead of failing the payload,
because a dead lane held only a few MiB and the other lanes still work.

Rules of this file:
1. Bytes and decisions only: no sockets, no clock. Lanes are any hashable objects (net/session.py uses its sessions).
2. Bounded: waiting payload bytes, payloads in progress, and numbers of finished payloads.
3. The lowest priority number goes first; at equal priority the payload queued first, so that few are in progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec import Struct

from p2pdiloco.net.frames import OPEN_STREAMS_LIMIT, FrameError, Part, Start, Use
from p2pdiloco.net.send_queue import SendQueue

PART_BYTES = 1 << 20
REMEMBERED = 1024
"""Number of finished payloads whose numbers are kept, to recognize late parts."""

LaneName = TypeVar("LaneName", bound=Hashable)


class Piece(NamedTuple):
    """A part that is to be sent."""

    start: Start
    body: bytes
    """Control body of the message or answer."""
    data: memoryview
    priority: float


class _Outgoing(Struct, eq=False):
    """A payload with unacknowledged parts."""

    number: int
    use: Use
    request: int
    body: bytes
    payload: memoryview
    priority: float
    topic: Hashable | None
    todo: deque[int]
    unacknowledged: set[int]
    is_known: bool = False
    """Whether a lane was given a part of it."""

    @property
    def is_begun(self) -> bool:
        return len(self.todo) * PART_BYTES < len(self.payload)


class Splitter(Generic[LaneName]):
    """Sender's side. ``payload_limit`` bounds the bytes of payloads in progress."""

    def __init__(self, *, payload_limit: int) -> None:
        self._payload_limit = payload_limit
        self._payloads: dict[int, _Outgoing] = {}
        self._lanes: dict[LaneName, dict[int, tuple[int, int]]] = {}
        """Payload and offset of each unacknowledged part, by lane and stream."""
        self._held_bytes = 0
        self._next_number = 0

    @property
    def is_idle(self) -> bool:
        """True if everything is acknowledged."""
        return not self._payloads

    @property
    def queued_bytes(self) -> int:
        """Bytes that no lane was given yet."""
        return sum(
            min(PART_BYTES, len(payload.payload) - offset)
            for payload in self._payloads.values()
            for offset in payload.todo
        )

    def put(
        self,
        use: Use,
        request: int,
        body: bytes,
        payload: memoryview,
        priority: float,
        topic: Hashable | None = None,
    ) -> bool:
        """Queue a nonempty payload. Return False if there is no room.

        It replaces an earlier payload with the same ``topic`` of which no lane was given a part.
        """
        assert len(payload)
        if topic is not None:
            for other in list(self._payloads.values()):
                if other.topic == topic and not other.is_known:
                    self._forget(other.number)
        if self._held_bytes + len(payload) > self._payload_limit:
            return False
        number = self._next_number
        self._next_number += 1
        self._held_bytes += len(payload)
        parts = range(0, len(payload), PART_BYTES)
        self._payloads[number] = _Outgoing(
            number, use, request, body, payload, priority, topic, deque(parts), set(parts)
        )
        return True

    def next(self, lane: LaneName) -> Piece | None:
        """Return the next part for ``lane``, or None. The caller must pass it to ``assign`` or ``put_back``."""
        waiting = [payload for payload in self._payloads.values() if payload.todo]
        if len(self._payloads) - len(waiting) + sum(payload.is_begun for payload in waiting) >= OPEN_STREAMS_LIMIT:
            waiting = [payload for payload in waiting if payload.is_begun]
        if not waiting:
            return None
        chosen = min(waiting, key=lambda payload: (payload.priority, payload.number))
        offset = chosen.todo.popleft()
        chosen.is_known = True
        data = chosen.payload[offset : offset + PART_BYTES]
        part = Part(chosen.number, len(chosen.payload), offset)
        return Piece(Start(chosen.use, chosen.request, len(data), part), chosen.body, data, chosen.priority)

    def assign(self, lane: LaneName, stream: int, piece: Piece) -> None:
        """Record that ``piece`` is sent as this ``stream`` of ``lane``."""
        assert piece.start.part is not None
        self._lanes.setdefault(lane, {})[stream] = (piece.start.part.payload, piece.start.part.offset)

    def put_back(self, piece: Piece) -> None:
        """Queue a part again that its lane has no room for."""
        assert piece.start.part is not None
        self._payloads[piece.start.part.payload].todo.appendleft(piece.start.part.offset)

    def acknowledge(self, lane: LaneName, stream: int) -> None:
        """Record that a part has arrived. A part of an abandoned payload is ignored."""
        number, offset = self._lanes.get(lane, {}).pop(stream, (-1, -1))
        if (payload := self._payloads.get(number)) is None:
            return
        payload.unacknowledged.discard(offset)
        if not payload.unacknowledged:
            self._forget(number)

    def requeue(self, lane: LaneName) -> None:
        """Queue the unacknowledged parts of a lost lane again, before the rest of each payload."""
        for number, offset in self._lanes.pop(lane, {}).values():
            if (payload := self._payloads.get(number)) is not None:
                payload.todo.appendleft(offset)

    def refuse(self, lane: LaneName, stream: int) -> list[tuple[LaneName, int]]:
        """Abandon the payload of a part that the receiver refuses or already has. Return its parts under way."""
        number, _ = self._lanes.get(lane, {}).get(stream, (-1, -1))
        return self._give_up(number)

    def withdraw(self, request: int) -> list[tuple[LaneName, int]]:
        """Abandon the answer to a request that was withdrawn. Return its parts under way."""
        found = [p.number for p in self._payloads.values() if p.use is Use.ANSWER and p.request == request]
        return [part for number in found for part in self._give_up(number)]

    def clear(self) -> None:
        self._payloads.clear()
        self._lanes.clear()
        self._held_bytes = 0

    def _give_up(self, number: int) -> list[tuple[LaneName, int]]:
        if number not in self._payloads:
            return []
        self._forget(number)
        out = []
        for lane, parts in self._lanes.items():
            streams = [stream for stream, (payload, _) in parts.items() if payload == number]
            for stream in streams:
                del parts[stream]
            out += [(lane, stream) for stream in streams]
        return out

    def _forget(self, number: int) -> None:
        self._held_bytes -= len(self._payloads.pop(number).payload)


class PayloadState(Enum):
    """Receiver's state of the payload that a part belongs to."""

    NEW = 0
    OPEN = 1
    OVER = 2
    """Delivered, refused or abandoned."""


class Whole(NamedTuple):
    """A payload whose parts have all arrived."""

    start: Start
    body: Any
    payload: memoryview


class _Incoming(Struct, eq=False):
    """A payload with parts that have not arrived yet."""

    start: Start
    body: Any
    payload: memoryview
    done: set[int] = set()
    filled: int = 0


class Reassembler:
    """Receiver's side. ``allocate`` returns the memory for a payload (wire/buffer_pool.py)."""

    def __init__(self, *, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self._payloads: dict[int, _Incoming] = {}
        self._over: dict[int, None] = {}

    def state_of(self, start: Start) -> PayloadState:
        """Return the state of the payload that a part belongs to.

        Raises:
            FrameError: the part does not fit its payload, or there are too many payloads.
        """
        assert start.part is not None
        number = start.part.payload
        if number in self._over:
            return PayloadState.OVER
        if (payload := self._payloads.get(number)) is not None:
            if payload.start.total != start.total or payload.start.use is not start.use:
                raise FrameError("a part differs from its payload's earlier parts in size or use")
            return PayloadState.OPEN
        if len(self._payloads) >= 2 * OPEN_STREAMS_LIMIT:
            raise FrameError(f"more than {2 * OPEN_STREAMS_LIMIT} payloads in parts at once")
        return PayloadState.NEW

    def admit(self, start: Start, body: Any) -> None:
        """Accept a new payload and allocate its memory."""
        assert start.part is not None
        self._payloads[start.part.payload] = _Incoming(start, body, self._allocate(start.total))

    def refuse(self, start: Start) -> None:
        """Refuse a new payload, or abandon an open one."""
        assert start.part is not None
        self._end(start.part.payload)

    def place_of(self, start: Start) -> memoryview:
        """Return the memory for a part of an open payload."""
        assert start.part is not None
        return self._payloads[start.part.payload].payload[start.part.offset : start.part.offset + start.size]

    def complete(self, start: Start) -> Whole | None:
        """Record that a part has arrived. Return the whole payload if it was the last one."""
        assert start.part is not None
        payload = self._payloads.get(start.part.payload)
        if payload is None or start.part.offset in payload.done:
            return None
        payload.done.add(start.part.offset)
        payload.filled += start.size
        if payload.filled < start.total:
            return None
        self._end(start.part.payload)
        return Whole(payload.start, payload.body, payload.payload)

    def withdraw(self, request: int) -> None:
        """Abandon the answer to a request that was withdrawn."""
        for number, payload in list(self._payloads.items()):
            if payload.start.use is Use.ANSWER and payload.start.request == request:
                self._end(number)

    @property
    def held_bytes(self) -> int:
        """Memory of the payloads in progress, in bytes."""
        return sum(payload.start.total for payload in self._payloads.values())

    def clear(self) -> None:
        self._payloads.clear()

    def _end(self, number: int) -> None:
        self._payloads.pop(number, None)
        self._over[number] = None
        if len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]


# -- Lanes: several TCP connections for one pair of peers --------------------------------------------------------------
# One TCP connection does not fill a long fat path, because the kernel's buffers bound its window. On such a path the
# side that dialled the primary connection also dials lanes: TLS connections with the same handshake, whose HELLO has
# the lane's number and the primary's nonce. Payloads then go in parts over all of them. Control and everything else
# stays on the primary.
#
# 1. Lanes end with their primary. If a lane is lost, its parts are sent again on the others.
# 2. Each connection has its own credit, outbox and inbox. The budget counts them as one peer.
# 3. A lane is given no more than it can send soon, so that a slow one delays little.


LANES_LIMIT = 16
"""Maximum number of connections of a pair, the primary included."""
SPREAD_LEAST_BYTES = 64 << 10
"""Smaller payloads are not split and use the primary."""
AHEAD_BYTES = 4 << 20
"""Maximum bytes given to a lane that waits for credit; they are announced, so that credit is granted."""


class Lanes(Generic[LaneName]):
    """All connections of one pair, ``primary`` first, and their payloads in parts."""

    def __init__(self, primary: LaneName, *, payload_limit: int, allocate: Callable[[int], memoryview]) -> None:
        self.members: dict[LaneName, None] = {primary: None}
        self.splitter: Splitter[LaneName] = Splitter(payload_limit=payload_limit)
        self.reassembler = Reassembler(allocate=allocate)

    def splits(self, size: int) -> bool:
        """Return whether a payload of ``size`` bytes is split."""
        return len(self.members) > 1 and size >= SPREAD_LEAST_BYTES

    def join(self, lane: LaneName) -> bool:
        """Add a lane. Return False if there are enough."""
        if len(self.members) >= LANES_LIMIT:
            return False
        self.members[lane] = None
        return True

    def leave(self, lane: LaneName) -> bool:
        """Remove a lost lane. Return False if it was not a member."""
        if lane not in self.members:
            return False
        del self.members[lane]
        self.splitter.requeue(lane)
        return True

    def clear(self) -> None:
        """Drop all payloads, since the primary is lost."""
        self.splitter.clear()
        self.reassembler.clear()

    def refill(self, lane: LaneName, outbox: SendQueue, credit_bytes: int) -> None:
        """Queue parts in the ``outbox`` of ``lane`` if it has little left."""
        while (left := outbox.payload_bytes) < (PART_BYTES if credit_bytes > left else AHEAD_BYTES):
            piece = self.splitter.next(lane)
            if piece is None:
                return
            stream = outbox.put_payload(piece.start, piece.body, piece.data, piece.priority)
            if stream is None:
                self.splitter.put_back(piece)
                return
            self.splitter.assign(lane, stream, piece)
