"""asyncio protocol of one TLS socket: passes bytes to and from a connection without I/O (net/connection.py).

It is a BufferedProtocol, so bytes are decrypted straight into their place.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from p2pdiloco.net.bandwidth import Path
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.events import Closing, Ended, Failed, Paced, Proved
from p2pdiloco.net.send_queue import Slice
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport import sockets
from p2pdiloco.transport.addresses import Address

HIGH_WATER_BYTES = 32 << 10
LOW_WATER_BYTES = 8 << 10
"""Encrypted bytes that the kernel does not take yet: control cannot overtake them. With 256 KiB, and larger slices and
turns, a request under bulk took 1.7 to 2.0 ms at 2.5 Gbit/s instead of 1.2 to 1.4 (benchmarks/notes.md)."""
PROOF_BYTES = 16 << 10
"""More than is under way when the first long packet is sent. More acknowledged bytes since then prove that it came."""
SLOW_S = sockets.DEAD_AFTER_S / 8
"""Round trip from which packets may just be late, in a full queue or after losses."""


class ChannelDriver(Protocol):
    """Callbacks of a channel for events of its socket."""

    def on_connected(self, channel: Channel) -> None:
        """Called when TLS is established."""

    def on_data(self) -> None:
        """Called when received bytes are to be parsed."""

    def on_writable(self, channel: Channel, is_writable: bool) -> None:
        """Called when the kernel accepts more bytes, or none at present."""

    def on_long_packets(self, channel: Channel) -> None:
        """Called when the first long packet is known to have come."""

    def on_lost(self, channel: Channel, reason: str, error: Exception | None = None) -> None:
        """Called when the socket is closed."""


class Channel(asyncio.BufferedProtocol):
    """One TLS socket. ``address`` is the other side's, or the one that was dialled."""

    def __init__(self, connection: Connection, address: Address, driver: ChannelDriver) -> None:
        loop = asyncio.get_running_loop()
        self.connection = connection
        self.address = address
        self.proved: asyncio.Future[PeerId] = loop.create_future()
        """Result of the handshake: the peer's id, or HandshakeError or ConnectionError."""
        # Retrieve the exception: a failure that is not awaited is no error for the event loop to report.
        self.proved.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.gone: asyncio.Future[str] = loop.create_future()
        """Reason of the end, once the connection has ended."""
        self.began_at = loop.time()
        self.is_met = False
        """Whether a rendezvous server arranged the connection, so that its address cannot be dialled again."""
        self.may_lose_long_packets = False
        """Whether packets of more than ``SHORT_BYTES`` were sent, none is known to have come, and round trips are
        short."""
        self._acked_before: int | None = None
        """Bytes acknowledged before the first of these; None: none was sent, or the kernel does not count."""
        self._has_come = False
        """Whether one of these is known to have come."""
        self.opening: asyncio.Task[object] | None = None
        """Task of the TLS handshake."""
        self.transport: asyncio.Transport | None = None
        self._driver = driver

    def handle_event(self, event: Proved | Failed | Closing | Ended | Paced) -> None:
        """Apply the endpoint's event to this connection's socket, and complete the futures."""
        match event:
            case Proved() if not self.proved.done():
                self.proved.set_result(self.connection.peer)
            case Failed(_, error) if not self.proved.done():
                self.proved.set_exception(error)
            case Closing(_, is_flushed):
                self._close(is_flushed)
            case Paced(_, bytes_per_s):
                self._pace(bytes_per_s)
            case Ended(_, reason):
                self.gone.set_result(reason)

    def write(self, piece: Slice) -> None:
        """Send the next bytes."""
        assert self.transport is not None
        if not self._has_come and len(piece.head) + len(piece.chunk) > sockets.SHORT_BYTES:
            self._look_at_long_packets()
        if len(piece.chunk):
            self.transport.writelines((piece.head, piece.chunk))
        else:
            self.transport.write(piece.head)

    def _close(self, is_flushed: bool) -> None:
        """Close the socket, or cancel its TLS handshake."""
        if self.transport is None:
            if self.opening is not None:
                self.opening.cancel()
        elif is_flushed:
            self.transport.close()
        else:
            self.transport.abort()

    def path(self) -> Path | None:
        """Return the kernel's measurements of the path; None if it has none, or the connection is over."""
        raw = self.transport.get_extra_info("socket") if self.transport is not None else None
        return sockets.path_of(raw) if raw is not None and not self.connection.is_over else None

    def _look_at_long_packets(self) -> None:
        """Update ``may_lose_long_packets``, once a long packet is sent, until one is known to have come."""
        path = self.path()
        acked = None if path is None else path.acked_bytes
        if self._acked_before is None:
            self._acked_before = acked
        self._has_come = (
            acked is not None and self._acked_before is not None and acked > self._acked_before + PROOF_BYTES
        )
        if self._has_come:
            self._driver.on_long_packets(self)
        self.may_lose_long_packets = not self._has_come and (path is None or path.round_trip_s < SLOW_S)

    def _pace(self, bytes_per_s: float | None) -> None:
        raw = self.transport.get_extra_info("socket") if self.transport is not None else None
        if raw is not None and not self.connection.is_over:
            sockets.pace(raw, bytes_per_s)

    # -- called by the event loop ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES, low=LOW_WATER_BYTES)
        self._driver.on_connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._driver.on_lost(self, f"connection lost: {exc}" if exc else "the other side closed the connection", exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = self.connection.buffer()
        assert len(buffer), "with an empty buffer an event loop stops reading silently"
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._acked_before is not None and not self._has_come:
            self._look_at_long_packets()
        if self.connection.advance(nbytes):
            self._driver.on_data()

    def eof_received(self) -> None:
        """Return None, so that the transport closes: TLS has no half-open connections."""

    def pause_writing(self) -> None:
        self._driver.on_writable(self, False)

    def resume_writing(self) -> None:
        self._driver.on_writable(self, True)
