"""Downloading a shard's state from a peer, and checking it before the machine hears of it."""

from __future__ import annotations

from p2pdiloco.node.driver import Driver
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.chain import genesis_head
from p2pdiloco.protocol.identifiers import Digest, PeerId, ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.messages import commit_id
from p2pdiloco.runtime.identity import verify
from p2pdiloco.runtime.transport import RequestError, Transport
from p2pdiloco.wire.bodies import COMMIT_CONTEXT, GetState, StateProof, decode_as, encode

SLOWEST_BYTES_PER_S = 50_000
"""A transfer slower than this is given up."""
PATIENCE_S = 20.0


def proven_digest(manifest: Manifest, proof: StateProof) -> Digest:
    """The digest that the shard's state must have: the commit's that its owner signed (the manifest's, at version 0).

    Raises:
        ValueError: the proof does not prove its head.
    """
    head, header = proof.state.head, proof.header
    if head.version == 0:
        genesis = manifest.genesis[head.shard]
        if head != genesis_head(manifest.run, head.shard, genesis):
            raise ValueError(f"version 0 of shard {head.shard} is not this run's")
        return genesis
    if header is None or commit_id(header) != head.id or header.shard != head.shard or header.tokens != head.tokens:
        raise ValueError(f"the head of shard {head.shard} is not the commit that came with it")
    if header.version != head.version:
        raise ValueError(f"the head of shard {head.shard} has another version than its commit")
    if not verify(header.owner, COMMIT_CONTEXT + head.id.encode(), proof.signature):
        raise ValueError(f"the commit of shard {head.shard} does not bear its owner's signature")
    return header.result


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
