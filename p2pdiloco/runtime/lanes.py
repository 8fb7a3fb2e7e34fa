"""Lanes: further connections beside a pair's primary one, for paths that one connection cannot fill.

A connection that is not allowed a larger window carries about WINDOW_BYTES per round trip (docs: measured). On long fat
paths the side that dialled the primary connection dials lanes too: TLS connections with the same handshake, whose HELLO
names the lane's number and the primary's nonce. Payloads are then sent in parts over all of them (wire/parts.py);
control and everything else stays on the primary.

Rules of this file:
1. Lanes live and end with their primary. A lane that is lost loses nothing: its parts are sent again on the others.
2. Each connection has its own credit, outbox and inbox; the budget counts them as one peer.
3. A lane is not given more than it can soon send, so that a slow one delays little.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from p2pdiloco.wire.frames import STREAM_WRAP, Kind
from p2pdiloco.wire.outbox import Outbox
from p2pdiloco.wire.parts import PART_BYTES, Assembler, Spreader, Whole

LANES_LIMIT = 16
"""Connections of a pair, the primary included."""
SPREAD_LEAST_BYTES = 64 << 10
"""Smaller payloads go on the primary, whole."""
AHEAD_BYTES = 4 << 20
"""Given to a lane that waits for credit: announced, so that credit comes for it."""


class Lane(Protocol):
    """One of the connections, the primary included."""

    def __hash__(self) -> int: ...

    def pump(self) -> None:
        """There may be something to send."""

    def cancel_part(self, stream: int) -> None:
        """Forget this part."""

    def hold(self, size: int, taken: asyncio.Future[Any]) -> None:
        """Count ``size`` bytes that came as outstanding until the handler has taken them."""

    def abort(self, reason: str) -> None:
        """Close now."""


class Lanes:
    """All lanes of one primary connection. ``idle`` is called when all parts have been acknowledged."""

    def __init__(self, primary: Lane, spreader: Spreader[Lane], assembler: Assembler, idle: Callable[[], None]) -> None:
        self._spreader = spreader
        self._assembler = assembler
        self._idle = idle
        self._members: dict[Lane, None] = {primary: None}
        self._streams = itertools.count()

    @property
    def count(self) -> int:
        """Connections, the primary included."""
        return len(self._members)

    @property
    def is_idle(self) -> bool:
        """No payload of ours is on its way in parts."""
        return self._spreader.is_idle

    @property
    def queued_bytes(self) -> int:
        return self._spreader.queued_bytes

    def takes(self, size: int) -> bool:
        """Whether a payload of ``size`` bytes is to be sent in parts."""
        return len(self._members) > 1 and size >= SPREAD_LEAST_BYTES

    def join(self, lane: Lane) -> bool:
        """A further connection is proved. False: there are enough."""
        if len(self._members) >= LANES_LIMIT:
            return False
        self._members[lane] = None
        return True

    def leave(self, lane: Lane) -> None:
        """A further connection is lost."""
        if lane in self._members:
            del self._members[lane]
            self._spreader.lose(lane)
            self._pump()

    def end(self, primary: Lane, reason: str) -> None:
        """The primary is lost, and all with it."""
        self.forget()
        self._assembler.clear()
        members, self._members = list(self._members), {primary: None}
        for lane in members:
            if lane is not primary:
                lane.abort(reason)

    def forget(self) -> None:
        """Nothing more is sent in parts."""
        self._spreader.clear()

    def put(
        self,
        kind: Kind,
        stream: int,
        body: bytes,
        payload: memoryview,
        priority: float,
        topic: Hashable | None = None,
    ) -> bool:
        """Send a payload in parts. False: no room."""
        is_queued = self._spreader.put(kind, stream, body, payload, priority, topic)
        self._pump()
        return is_queued

    def refill(self, lane: Lane, outbox: Outbox, credit_bytes: int) -> None:
        """Give ``lane`` parts to send, if it has little left."""
        if self._spreader.is_idle:
            return
        while (left := outbox.payload_bytes) < (PART_BYTES if credit_bytes > left else AHEAD_BYTES):
            stream = next(self._streams) % STREAM_WRAP
            part = self._spreader.next(lane, stream)
            if part is None:
                return
            if not outbox.put_part(stream, part.header.encode() + part.body, part.data, part.priority):
                self._spreader.put_back(lane, stream)
                return

    def hold(self, size: int, taken: asyncio.Future[Any]) -> None:
        """A payload of ``size`` bytes is not taken yet: all lanes bear it."""
        for lane in self._members:
            lane.hold(size // len(self._members), taken)

    def acknowledge(self, lane: Lane, stream: int) -> None:
        self._spreader.acknowledge(lane, stream)
        if self._spreader.is_idle:
            self._idle()

    def refuse(self, lane: Lane, stream: int) -> None:
        """The other side does not want the payload that this part belongs to."""
        self._cancel(self._spreader.refuse(lane, stream))

    def cancel_response(self, request: int) -> None:
        """The other side does not want this answer."""
        self._cancel(self._spreader.cancel_response(request))

    def place(self, body: bytes, size: int) -> memoryview | None:
        """Inbox: where a part goes."""
        return self._assembler.place(body, size)

    def complete(self, body: bytes, size: int) -> Whole | None:
        """A part came; the payload that it was the last of."""
        return self._assembler.complete(body, size)

    def give_up(self, body: bytes) -> None:
        """The other side gave up the payload that this part belongs to."""
        self._assembler.abort(body)

    def give_up_response(self, request: int) -> None:
        """We do not want this answer."""
        self._assembler.drop_response(request)

    def _cancel(self, parts: list[tuple[Lane, int]]) -> None:
        for lane, stream in parts:
            lane.cancel_part(stream)
        if self._spreader.is_idle:
            self._idle()

    def _pump(self) -> None:
        for lane in list(self._members):
            lane.pump()
