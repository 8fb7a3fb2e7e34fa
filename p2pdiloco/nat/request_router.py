"""A transport's handler in front of a peer: it takes out requests about introductions."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from p2pdiloco.nat.messages import Called, Reachable, decode_introduction, is_introduction
from p2pdiloco.nat.rendezvous_client import RendezvousClient
from p2pdiloco.nat.rendezvous_server import RendezvousServer
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport.transport import TransportHandler
from p2pdiloco.wire.directory_records import PeerRecord
from p2pdiloco.wire.request_reply import Answer, RequestRefused


class PeerListener(Protocol):
    """Whoever keeps this peer connected to the others."""

    def handle_reachable(self, peer: PeerId, record: PeerRecord) -> None:
        """``peer`` is connected, and says how it can be reached."""

    def handle_disconnected(self, peer: PeerId, reason: str) -> None:
        """The connection to ``peer`` was lost, for ``reason``."""


class RequestRouter:
    """In front of ``inner``. ``server`` answers peers that want to be introduced, ``client`` those that call this peer
    to a meeting; without them both are refused."""

    def __init__(
        self,
        inner: TransportHandler,
        *,
        server: RendezvousServer | None = None,
        client: RendezvousClient | None = None,
        listener: PeerListener | None = None,
    ) -> None:
        self._inner = inner
        self._server = server
        self._client = client
        self._listener = listener

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """As of ``TransportHandler``."""
        self._inner.connected(peer, address, is_observer, inbound)

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """As of ``TransportHandler``."""
        self._inner.disconnected(peer, reason)
        if self._listener is not None:
            self._listener.handle_disconnected(peer, reason)

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
            if self._listener is not None:
                self._listener.handle_reachable(peer, request.record)
            return Answer(b"")
        if isinstance(request, Called):
            if self._client is None:
                raise RequestRefused("this peer meets nobody")
            return await self._client.handle_call(peer, request)
        if self._server is None:
            raise RequestRefused("this peer is no meeting point")
        return await self._server.handle_request(peer, request)
