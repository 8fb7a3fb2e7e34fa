"""Downloading shards' states from several peers at once, every chunk checked before the machine hears of it.

The machine says which shard to fetch and from whom (``Fetch``). That donor's offer, proved by the owner's signature,
lists the digests of the shard's chunks; the chunks themselves come from it and from other live peers (``chunk_plan``).

Rules of this file:
1. Nothing of what came is used before its digest is found in the list that the shard's owner signed. Each chunk is
   checked once, right after it came, on a thread; it stays where it was received until it is installed.
2. Who sends a chunk that is not what was listed is counted, and not asked for a while, which doubles: it may be its
   memory, which it will mend. If another donor sends that chunk as it was listed, it is asked no more in this life.
3. A donor that goes away or is silent costs what was asked from it. A shard fails when nobody is left who has it, and
   the machine decides what then.
4. A newcomer's donors are never idle for want of questions: shards that the machine will ask for next are begun before
   it does, ``AHEAD_BYTES`` of them.
5. Every question has a deadline; what is asked is bounded by ``chunk_plan``, what is held by the machine's fetches and
   AHEAD_BYTES.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from p2pdiloco.peer.arrivals import Arrivals
from p2pdiloco.peer.chunk_plan import Ask, ChunkPlan
from p2pdiloco.peer.distrust import Distrust
from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.inspection import Inspection
from p2pdiloco.peer.offers import ancestors, checked_offer, is_listed, owner_of
from p2pdiloco.peer.signatures import UnknownMemberError
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.messages import commit_id
from p2pdiloco.wire.control_messages import GetChunk, GetState, StateOffer, encode
from p2pdiloco.wire.request_reply import RequestError, RequestRefused

SLOWEST_BYTES_PER_S = 50_000
"""A transfer slower than this is given up."""
PATIENCE_S = 20.0
LOOK_S = 0.5
"""How often it is looked whether something is overdue, and who else is there."""
DONORS_MOST = 8
AHEAD_BYTES = 32 << 20
AHEAD_MOST = 32
"""Shards, however small."""

Fetched = tuple[StateOffer, Sequence[memoryview]]
"""And the chunks as they travelled."""


class _Download:
    """One shard on its way. ``done`` ends when it is whole, or in RequestError."""

    def __init__(self, offer: StateOffer, sizes: Sequence[int]) -> None:
        self.offer = offer
        self.sizes = sizes
        """Bytes of its chunks."""
        self.chunks: list[memoryview | None] = [None] * len(self.sizes)
        self.missing = len(self.sizes)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_error = "no donor is left"

    @property
    def head(self) -> Digest:
        return self.offer.proof.state.head.id


class Downloads:
    """State transfers to one node. ``arrivals`` hears of what came."""

    def __init__(
        self,
        manifest: Manifest,
        layout: Layout,
        driver: Driver,
        inspection: Inspection,
        arrivals: Arrivals,
        fault: Callable[[PeerId, str, str], None],
    ) -> None:
        self._manifest = manifest
        self._layout = layout
        self._driver = driver
        self._inspection = inspection
        self._host = driver.host
        self.arrivals = arrivals
        self._fault = fault
        self._plan = ChunkPlan()
        self._downloads: dict[ShardId, _Download] = {}
        self._ahead: dict[ShardId, asyncio.Future[Fetched]] = {}
        """Begun before the machine asked."""
        self._asking: dict[Ask, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._distrust = Distrust(driver.host.now)
        self._seen: set[PeerId] = set()
        """Who was live when it was looked last."""

    async def fetch(self, shard: ShardId, peer: PeerId) -> None:
        """Get one shard's state, beginning at ``peer``; ends in ``Fetched`` or ``Failed``."""
        self._run_ahead()
        try:
            offer, chunks = await self._begun(shard) or await self._get(shard, peer)
        except (RequestError, ValueError) as error:
            self._driver.feed(ev.Failed("fetch", shard, peer, str(error)))
            return
        state = offer.proof.state
        self.arrivals.shard(offer, chunks)
        self._run_ahead()

        def staged(_: None) -> None:
            if offer.proof.header is not None:
                proofs = self._driver.cargo.shelves[shard].proofs
                proofs[state.head.id] = (offer.proof.header, offer.proof.signature)
                proofs.update(
                    (commit_id(earlier.header), (earlier.header, earlier.signature)) for earlier in offer.lineage
                )
            self._driver.feed(ev.Fetched(peer, state, ancestors(offer.proof, offer.lineage), owner_of(offer.proof)))

        self._driver.job(
            lambda: self._driver.state.stage(shard, state.head.id, chunks, offer.digests), staged, shard=shard
        )

    async def _begun(self, shard: ShardId) -> Fetched | None:
        """What was begun before the machine asked; None if it was not, or failed."""
        future = self._ahead.pop(shard, None)
        if future is None:
            return None
        try:
            return await future
        except (RequestError, ValueError):
            return None

    async def _get(self, shard: ShardId, peer: PeerId) -> Fetched:
        offer = await self._offer(shard, peer)
        return offer, await self._download(shard, peer, offer)

    def _run_ahead(self) -> None:
        """Begin what the machine will ask for next."""
        view = self._driver.machine.view
        self._ahead = {shard: future for shard, future in self._ahead.items() if view.head(shard) is None}
        width = self._driver.state.form.width
        room = AHEAD_BYTES - width * sum(self._layout.shards[shard].elements for shard in self._ahead)
        for shard in view.unfetched():
            if shard in self._ahead:
                continue
            if room <= 0 or len(self._ahead) >= AHEAD_MOST:
                return
            donors = [peer for peer in view.offering(shard) if not self._distrust.of(peer)]
            if donors:
                room -= width * self._layout.shards[shard].elements
                future = self._ahead[shard] = asyncio.get_running_loop().create_future()
                work = self._get_ahead(shard, donors[shard % len(donors)], future)
                self._host.spawn(work, name=f"fetch {shard} ahead")

    async def _get_ahead(self, shard: ShardId, peer: PeerId, future: asyncio.Future[Fetched]) -> None:
        try:
            future.set_result(await self._get(shard, peer))
        except (RequestError, ValueError) as error:
            future.set_exception(error)
            future.exception()  # nobody may ever ask
            if self._ahead.get(shard) is future:
                del self._ahead[shard]
        finally:
            future.cancel()

    async def _offer(self, shard: ShardId, peer: PeerId) -> StateOffer:
        """What ``peer`` has of the shard.

        Raises:
            RequestError: no answer, or from somebody who is not asked any more, or too few peers stand by it.
            ValueError: it does not prove what it offers.
        """
        if self._distrust.of(peer):
            raise RequestError("it has sent a wrong state before")
        response = await self._host.links.request(peer, encode(GetState(shard)), timeout_s=PATIENCE_S)
        body = response.body
        try:
            offer = await self._checked(peer, shard, body)
        except ValueError as error:
            self._was_wrong(peer, str(error))
            raise
        head = offer.proof.state.head
        for commit in offer.lineage:
            self._driver.cargo.compare(commit.header, commit.signature)
        if offer.proof.header is not None:
            self._driver.cargo.compare(offer.proof.header, offer.proof.signature)
        self._inspection.tell_contradictions()
        self._driver.feed(ev.StateOffered(peer, head, ancestors(offer.proof, offer.lineage), owner_of(offer.proof)))
        if problem := self._driver.machine.view.refusal(head):
            raise RequestError(problem)
        return offer

    async def _checked(self, peer: PeerId, shard: ShardId, body: bytes) -> StateOffer:
        """As ``checked_offer``; of members that are not known here ``peer`` is asked first."""

        def check() -> StateOffer:
            return checked_offer(self._manifest, self._layout, shard, body, self._inspection.standing)

        try:
            return await self._host.work("checks", check)
        except UnknownMemberError:
            await self._inspection.ask_for_members(peer)
        return await self._host.work("checks", check)

    async def _download(self, shard: ShardId, peer: PeerId, offer: StateOffer) -> Sequence[memoryview]:
        if shard in self._downloads:  # the machine fetches a shard once at a time
            raise RequestError("it is being fetched already")
        sizes = self._driver.state.form.chunk_sizes(self._layout.shards[shard].elements)
        download = self._downloads[shard] = _Download(offer, sizes)
        self._plan.begin(shard, download.sizes, peer)
        self._plan.add(peer)
        if self._looking is None:
            self._looking = self._host.spawn(self._look(), name="look after downloads")
        self._ask_more()
        try:
            await download.done
        finally:
            del self._downloads[shard]
            self._cancel(self._plan.end(shard))
        return [chunk for chunk in download.chunks if chunk is not None]

    async def _look(self) -> None:
        """While something is being fetched."""
        try:
            while not self._plan.is_idle:
                self._find_donors()
                self._ask_more()
                await self._host.sleep(LOOK_S)
        finally:
            self._looking = None

    def _find_donors(self) -> None:
        """Who may have what we want, besides those who offered it: the same few for as long as they live."""
        view = self._driver.machine.view
        for peer in self._seen.difference(view.live):
            self._cancel(self._plan.drop(peer))
        self._seen = set(view.live)
        able = [peer for peer in view.marks() if not self._distrust.of(peer)]
        mine = self._driver.identity.peer_id
        for peer in sorted(able, key=lambda peer: digest_of(f"{mine}/{peer}".encode()))[:DONORS_MOST]:
            self._plan.add(peer)

    def _ask_more(self) -> None:
        is_ending = self._ahead.keys() >= set(self._driver.machine.view.unfetched())
        for ask in self._plan.next(self._host.now(), is_ending=is_ending):
            asking = self._ask(ask, self._downloads[ask.piece.shard])
            self._asking[ask] = self._host.spawn(asking, name=f"fetch {ask.piece}")
        for shard, download in self._downloads.items():
            if not download.done.done() and not self._plan.can_end(shard):
                download.done.set_exception(RequestError(download.last_error))

    async def _ask(self, ask: Ask, download: _Download) -> None:
        """Get one chunk from one donor."""
        shard, chunk = ask.piece
        size = download.sizes[chunk]
        try:
            response = await self._host.links.request(
                ask.donor,
                encode(GetChunk(shard, download.head, chunk)),
                timeout_s=PATIENCE_S + 8 * size / SLOWEST_BYTES_PER_S,
                max_payload=size,
            )
            data = response.payload
            if data is None or len(data) != size or not await self._is_listed(download.offer, chunk, data):
                raise ValueError(f"chunk {chunk} of shard {shard} is not what its owner signed")
            self._arrived(ask, download, data)
        except (RequestError, ValueError) as error:
            if self._is_asking(ask):
                self._did_not_come(ask, download, error)
        finally:
            if self._is_asking(ask):
                del self._asking[ask]
                self._ask_more()

    def _is_asking(self, ask: Ask) -> bool:
        """Whether this task still does. One that is cancelled in the moment in which its question ends goes on to its
        end; the same may have been asked again by then, by another task, and this end is not that one's."""
        return self._asking.get(ask) is asyncio.current_task()

    def _did_not_come(self, ask: Ask, download: _Download, error: RequestError | ValueError) -> None:
        download.last_error = str(error)
        if not isinstance(error, RequestError):
            self._was_wrong(ask.donor, str(error), (download.head, ask.piece.chunk))
            return
        self._plan.failed(ask, is_unable=True)
        if not isinstance(error, RequestRefused):
            self._cancel(self._plan.drop(ask.donor))

    def _is_listed(self, offer: StateOffer, chunk: int, data: memoryview) -> asyncio.Future[bool]:
        return self._host.work("checks", lambda: is_listed(offer, chunk, data, self._driver.state.form))

    def _arrived(self, ask: Ask, download: _Download, data: memoryview) -> None:
        self._cancel([other for other in self._plan.arrived(ask, self._host.now()) if other != ask])
        chunk = ask.piece.chunk
        if download.chunks[chunk] is not None or download.done.done():
            return
        download.chunks[chunk] = data
        self._distrust.right(ask.donor, (download.head, chunk))
        download.missing -= 1
        self.arrivals.chunk(len(data))
        if not download.missing:
            download.done.set_result(None)

    def _was_wrong(self, peer: PeerId, reason: str, chunk: tuple[Digest, int] | None = None) -> None:
        """It lies, or its memory does."""
        self._distrust.wrong(peer, chunk)
        self._cancel(self._plan.drop(peer))
        self._fault(peer, "state", reason)

    def _cancel(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            if (task := self._asking.pop(ask, None)) is not None:
                task.cancel()
