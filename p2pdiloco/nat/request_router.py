"""Requests about introductions, taken out of what a transport's handler is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from p2pdiloco.nat.messages import Called, Reachable, decode_introduction, is_introduction
from p2pdiloco.nat.rendezvous_client import RendezvousClient
from p2pdiloco.nat.rendezvous_server import RendezvousServer
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport.transport import TransportHandler
from p2pdiloco.wire.directory_records import PeerRecord
from p2pdiloco.wire.request_reply import Answer, RequestRefused


class RequestRouter:
    """In front of ``inner``. ``point``: whether others meet here; ``rendezvous``: whether we are called; ``learn``: who
    takes what peers say of how they can be reached; ``parted``: who hears whose connection was lost, and why, too. They
    are set before the first connection."""

    def __init__(self, inner: TransportHandler) -> None:
        self._inner = inner
        self.point: RendezvousServer | None = None
        self.rendezvous: RendezvousClient | None = None
        self.learn: Callable[[PeerId, PeerRecord], None] = lambda _peer, _record: None
        self.parted: Callable[[PeerId, str], None] = lambda _peer, _reason: None

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """As of ``TransportHandler``."""
        self._inner.connected(peer, address, is_observer, inbound)

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """As of ``TransportHandler``."""
        self._inner.disconnected(peer, reason)
        self.parted(peer, reason)

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> asyncio.Future[Any] | None:
        """As of ``TransportHandler``."""
        return self._inner.message(peer, body, payload)

    def admit(self, peer: PeerId, body: bytes, size: int) -> bool:
        """As of ``TransportHandler``."""
        return self._inner.admit(peer, body, size)

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """As of ``TransportHandler``."""
        if not is_introduction(body):
            return await self._inner.answer(peer, body)
        try:
            request = decode_introduction(body)
        except ValueError as error:
            raise RequestRefused(f"malformed request: {error}") from error
        if isinstance(request, Reachable):
            self.learn(peer, request.record)
            return Answer(b"")
        if isinstance(request, Called):
            if self.rendezvous is None:
                raise RequestRefused("this peer meets nobody")
            return await self.rendezvous.answer(peer, request)
        if self.point is None:
            raise RequestRefused("this peer is no meeting point")
        return await self.point.answer(peer, request)
