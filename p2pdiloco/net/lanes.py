"""Several TCP connections ("lanes") for one pair of peers.

One TCP connection does not fill a long fat path: its window is bounded by the kernel's buffers (docs: measured). On
long fat paths the side that dialled the primary connection dials lanes too: TLS connections with the same handshake,
whose HELLO names the lane's number and the primary's nonce. Payloads are then sent in parts over all of them
(net/parts.py); control and everything else stays on the primary.

Rules of this file:
1. Lanes live and end with their primary. A lane that is lost loses nothing: its parts are sent again on the others.
2. Each connection has its own credit, outbox and inbox; the budget counts them as one peer.
3. A lane is not given more than it can soon send, so that a slow one delays little.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from p2pdiloco.net.frames import Use
from p2pdiloco.net.outbox import Outbox
from p2pdiloco.net.parts import PART_BYTES, Assembler, Spreader

LANES_LIMIT = 16
"""Connections of a pair, the primary included."""
SPREAD_LEAST_BYTES = 64 << 10
"""Smaller payloads go on the primary, whole."""
AHEAD_BYTES = 4 << 20
"""Given to a lane that waits for credit: announced, so that credit comes for it."""

LaneName = TypeVar("LaneName", bound=Hashable)


class Lanes(Generic[LaneName]):
    """All connections of one pair, ``primary`` first, and what goes over them in parts."""

    def __init__(self, primary: LaneName, *, payload_limit: int, allocate: Callable[[int], memoryview]) -> None:
        self.members: dict[LaneName, None] = {primary: None}
        self.spreader: Spreader[LaneName] = Spreader(payload_limit=payload_limit)
        self.assembler = Assembler(allocate=allocate)

    @property
    def is_idle(self) -> bool:
        """No payload of ours is on its way in parts."""
        return self.spreader.is_idle

    def takes(self, size: int) -> bool:
        """Whether a payload of ``size`` bytes is to be sent in parts."""
        return len(self.members) > 1 and size >= SPREAD_LEAST_BYTES

    def put(
        self, use: Use, request: int, body: bytes, payload: memoryview, priority: float, topic: Hashable | None = None
    ) -> bool:
        """Send a payload in parts. False: no room."""
        return self.spreader.put(use, request, body, payload, priority, topic)

    def join(self, lane: LaneName) -> bool:
        """A further connection is proved. False: there are enough."""
        if len(self.members) >= LANES_LIMIT:
            return False
        self.members[lane] = None
        return True

    def leave(self, lane: LaneName) -> bool:
        """A further connection is lost. False: it was none of these."""
        if lane not in self.members:
            return False
        del self.members[lane]
        self.spreader.lose(lane)
        return True

    def end(self) -> None:
        """The primary is lost."""
        self.spreader.clear()
        self.assembler.clear()

    def refill(self, lane: LaneName, outbox: Outbox, credit_bytes: int) -> None:
        """Give ``lane`` parts to send, if it has little left."""
        while (left := outbox.payload_bytes) < (PART_BYTES if credit_bytes > left else AHEAD_BYTES):
            piece = self.spreader.next(lane)
            if piece is None:
                return
            stream = outbox.put_payload(piece.start, piece.body, piece.data, piece.priority)
            if stream is None:
                self.spreader.put_back(piece)
                return
            self.spreader.gave(lane, stream, piece)
