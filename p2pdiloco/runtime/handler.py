"""What a transport tells and asks its user."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.wire.request_reply import Answer, RequestRefused


class TransportHandler(Protocol):
    """What a transport tells its user. All but ``answer`` are called on the event loop: be quick, never block."""

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """``peer`` can be sent to. ``address``: its socket's, as a multiaddr; of an inbound one not where it listens.
        ``is_observer``: it named no run (``status``, or a joiner that does not know its run yet)."""

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """``peer`` is gone. What was queued for it is lost."""

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> asyncio.Future[Any] | None:
        """A message came. ``payload`` is the handler's own memory from now on, and writable.

        None: it is taken. A future: it is taken when that is done, however it ends; until then its bytes count against
        what the peer may send (``window_bytes``). It must not depend on more bulk to come from that peer."""

    def admit(self, peer: PeerId, body: bytes, size: int) -> bool:
        """Whether to take the payload of ``size`` bytes that comes with ``body``. Asked before memory is taken."""

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """The answer to a request.

        Raises:
            RequestRefused: the text goes to the asker.
        """


class Observer:
    """A transport's handler that takes no part."""

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """Nothing to do."""

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """Nothing to do."""

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> None:
        """Heartbeats and the like are not for us."""

    def admit(self, peer: PeerId, body: bytes, size: int) -> bool:
        """No payloads."""
        return False

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """Nobody asks an observer."""
        raise RequestRefused("this peer only observes")
