"""The sending half of a connection: takes from the outbox what may go, and writes it.

Rules of this file:
1. Control is written at once, and counted by the shaper; bulk when the shaper calls, within the other side's credit.
2. Writing stops when the kernel is slow. What waits, waits in the outbox, so that a control message overtakes bulk
   within about one chunk.
3. After ``stop`` nothing is written, and the payloads are released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from p2pdiloco.runtime import sockets
from p2pdiloco.runtime.shaping import Shaper
from p2pdiloco.wire.credit import Spending
from p2pdiloco.wire.outbox import Outbox, Slice

HIGH_WATER_BYTES = 32 << 10
LOW_WATER_BYTES = 8 << 10
"""Encrypted bytes that the kernel does not take yet: control cannot overtake them."""


class Sending:
    """See the module's rules. ``refill`` is called with the credit that is left before anything is taken from the
    outbox, ``drained`` whenever that is empty."""

    def __init__(
        self, outbox: Outbox, shaper: Shaper, *, refill: Callable[[int], None], drained: Callable[[], None]
    ) -> None:
        self._outbox = outbox
        self._shaper = shaper
        self._refill = refill
        self._drained = drained
        self._spending = Spending()
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self.control_bytes = 0
        self.bulk_bytes = 0

    def start(self, transport: asyncio.Transport) -> None:
        """The channel is up: control may go."""
        self._transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES, low=LOW_WATER_BYTES)

    def open(self, peer: Hashable) -> None:
        """The other side is proved to be ``peer``: bulk may go."""
        self._shaper.open(peer, self)
        self.pump()

    def stop(self) -> None:
        """The connection is over."""
        self._transport = None
        self._shaper.close(self)
        self._outbox.clear()

    def pause(self) -> None:
        """The kernel is slow."""
        self._is_paused = True

    def resume(self) -> None:
        """The kernel takes more."""
        self._is_paused = False
        self.pump()

    def credit(self, granted: int) -> None:
        """The other side takes more bulk.

        Raises:
            FrameError: it takes back what it granted.
        """
        self._spending.extend(granted)
        self.pump()

    def pump(self) -> None:
        """Write the control that waits; tell the shaper of bulk."""
        if self._transport is None:
            return
        self._refill(self._spending.left)
        while not self._is_paused and (piece := self._outbox.next(0)) is not None:
            self._write(piece)
            self._shaper.wrote_control(self, len(piece.head))
        if self._can_write_bulk:
            self._shaper.ready(self)
        elif self._outbox.is_empty:
            self._drained()

    def write_bulk(self, most: int) -> int:
        """BulkSender: the next chunk. 0: there is none, or the kernel or the other side takes no more now."""
        self._refill(self._spending.left)
        if not self._can_write_bulk or (piece := self._outbox.next(min(most, self._spending.left))) is None:
            return 0
        count = self._write(piece)
        self._spending.sent += len(piece.chunk)
        if self._outbox.is_empty:
            self._drained()
        return count

    def pace(self, bytes_per_s: float | None) -> None:
        """BulkSender: limit what the kernel sends."""
        raw = self._transport.get_extra_info("socket") if self._transport is not None else None
        if raw is not None:
            sockets.pace(raw, bytes_per_s)

    @property
    def has_waiting_bulk(self) -> bool:
        """There is bulk, and the other side takes it: only the kernel or the budget holds it back."""
        return self._transport is not None and self._spending.left > 0 and self._outbox.has_bulk

    @property
    def _can_write_bulk(self) -> bool:
        return self.has_waiting_bulk and not self._is_paused

    def _write(self, piece: Slice) -> int:
        assert self._transport is not None
        if len(piece.chunk):
            self._transport.writelines((piece.head, piece.chunk))
        else:
            self._transport.write(piece.head)
        self.control_bytes += len(piece.head)
        self.bulk_bytes += len(piece.chunk)
        return len(piece.head) + len(piece.chunk)
