"""What other peers may ask a node for: the manifest, a shard's state, its status."""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco.node.driver import Driver
from p2pdiloco.node.serving import Serving
from p2pdiloco.protocol.identifiers import PeerId, ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.runtime.transport import Answer, RequestRefused
from p2pdiloco.wire.bodies import (
    GetChunk,
    GetManifest,
    GetState,
    GetStatus,
    PeerStatus,
    StateProof,
    decode_request,
    encode,
)

STATE_PRIORITY = 10.0
"""State transfers go after contributions and commits."""

QUEUED_MOST_BYTES = 64 << 20
"""Chunks that wait for one peer hold memory: a peer that asks and does not read gets no more."""


class Answering:
    """Answers of one node. ``queued``: bytes that wait to be sent to a peer."""

    def __init__(
        self, manifest: Manifest, driver: Driver, status: Callable[[], PeerStatus], queued: Callable[[PeerId], int]
    ) -> None:
        self._manifest = manifest
        self._driver = driver
        self._status = status
        self._queued = queued
        self._serving = Serving(Layout.of(manifest), driver, self.proof)

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """The answer to a request of ``peer``.

        Raises:
            RequestRefused: malformed, or not to be had here now.
        """
        try:
            request = decode_request(body)
        except ValueError as error:
            raise RequestRefused(f"malformed request: {error}") from error
        match request:
            case GetManifest():
                return Answer(b"", self._manifest.encode())
            case GetStatus():
                return Answer(encode(self._status()))
            case GetState(shard=shard):
                return Answer(encode(await self._serving.offer(shard)))
            case GetChunk():
                if self._queued(peer) > QUEUED_MOST_BYTES:
                    raise RequestRefused("busy: too much waits to be sent to you")
                data = await self._serving.chunk(request.shard, request.head, request.chunk)
                return Answer(b"", data, STATE_PRIORITY)

    def proof(self, shard: ShardId) -> StateProof:
        """The machine's state of a shard, with the commit that its owner signed."""
        state = self._driver.machine.core.chains[shard].state()
        header, signature = self._driver.proofs.get(state.head.id, (None, b""))
        return StateProof(state, header, signature)
