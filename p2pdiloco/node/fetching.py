"""Downloading a shard's state from a peer, and checking it before the machine hears of it."""

from __future__ import annotations

from p2pdiloco.node.driver import Driver
from p2pdiloco.node.proofs import proven_digest
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.identifiers import PeerId, ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.runtime.transport import RequestError, Transport
from p2pdiloco.wire.bodies import GetState, StateProof, decode_as, encode

SLOWEST_BYTES_PER_S = 50_000
"""A transfer slower than this is given up."""
PATIENCE_S = 20.0


class Fetching:
    """State transfers of one node."""

    def __init__(self, manifest: Manifest, layout: Layout, driver: Driver, transport: Transport) -> None:
        self._manifest = manifest
        self._layout = layout
        self._driver = driver
        self._transport = transport

    async def fetch(self, shard: ShardId, peer: PeerId) -> None:
        """Get one shard from one peer; ends in ``Fetched`` or ``Failed``."""
        size = 8 * self._layout.shards[shard].elements
        try:
            response = await self._transport.request(
                peer, encode(GetState(shard)), timeout_s=PATIENCE_S + size / SLOWEST_BYTES_PER_S, max_payload=size
            )
            proof = decode_as(response.body, StateProof)
            if proof.state.head.shard != shard or response.payload is None:
                raise ValueError("the answer is about something else")
            result = proven_digest(self._manifest, proof)
        except (RequestError, ValueError) as error:
            self._driver.feed(ev.Failed("fetch", shard, peer, str(error)))
            return
        head, data = proof.state.head, response.payload

        def staged(_: None) -> None:
            if proof.header is not None:
                self._driver.proofs[head.id] = (proof.header, proof.signature)
            self._driver.feed(ev.Fetched(peer, proof.state))

        self._driver.job(
            lambda: self._driver.state.stage(shard, head.id, data, result),
            staged,
            lambda error: self._driver.feed(ev.Failed("fetch", shard, peer, str(error))),
        )
