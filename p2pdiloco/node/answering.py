"""What other peers may ask a node for: the manifest, a shard's state, its status."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pdiloco.node.driver import Driver
from p2pdiloco.protocol.identifiers import Digest, ShardId
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.runtime.transport import Answer, RequestRefused
from p2pdiloco.wire.bodies import GetManifest, GetState, GetStatus, PeerStatus, StateProof, decode_request, encode

COPY_S = 60.0
STATE_PRIORITY = 10.0
"""State transfers go after contributions and commits."""


class Answering:
    """Answers of one node."""

    def __init__(self, manifest: Manifest, driver: Driver, status: Callable[[], PeerStatus]) -> None:
        self._manifest = manifest
        self._driver = driver
        self._status = status

    async def answer(self, body: bytes) -> Answer:
        """The answer to a request.

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
                return await self._state_of(shard)

    async def _state_of(self, shard: ShardId) -> Answer:
        chains = self._driver.machine.core.chains
        if shard >= len(chains) or chains[shard].head is None:
            raise RequestRefused(f"shard {shard} is not here")
        copied: asyncio.Future[tuple[StateProof, Digest, bytes]] = asyncio.get_running_loop().create_future()

        def take(result: tuple[Digest, bytes]) -> None:
            if not copied.done():  # the proof is taken in the same breath, so that it is the copy's
                copied.set_result((self.proof(shard), *result))

        def refuse(error: Exception) -> None:
            if not copied.done():
                copied.set_exception(RequestRefused(str(error)))

        self._driver.job(lambda: self._driver.state.copy(shard), take, refuse)
        try:
            proof, head, data = await asyncio.wait_for(copied, COPY_S)
        except TimeoutError:
            raise RequestRefused("busy") from None
        if proof.state.head.id != head:
            raise RequestRefused(f"shard {shard} is just changing, ask again")
        return Answer(encode(proof), data, STATE_PRIORITY)

    def proof(self, shard: ShardId) -> StateProof:
        """The machine's state of a shard, with the commit that its owner signed."""
        state = self._driver.machine.core.chains[shard].state()
        header, signature = self._driver.proofs.get(state.head.id, (None, b""))
        return StateProof(state, header, signature)
