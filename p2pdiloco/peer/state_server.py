"""A donor's side of state transfers: copies of shards at one head, in chunks, for as long as somebody downloads them.

Rules of this file:
1. Who is asked for a shard's state copies it once, between two jobs, in the order in which it travels; all chunks that
   are asked for afterwards are views of that copy, also when the shard has moved on, and for every newcomer.
2. Copies are bounded: in bytes, the longest unused goes first, and in time. Their memory is used again, and goes
   with the last of them.
3. A chunk of a shard that was not copied is copied alone, as long as its head is still the shard's.
4. The proof of a copy is taken with it: a copy and its proof are of one head.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from p2pdiloco.peer.checkpoint_writer import CopyError, copy_shard
from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.signatures import Standing
from p2pdiloco.peer.state_proof import lineage_of
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.timing import RateLimiter
from p2pdiloco.wire.buffer_pool import Blocks
from p2pdiloco.wire.control_messages import (
    GetChunk,
    GetManifest,
    GetState,
    GetStatements,
    GetStatus,
    PeerStatus,
    StateOffer,
    StateProof,
    TellStatements,
    decode_request,
    encode,
)
from p2pdiloco.wire.request_reply import Answer, RequestRefused

T = TypeVar("T")

KEEP_S = 60.0
"""A copy that nobody asked for so long is dropped: longer than a slow newcomer waits for one chunk."""
COPIES_LEAST_BYTES = 128 << 20
COPIES_LEAST = 4
"""Copies there is always room for: as many as one newcomer fetches at once."""


class _Copy(NamedTuple):
    """One shard at one head, as it travels."""

    offer: StateOffer
    data: memoryview


class StateServer:
    """State transfers from one node. ``proof`` tells the machine's state of a shard with its proof."""

    def __init__(self, layout: Layout, driver: Driver, proof: Callable[[ShardId], StateProof]) -> None:
        self._layout = layout
        self._driver = driver
        self._proof = proof
        self._form = driver.state.form
        largest = self._form.width * max(shard.elements for shard in layout.shards)
        self._room = max(COPIES_LEAST_BYTES, COPIES_LEAST * largest)
        self._blocks = Blocks(limit_bytes=self._room)
        self._copies: OrderedDict[tuple[ShardId, Digest], _Copy] = OrderedDict()
        """The longest unused first."""
        self._used_at: dict[tuple[ShardId, Digest], float] = {}
        self._is_looking = False
        self._one_at_a_time = asyncio.Lock()
        """So that no more copies than there is room for are being made."""
        self._making: dict[ShardId, asyncio.Future[_Copy]] = {}

    async def offer(self, shard: ShardId) -> StateOffer:
        """What is to be had of ``shard``; it is kept for a while.

        Raises:
            RequestRefused: it is not here, or just changing.
        """
        head = self._driver.machine.view.head(shard)
        if head is None:
            raise RequestRefused(f"shard {shard} is not here")
        found = self._find(shard, head.id) or await self._copied(shard)
        return found.offer

    async def chunk(self, shard: ShardId, head: Digest, chunk: int) -> memoryview:
        """One chunk of ``shard`` at ``head``.

        Raises:
            RequestRefused: this state, or this chunk of it, is not here.
        """
        known = shard < len(self._layout.shards)
        sizes = self._form.chunk_sizes(self._layout.shards[shard].elements) if known else []
        if chunk >= len(sizes):
            raise RequestRefused(f"there is no chunk {chunk} of shard {shard}")
        if (found := self._find(shard, head)) is not None:
            size = self._form.chunk_bytes
            return found.data[size * chunk : size * (chunk + 1)]
        data = self._blocks.take(sizes[chunk])
        at = await self._copy(shard, data, range(chunk, chunk + 1), lambda head, _: head)
        if at != head:
            raise RequestRefused(f"shard {shard} is not at {head[:8]}")
        return data

    def _find(self, shard: ShardId, head: Digest) -> _Copy | None:
        self._drop_unused()
        found = self._copies.get((shard, head))
        if found is not None:
            self._copies.move_to_end((shard, head))
            self._used_at[shard, head] = self._driver.host.now()
        return found

    def _drop_unused(self) -> None:
        now, held = self._driver.host.now(), sum(len(copy.data) for copy in self._copies.values())
        for key, copy in list(self._copies.items()):
            if held <= self._room and now - self._used_at[key] <= KEEP_S:
                return
            held -= len(copy.data)
            del self._copies[key], self._used_at[key]

    async def _copied(self, shard: ShardId) -> _Copy:
        """A new copy; several who ask at once share it."""
        if (making := self._making.get(shard)) is None:
            making = self._making[shard] = asyncio.get_running_loop().create_future()
            making.add_done_callback(lambda future: future.cancelled() or future.exception())  # if nobody shares it
            try:
                async with self._one_at_a_time:
                    making.set_result(await self._make(shard))
            except RequestRefused as error:
                making.set_exception(error)
            finally:
                making.cancel()
                del self._making[shard]
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            if making.cancelled():  # who asked first does not want it any more
                raise RequestRefused("ask again") from None
            raise

    async def _make(self, shard: ShardId) -> _Copy:
        data = self._blocks.take(self._form.width * self._layout.shards[shard].elements)

        def prove(head: Digest, listed: bytes) -> StateOffer | None:
            proof = self._proof(shard)
            if proof.state.head.id != head:
                return None
            ancestry, proofs = (
                self._driver.machine.view.ancestry(shard),
                self._driver.payload_cache.shelves[shard].proofs,
            )
            return StateOffer(proof, listed, lineage_of(proofs.get(commit) for commit in reversed(ancestry)))

        offer = await self._copy(shard, data, None, prove)
        if offer is None:
            raise RequestRefused(f"shard {shard} is just changing, ask again")
        key, copy = (shard, offer.proof.state.head.id), _Copy(offer, data)
        self._copies[key] = copy
        self._used_at[key] = self._driver.host.now()
        self._drop_unused()
        self._look_later()
        return copy

    def _look_later(self) -> None:
        """Whether copies are still used."""
        if not self._is_looking:
            self._is_looking = True
            host = self._driver.host
            host.call_at(host.now() + KEEP_S, self._look)

    def _look(self) -> None:
        self._is_looking = False
        self._drop_unused()
        if self._copies:
            self._look_later()
        else:
            self._blocks = Blocks(limit_bytes=self._room)  # the last one's memory goes

    async def _copy(
        self, shard: ShardId, data: memoryview, chunks: range | None, then: Callable[[Digest, bytes], T]
    ) -> T:
        try:
            return await copy_shard(self._driver, shard, data, then, chunks=chunks)
        except CopyError as error:
            raise RequestRefused(str(error)) from None


# -- Request handlers --------------------------------------------------------------------------------------------------
# What other peers may ask a node for: the manifest, a shard's state, its status.


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


class RequestHandlers:
    """Answers of one node."""

    def __init__(
        self, manifest: Manifest, driver: Driver, status: Callable[[], PeerStatus], standing: Standing
    ) -> None:
        self._manifest = manifest
        self._driver = driver
        self._status = status
        self._standing = standing
        self._turns = asyncio.Lock()
        self._manifests: RateLimiter[PeerId] = RateLimiter(burst=MANIFESTS, per_s=MANIFESTS_PER_S)
        shards = len(Layout.of(manifest).shards)
        self._offers: RateLimiter[PeerId] = RateLimiter(
            burst=OFFERS + OFFERS_OF_SHARD * shards, per_s=OFFERS_PER_S + OFFERS_OF_SHARD_PER_S * shards
        )
        self._donor = StateServer(Layout.of(manifest), driver, self.proof)

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
        header, signature = self._driver.payload_cache.shelves[state.head.shard].proofs.get(state.head.id, (None, b""))
        return StateProof(state, header, signature)
