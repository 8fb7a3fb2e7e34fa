"""State server: serves copies of shards' states to other peers, each of one head, chunk by chunk, and the payloads of
merges to auditors.

Rules of this file:
1. When a shard's state is requested, it is copied once, between two jobs, in wire layout. All chunks requested
   afterwards are views of that copy, for every newcomer, even if the shard has moved on.
2. Copies are bounded in bytes (the least recently used is dropped first) and in time. Their memory is reused, and
   released with the last copy.
3. A chunk of a shard without a copy is copied alone, while its head is still the shard's.
4. The proof is taken together with the copy, so both are of one head.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from p2pdiloco.peer.driver import CopyError, Driver
from p2pdiloco.peer.host import Host
from p2pdiloco.peer.learner_updates import Payload
from p2pdiloco.peer.signatures import Permissions
from p2pdiloco.protocol.barred_owners import all_payloads
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.timing import RateLimiter
from p2pdiloco.wire.buffer_pool import Blocks
from p2pdiloco.wire.control_messages import (
    GetChunk,
    GetManifest,
    GetPayload,
    GetState,
    GetStatements,
    GetStatus,
    PeerStatus,
    StateOffer,
    TellStatements,
    decode_request,
    encode,
)
from p2pdiloco.wire.request_reply import Answer, RequestRefused

T = TypeVar("T")

# A copy is dropped if nobody asked for it for this long: longer than a slow newcomer waits for one chunk.
KEEP_S = 60.0
COPIES_LEAST_BYTES = 128 << 20
# There is always room for this many copies: as many as one newcomer fetches at once.
COPIES_LEAST = 4


class _Copy(NamedTuple):
    """A copy of one shard at one head, in wire layout."""

    offer: StateOffer
    data: memoryview


class StateServer:
    """Serves the states of one peer's shards."""

    def __init__(self, driver: Driver) -> None:
        self._layout = driver.state.layout
        self._driver = driver
        self._view = driver.view
        self._form = driver.state.form
        self._payload_cache = driver.payload_cache
        self._host = driver.host
        largest = self._form.width * max(shard.elements for shard in self._layout.shards)
        self._room = max(COPIES_LEAST_BYTES, COPIES_LEAST * largest)
        self._blocks = Blocks(limit_bytes=self._room)
        # Least recently used first.
        self._copies: OrderedDict[tuple[ShardId, Digest], _Copy] = OrderedDict()
        self._used_at: dict[tuple[ShardId, Digest], float] = {}
        self._is_looking = False
        # Limits the copies that are being made, so that they do not exceed the room.
        self._one_at_a_time = asyncio.Lock()
        self._making: dict[ShardId, asyncio.Future[_Copy]] = {}

    async def offer(self, shard: ShardId) -> StateOffer:
        """Return an offer of ``shard``, and keep a copy of its state for a while.

        Raises:
            RequestRefused: the shard has no state here, or is changing right now.
        """
        head = self._view.head(shard)
        if head is None:
            raise RequestRefused(f"shard {shard} has no state here yet")
        found = self._find(shard, head.id) or await self._make_shared(shard)
        return found.offer

    async def chunk(self, shard: ShardId, head: Digest, chunk: int) -> memoryview:
        """Return one chunk of ``shard`` at ``head``.

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

    async def payload(self, shard: ShardId, commit: Digest, payload: Digest) -> Payload:
        """Return a payload that was committed with ``commit`` or merged into it.

        Raises:
            RequestRefused: it is not here, or does not belong to the commit.
        """
        if shard >= len(self._layout.shards):
            raise RequestRefused(f"there is no shard {shard}")
        cached = self._payload_cache.shards[shard]
        header, _ = cached.proofs.get(commit, (None, b""))
        held = None if header is None or payload not in all_payloads(header) else cached.payloads.get(payload)
        if held is None:
            raise RequestRefused(f"payload {payload[:8]} of commit {commit[:8]} is not here")
        found: asyncio.Future[Payload | None] = asyncio.get_running_loop().create_future()

        def put(data: Payload | None) -> None:
            if not found.done():
                found.set_result(data)

        self._driver.store.fetch(held, put, lambda: put(None))
        data = await found
        if data is None:
            raise RequestRefused(f"payload {payload[:8]} cannot be read now")
        return data

    def _find(self, shard: ShardId, head: Digest) -> _Copy | None:
        self._drop_unused()
        found = self._copies.get((shard, head))
        if found is not None:
            self._copies.move_to_end((shard, head))
            self._used_at[shard, head] = self._host.now()
        return found

    def _drop_unused(self) -> None:
        now, held = self._host.now(), sum(len(copy.data) for copy in self._copies.values())
        for key, copy in list(self._copies.items()):
            if held <= self._room and now - self._used_at[key] <= KEEP_S:
                return
            held -= len(copy.data)
            del self._copies[key], self._used_at[key]

    async def _make_shared(self, shard: ShardId) -> _Copy:
        """Make a new copy. Several peers that ask at once share it."""
        if (making := self._making.get(shard)) is None:
            making = self._making[shard] = asyncio.get_running_loop().create_future()
            # Mark an exception as retrieved, because possibly nobody else awaits the future.
            making.add_done_callback(lambda future: future.cancelled() or future.exception())
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
            if making.cancelled():  # the request that made the copy was cancelled
                raise RequestRefused("ask again") from None
            raise

    async def _make(self, shard: ShardId) -> _Copy:
        data = self._blocks.take(self._form.width * self._layout.shards[shard].elements)

        def prove(head: Digest, listed: bytes) -> StateOffer | None:
            proof = self._payload_cache.proof_of(self._view.state(shard))
            if proof.state.head.id != head:
                return None
            return StateOffer(proof, listed, self._payload_cache.lineage(shard, self._view.ancestry(shard)))

        offer = await self._copy(shard, data, None, prove)
        if offer is None:
            raise RequestRefused(f"shard {shard} is changing right now, ask again")
        key, copy = (shard, offer.proof.state.head.id), _Copy(offer, data)
        self._copies[key] = copy
        self._used_at[key] = self._host.now()
        self._drop_unused()
        self._look_later()
        return copy

    def _look_later(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._host.call_at(self._host.now() + KEEP_S, self._drop_and_look_later)

    def _drop_and_look_later(self) -> None:
        self._is_looking = False
        self._drop_unused()
        if self._copies:
            self._look_later()
        else:
            self._blocks = Blocks(limit_bytes=self._room)  # no copies are left: release their memory

    async def _copy(
        self, shard: ShardId, data: memoryview, chunks: range | None, then: Callable[[Digest, bytes], T]
    ) -> T:
        try:
            return await self._driver.copy_shard(shard, data, then, chunks=chunks)
        except CopyError as error:
            raise RequestRefused(str(error)) from None


# -- Request handlers --------------------------------------------------------------------------------------------------


# Lower priority than contributions and commits.
STATE_PRIORITY = 10.0

# Bytes that may wait before a chunk is sent: two chunks, or what the link sends in this time, so that it is never idle.
LITTLE_BYTES, LITTLE_S = 4 << 20, 0.15
YIELD_S = 0.02
# A chunk is sent after this time at the latest, even if own traffic waits.
YIELD_MOST_S = 2.0
# A peer that reads less than this meanwhile is not waited for; on a slow link, an eighth of its share of the link.
READ_LEAST_BYTES_PER_S = 50_000
# Rate limit per peer: a request of a dozen bytes is answered with up to 4 MiB, ahead of any chunk.
MANIFESTS, MANIFESTS_PER_S = 3, 0.1
OFFERS, OFFERS_OF_SHARD = 64, 8
# Rate limit of offers per peer, in all and per shard. An offer has up to 3/4 MiB and is not a payload, so the upload
# budget does not delay it. A downloading peer asks for each shard once, and again when the shard has moved on.
OFFERS_PER_S, OFFERS_OF_SHARD_PER_S = 0.2, 1 / 60
# Rate limit of payloads per peer: those of a merge of many contributions at once, and some a second for later audits.
PAYLOADS, PAYLOADS_PER_S = 512, 4.0
# Chunks queued for one peer hold memory. A peer that asks but does not read gets no more.
QUEUED_MOST_BYTES = 64 << 20


class RequestHandlers:
    """Answers the requests of other peers."""

    def __init__(
        self,
        manifest: Manifest,
        state_server: StateServer,
        host: Host,
        status: Callable[[], PeerStatus],
        permissions: Permissions,
    ) -> None:
        self._manifest = manifest
        self._state_server = state_server
        self._host = host
        self._status = status
        self._permissions = permissions
        self._turns = asyncio.Lock()
        # Peers that hardly read what is queued for them. They are not waited for until little is queued for them.
        self._idlers: set[PeerId] = set()
        self._manifests: RateLimiter[PeerId] = RateLimiter(burst=MANIFESTS, per_s=MANIFESTS_PER_S)
        self._payloads: RateLimiter[PeerId] = RateLimiter(burst=PAYLOADS, per_s=PAYLOADS_PER_S)
        shards = len(Layout.of(manifest).shards)
        self._offers: RateLimiter[PeerId] = RateLimiter(
            burst=OFFERS + OFFERS_OF_SHARD * shards, per_s=OFFERS_PER_S + OFFERS_OF_SHARD_PER_S * shards
        )

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """Answer a request of ``peer``.

        Raises:
            RequestRefused: the request is malformed, over its rate limit, or cannot be answered now.
        """
        try:
            request = decode_request(body)
        except ValueError as error:
            raise RequestRefused(f"malformed request: {error}") from error
        match request:
            case GetManifest():
                if not self._manifests.take(peer, self._host.now()):
                    raise RequestRefused("too many manifest requests: ask again in some seconds")
                return Answer(b"", self._manifest.encode())
            case GetStatus():
                return Answer(encode(self._status()))
            case GetStatements() | TellStatements():
                return await self._permissions.answer(peer, request)
            case GetState(shard=shard):
                if not self._offers.take(peer, self._host.now()):
                    raise RequestRefused("too many state requests: ask again in some seconds")
                return Answer(encode(await self._state_server.offer(shard)))
            case GetPayload():
                if not self._payloads.take(peer, self._host.now()):
                    raise RequestRefused("too many payload requests: ask again in some seconds")
                if self._host.links.queued_bytes(peer) > QUEUED_MOST_BYTES:
                    raise RequestRefused("busy: too much data is queued for you")
                found = await self._state_server.payload(request.shard, request.commit, request.payload)
                await self._own_traffic_first()
                return Answer(b"", found, STATE_PRIORITY)
            case GetChunk():
                if self._host.links.queued_bytes(peer) > QUEUED_MOST_BYTES:
                    raise RequestRefused("busy: too much data is queued for you")
                await self._own_traffic_first()
                data = await self._state_server.chunk(request.shard, request.head, request.chunk)
                return Answer(b"", data, STATE_PRIORITY)

    async def _own_traffic_first(self) -> None:
        """Wait until little is queued for any peer, so that contributions and commits go before a chunk.

        One request at a time waits, for at most ``YIELD_MOST_S``: a peer that receives slowly does not fill our link.
        """
        links = self._host.links
        async with self._turns:
            before = {peer: links.queued_bytes(peer) for peer in links.peers()}
            for _ in range(round(YIELD_MOST_S / YIELD_S)):
                little = LITTLE_S * (links.up_bytes_per_s or 2 * LITTLE_BYTES / LITTLE_S)
                if self._waiting_bytes() <= max(LITTLE_BYTES, little):
                    return
                await self._host.sleep(YIELD_S)
            share = (links.up_bytes_per_s or math.inf) / (8 * len(before)) if before else math.inf
            least = YIELD_MOST_S * min(READ_LEAST_BYTES_PER_S, share)
            self._idlers.update(peer for peer, queued in before.items() if links.queued_bytes(peer) > queued - least)

    def _waiting_bytes(self) -> int:
        queued = {peer: self._host.links.queued_bytes(peer) for peer in self._host.links.peers()}
        self._idlers = {peer for peer in self._idlers if queued.get(peer, 0) > LITTLE_BYTES}
        return sum(size for peer, size in queued.items() if peer not in self._idlers)
