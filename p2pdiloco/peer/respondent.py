"""What other peers may ask a node for: the manifest, a shard's state, its status."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pdiloco.net.abuse_limits import Allowance
from p2pdiloco.peer.donor import Donor
from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.standing import Standing
from p2pdiloco.protocol.ids import PeerId, ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.wire.control_messages import (
    GetChunk,
    GetManifest,
    GetState,
    GetStatements,
    GetStatus,
    PeerStatus,
    StateProof,
    TellStatements,
    decode_request,
    encode,
)
from p2pdiloco.wire.request_reply import Answer, RequestRefused

STATE_PRIORITY = 10.0
"""State transfers go after contributions and commits."""

LITTLE_BYTES, LITTLE_S = 4 << 20, 0.15
"""Two chunks, or what goes out in that time: what is answered ahead, so that the link is never idle."""
YIELD_S = 0.02
YIELD_MOST_S = 2.0
"""A chunk goes out in that time at the latest, whatever waits."""
MANIFESTS, MANIFESTS_PER_S = 3, 0.1
"""To one peer: it asks with a dozen bytes, and is answered with up to 4 MiB, before any chunk."""
OFFERS, OFFERS_OF_SHARD = 64, 8
OFFERS_PER_S, OFFERS_OF_SHARD_PER_S = 0.2, 1 / 60
"""Of states, to one peer, in all and more for each shard: an offer has up to 3/4 MiB, and is no payload, so it waits
for no budget. Who downloads asks for each shard once, and again when the shard has moved on."""
QUEUED_MOST_BYTES = 64 << 20
"""Chunks that wait for one peer hold memory: a peer that asks and does not read gets no more."""


class Respondent:
    """Answers of one node."""

    def __init__(
        self, manifest: Manifest, driver: Driver, status: Callable[[], PeerStatus], standing: Standing
    ) -> None:
        self._manifest = manifest
        self._driver = driver
        self._status = status
        self._standing = standing
        self._turns = asyncio.Lock()
        self._manifests = Allowance(at_once=MANIFESTS, per_s=MANIFESTS_PER_S)
        shards = len(Layout.of(manifest).shards)
        self._offers = Allowance(
            at_once=OFFERS + OFFERS_OF_SHARD * shards, per_s=OFFERS_PER_S + OFFERS_OF_SHARD_PER_S * shards
        )
        self._donor = Donor(Layout.of(manifest), driver, self.proof)

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
                if not self._manifests.take(peer, self._driver.host.now()):
                    raise RequestRefused("you have the manifest: ask again in some seconds")
                return Answer(b"", self._manifest.encode())
            case GetStatus():
                return Answer(encode(self._status()))
            case GetStatements() | TellStatements():
                return await self._standing.answer(peer, request)
            case GetState(shard=shard):
                if not self._offers.take(peer, self._driver.host.now()):
                    raise RequestRefused("you were offered states lately: ask again in some seconds")
                return Answer(encode(await self._donor.offer(shard)))
            case GetChunk():
                if self._driver.host.links.queued_bytes(peer) > QUEUED_MOST_BYTES:
                    raise RequestRefused("busy: too much waits to be sent to you")
                await self._own_traffic_first()
                data = await self._donor.chunk(request.shard, request.head, request.chunk)
                return Answer(b"", data, STATE_PRIORITY)

    async def _own_traffic_first(self) -> None:
        """Let contributions and commits go before a chunk: wait, one question after the other, while more than little
        waits to be sent to anybody; not for ever, since a peer that takes slowly does not fill our link."""
        async with self._turns:
            for _ in range(round(YIELD_MOST_S / YIELD_S)):
                if self._waiting_bytes() <= self._little_bytes():
                    return
                await self._driver.host.sleep(YIELD_S)

    def _waiting_bytes(self) -> int:
        return sum(map(self._driver.host.links.queued_bytes, self._driver.host.links.peers()))

    def _little_bytes(self) -> float:
        return max(LITTLE_BYTES, LITTLE_S * (self._driver.host.links.up_bytes_per_s or 2 * LITTLE_BYTES / LITTLE_S))

    def proof(self, shard: ShardId) -> StateProof:
        """The machine's state of a shard, with the commit that its owner signed."""
        state = self._driver.machine.view.state(shard)
        header, signature = self._driver.cargo.shelves[state.head.shard].proofs.get(state.head.id, (None, b""))
        return StateProof(state, header, signature)
