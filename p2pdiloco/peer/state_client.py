"""State client: downloads shards' states from several peers at once, and verifies every chunk.

The machine says which shard to fetch and from which peer (``Fetch``). That donor's offer, proven by the owner's
signature, lists the digests of the shard's chunks. The chunks come from that donor and from other live peers
(``chunk_scheduler``).

Rules of this file:
1. No data is used before its digest was found in the list that the shard's owner signed. Each chunk is verified once,
   on a thread, when it arrives. It stays where it was received until it is installed.
2. A donor that sends a wrong chunk is reported and not asked for a while, which doubles each time: its memory may be at
   fault, and it will repair that. If another donor sends the same chunk correctly, the first is not asked again in this
   life.
3. A donor that disconnects or is silent costs only what was requested from it. A shard fails when no donor is left that
   has it. The machine decides what to do then.
4. Donors of a newcomer are never idle: shards that the machine will ask for next are requested ahead, up to
   ``AHEAD_BYTES``.
5. Every request has a deadline. ``chunk_scheduler`` bounds the requests; the machine's fetches and AHEAD_BYTES bound
   the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import NamedTuple, TextIO

import torch
from torch import Tensor

from p2pdiloco.codec.digests import StateForm
from p2pdiloco.peer.chunk_scheduler import Ask, ChunkPlan
from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.host import Disk, Host, replace, sweep
from p2pdiloco.peer.message_verifier import MessageVerifier
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.peer.signatures import UnknownMemberError
from p2pdiloco.peer.state_proof import ancestors, checked_offer, is_listed, owner_of
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.util import logs
from p2pdiloco.util.files import LOCAL
from p2pdiloco.util.logs import bottom_line
from p2pdiloco.wire.control_messages import GetChunk, GetState, StateOffer, StateProof, encode
from p2pdiloco.wire.request_reply import RequestError, RequestRefused

# -- Partial-download cache --------------------------------------------------------------------------------------------
# Downloaded shards of a joining peer, on its disk until its first checkpoint, so that an interrupted join resumes.
#
# Rules of this section:
# 1. A file appears whole or not at all, by rename. It is not synced, so it may be torn after a crash of the machine.
#    Every chunk is therefore checked against the owner's signature when it is read.
# 2. The files are optional: a full or slow disk costs files, never the join. The queue of writes is bounded.
# 3. A file that cannot be used is removed.


log = logs.get("node")

# The folder of these files in a run's folder.
INCOMING = "incoming"
LENGTH_BYTES = 4
SUFFIX = ".state"


class Kept(NamedTuple):
    """Shards that were read from disk. The vectors have the size of the whole model, with these shards in place."""

    shards: tuple[StateProof, ...]
    theta: Tensor
    momentum: Tensor


def keep(folder: Path, offer: StateOffer, chunks: Sequence[memoryview], disk: Disk = LOCAL) -> None:
    """Write one shard to disk. ``chunks`` are in wire layout.

    Raises:
        OSError: the disk is full. Nothing is left behind.
    """
    path, head = folder / f"shard-{offer.proof.state.head.shard:08d}{SUFFIX}", encode(offer)
    parts = (len(head).to_bytes(LENGTH_BYTES, "big"), head)
    replace(disk, path, chain(parts, chunks), is_durable=False)


def load(folder: Path, manifest: Manifest, disk: Disk = LOCAL) -> Kept | None:
    """Read the downloaded shards in ``folder``; None if none can be used."""
    layout, proofs = Layout.of(manifest), []
    sweep(disk, folder)
    names = [name for name in disk.names(folder) if name.startswith("shard-") and name.endswith(SUFFIX)]
    if not names:
        return None
    theta = torch.zeros(layout.elements)
    momentum = StateForm.of(manifest.config.outer).still(layout.elements)
    for name in names:
        try:
            proofs.append(_read(name, disk.read(folder / name), manifest, layout, theta, momentum))
        except (OSError, ValueError) as error:
            log.warning("cannot use a downloaded shard", path=folder / name, reason=str(error))
            with contextlib.suppress(OSError):
                disk.remove(folder / name)
    return Kept(tuple(proofs), theta, momentum) if proofs else None


def _read(name: str, data: bytes, manifest: Manifest, layout: Layout, theta: Tensor, momentum: Tensor) -> StateProof:
    """Read one file into ``theta`` and ``momentum``; return its proof. Raises ValueError if it cannot be used."""
    shard = ShardId(int(name.removeprefix("shard-").removesuffix(SUFFIX)))
    if not 0 <= shard < len(layout.shards):
        raise ValueError(f"there is no shard {shard}")
    piece, view = layout.shards[shard], memoryview(data)
    at = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "big")
    offer = checked_offer(manifest, layout, shard, bytes(view[LENGTH_BYTES:at]))
    span = slice(piece.start, piece.stop)
    form = StateForm.of(manifest.config.outer)
    if form.unpacked(view[at:], theta[span], momentum[span]) != offer.digests:
        raise ValueError("it does not match its owner's signature")
    return offer.proof


# -- Download progress -------------------------------------------------------------------------------------------------
# Bytes, rate and remaining time of a download.
# Rules of this section:
# 1. Pure: time is a parameter. The rate is that of the last WINDOW_S, so that it drops when a donor dies.
# 2. The line for a terminal fits its width and is ASCII.


WINDOW_S = 5.0
BAR_MOST = 30
# Maximum characters of a line beside its bar.
FIXED = 44


class TransferProgress:
    """Progress of a transfer of ``total_bytes``."""

    def __init__(self, total_bytes: int, now: float) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.began_at = now
        # (time, bytes received so far): one point before the window, the others inside it.
        self._points: deque[tuple[float, int]] = deque([(now, 0)])

    def add(self, count: int, now: float) -> None:
        """Note that ``count`` more bytes have arrived."""
        self.done_bytes += count
        self._points.append((now, self.done_bytes))
        while len(self._points) > 2 and self._points[1][0] <= now - WINDOW_S:
            self._points.popleft()

    @property
    def share(self) -> float:
        """Share of the bytes that have arrived, 0 to 1."""
        return min(1.0, self.done_bytes / self.total_bytes) if self.total_bytes else 1.0

    def bytes_per_s(self, now: float) -> float:
        """Return the bytes per second over the last WINDOW_S."""
        began, before = self._points[0]
        return (self.done_bytes - before) / max(now - began, 1e-3)

    def left_s(self, now: float) -> float | None:
        """Return the seconds until the rest has arrived, at this rate; None: nothing arrives."""
        left = max(0, self.total_bytes - self.done_bytes)
        rate = self.bytes_per_s(now)
        return 0.0 if not left else left / rate if rate > 0 else None

    def line(self, now: float, width: int) -> str:
        """Return ``[=====     ]  48 % of 800.0 MB, 114.2 MB/s, 0:04 left``, in at most ``width`` characters."""
        left_s = self.left_s(now)
        text = (
            f" {self.share:4.0%} of {self.total_bytes / 1e6:.1f} MB, {self.bytes_per_s(now) / 1e6:.1f} MB/s, "
            f"{'stalled' if left_s is None else clock(left_s) + ' left'}"
        )
        room = min(BAR_MOST, width - max(FIXED, len(text)) - 2)
        if room < 5:
            return text.strip()[: max(0, width)]
        filled = round(self.share * room)
        return f"[{'=' * filled}{' ' * (room - filled)}]{text}"

    def fields(self, now: float) -> dict[str, object]:
        """Return the fields for the log and for the event log."""
        left_s = self.left_s(now)
        return {
            "done_mb": round(self.done_bytes / 1e6, 1),
            "of_mb": round(self.total_bytes / 1e6, 1),
            "mb_per_s": round(self.bytes_per_s(now) / 1e6, 2),
            "left_s": None if left_s is None else round(left_s, 1),
        }


def clock(seconds: float) -> str:
    """Format seconds as ``0:07`` or ``1:02:09``."""
    minutes, rest = divmod(round(min(seconds, 359_999.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# -- Partial downloads -------------------------------------------------------------------------------------------------
# Reports the progress of a join, and keeps the downloaded shards.
# Rules of this section:
# 1. While a peer joins, a terminal shows one line of progress below all others, which is redrawn. Without a terminal,
#    the log gets a line every ``LOG_S`` seconds. The event log gets the beginning, the end, and the same progress.
# 2. Downloaded shards are kept on disk until a checkpoint contains them (``keep``), if the download will probably take
#    ``KEEP_FROM_S`` or longer: a shorter one is faster to repeat than to write. At most ``WAITING_MOST`` shards wait to
#    be written; further ones are not kept.


LOG_S = 5.0
DRAW_S = 0.2
WAITING_MOST = 8
# Shorter downloads are not kept: writing 800 MB took 0.9 CPU seconds, and on two busy cores a third of the join's time.
KEEP_FROM_S = 20.0


class PartialDownloads:
    """Reports the progress of a join, and keeps the downloaded shards on disk.

    ``width``: bytes per parameter of a state. ``folder``: where shards are kept.
    """

    def __init__(
        self, layout: Layout, width: int, folder: Path, metrics: Metrics, host: Host, *, stream: TextIO | None = None
    ) -> None:
        self._layout = layout
        self._width = width
        self._folder = folder
        self._metrics = metrics
        self._host = host
        self._stream = stream or sys.stderr
        # Not None while the peer joins.
        self._progress: TransferProgress | None = None
        self._told_at = float("-inf")
        self._waiting = 0
        self._writing = asyncio.Lock()

    def begin(self, missing: Sequence[int]) -> None:
        """Begin a join. ``missing``: the number of parameters of each shard that the peer lacks."""
        now = self._host.now()
        self._progress = TransferProgress(self._width * sum(missing), now)
        self._told_at = now
        self._metrics.write("joining", shards=len(missing), of=len(self._layout.shards), **self._progress.fields(now))
        log.info("downloading the run's state", shards=len(missing), of=len(self._layout.shards))

    def on_chunk(self, size: int) -> None:
        """Count one verified chunk of ``size`` bytes."""
        if self._progress is None:
            return
        now, is_terminal = self._host.now(), self._stream.isatty()
        self._progress.add(size, now)
        if now - self._told_at < (DRAW_S if is_terminal else LOG_S):
            return
        self._told_at = now
        if is_terminal:
            self._draw(now)
        else:
            log.info("downloading", **self._progress.fields(now))
        self._metrics.write("transfer", **self._progress.fields(now))

    def on_shard(self, offer: StateOffer, chunks: Sequence[memoryview]) -> None:
        """Note that all chunks of one shard have arrived."""
        head, size = offer.proof.state.head, sum(map(len, chunks))
        self._metrics.write("fetched", shard=head.shard, version=head.version, head=head.id, bytes=size)
        if self._progress is not None and self._waiting < WAITING_MOST and self._is_long(self._progress):
            self._waiting += 1
            self._host.spawn(self._keep(offer, chunks), name=f"keep shard {head.shard}")

    def _is_long(self, progress: TransferProgress) -> bool:
        now = self._host.now()
        left_s = progress.left_s(now)
        return left_s is None or now - progress.began_at + left_s >= KEEP_FROM_S

    def end(self) -> bool:
        """End the join: every shard has a state. Returns True if the peer was joining, so that files may have been
        kept."""
        if self._progress is None:
            return False
        now = self._host.now()
        seconds, size = now - self._progress.began_at, self._progress.done_bytes
        if self._stream.isatty():
            self._draw(now)
            bottom_line.leave()
        self._metrics.write("downloaded", bytes=size, seconds=round(seconds, 3))
        log.info("the run's state is here", mb=round(size / 1e6, 1), seconds=round(seconds, 1))
        self._progress = None
        return True

    async def clear(self) -> None:
        """Remove the kept shards, because a checkpoint contains them."""
        async with self._writing:
            await self._host.work("disk", lambda: self._host.disk.remove_folder(self._folder))

    async def _keep(self, offer: StateOffer, chunks: Sequence[memoryview]) -> None:
        try:
            async with self._writing:
                if self._progress is not None:
                    await self._host.work("disk", lambda: keep(self._folder, offer, chunks, self._host.disk))
        except OSError as error:
            log.warning("cannot keep a downloaded shard", folder=self._folder, reason=os.strerror(error.errno or 0))
        finally:
            self._waiting -= 1

    def _draw(self, now: float) -> None:
        assert self._progress is not None
        bottom_line.draw(self._progress.line(now, shutil.get_terminal_size().columns - 1), self._stream)


# -- Donor blocklist ---------------------------------------------------------------------------------------------------


# A head, and the number of a chunk of its state.
Chunk = tuple[Digest, int]
# First blocking time of a donor; doubled each further time.
FIRST_S = 10.0
# Number of wrong chunks remembered until another donor sends them correctly. Older ones are forgotten.
REMEMBERED = 1024


class DonorBlocklist:
    """Blocks donors that sent wrong data: for a while that doubles, or for this life if another donor disproved it.

    ``now`` returns seconds and never goes back.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: dict[PeerId, float] = {}
        self._times: dict[PeerId, int] = {}
        self._wrong: dict[tuple[Chunk, PeerId], None] = {}

    def is_blocked(self, peer: PeerId) -> bool:
        """Return whether ``peer`` must not be asked now."""
        return self._now() < self._until.get(peer, float("-inf"))

    def record_wrong(self, peer: PeerId, chunk: Chunk | None = None) -> None:
        """Record that ``peer`` sent a wrong chunk, or an offer with an invalid proof."""
        times = self._times[peer] = self._times.get(peer, 0) + 1
        self._until[peer] = max(self._until.get(peer, 0.0), self._now() + FIRST_S * 2.0 ** min(times - 1, 16))
        if chunk is not None:
            self._wrong[chunk, peer] = None
            while len(self._wrong) > REMEMBERED:
                del self._wrong[next(iter(self._wrong))]

    def record_right(self, peer: PeerId, chunk: Chunk) -> None:
        """Record that ``peer`` sent this chunk correctly: block all other peers that sent it wrong, for good.

        ``peer`` itself is not blocked for an earlier wrong copy. That was damaged on the way, or its memory was
        repaired.
        """
        for key in [key for key in self._wrong if key[0] == chunk]:
            del self._wrong[key]
            if key[1] != peer:
                self._until[key[1]] = float("inf")


# -- State client ------------------------------------------------------------------------------------------------------


# A slower transfer times out.
SLOWEST_BYTES_PER_S = 50_000
PATIENCE_S = 20.0
# Interval between two looks for overdue requests and new donors.
LOOK_S = 0.5
DONORS_MOST = 8
# Bytes of shards requested before the machine asks for them. Otherwise the link is idle at the end of each shard. With
# it a join takes 1.02 to 1.06 times as long as raw copies (benchmarks/notes.md).
AHEAD_BYTES = 32 << 20
# Limit in shards, however small they are.
AHEAD_MOST = 32

# An offer, and its chunks in wire layout.
Fetched = tuple[StateOffer, Sequence[memoryview]]


class _Download:
    """One shard that is being downloaded. ``done`` ends when it is complete, or with RequestError."""

    def __init__(self, offer: StateOffer, sizes: Sequence[int]) -> None:
        self.offer = offer
        self.head = offer.proof.state.head.id
        # Bytes of each chunk.
        self.sizes = sizes
        self.chunks: list[memoryview | None] = [None] * len(self.sizes)
        self.missing = len(self.sizes)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_error = "no donor is left"


class StateClient:
    """Downloads states from other peers. ``arrivals`` reports and keeps what arrives."""

    def __init__(
        self, manifest: Manifest, driver: Driver, verifier: MessageVerifier, arrivals: PartialDownloads
    ) -> None:
        self._manifest = manifest
        self._layout = driver.state.layout
        self._driver = driver
        self._view = driver.view
        self._state = driver.state
        self._payload_cache = driver.payload_cache
        self._verifier = verifier
        self.arrivals = arrivals
        self._host = driver.host
        self._metrics = driver.metrics
        self._plan = ChunkPlan()
        self._downloads: dict[ShardId, _Download] = {}
        # Downloads begun before the machine asked for them.
        self._ahead: dict[ShardId, asyncio.Future[Fetched]] = {}
        self._asking: dict[Ask, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._blocklist = DonorBlocklist(driver.host.now)
        # Peers that were live at the last look.
        self._seen: set[PeerId] = set()

    async def fetch(self, shard: ShardId, peer: PeerId) -> None:
        """Get one shard's state, from ``peer`` and others; feeds ``Fetched`` or ``Failed`` to the machine."""
        self._run_ahead()
        try:
            offer, chunks = await self._take_ahead(shard) or await self._get(shard, peer)
        except (RequestError, ValueError) as error:
            self._driver.feed(ev.Failed("fetch", shard, peer, str(error)))
            self._compare_altered(shard, peer, str(error))
            return
        state = offer.proof.state
        self.arrivals.on_shard(offer, chunks)
        self._run_ahead()

        def staged(_: None) -> None:
            self._payload_cache.keep_proofs(offer.proof, offer.lineage)
            self._driver.feed(ev.Fetched(peer, state, ancestors(offer.proof, offer.lineage), owner_of(offer.proof)))

        self._driver.submit(lambda: self._state.stage(shard, state.head.id, chunks, offer.digests), staged, shard=shard)

    def _compare_altered(self, shard: ShardId, peer: PeerId, reason: str) -> None:
        """Accept this peer's state, which does not match its head, if ``peer`` has the same. Memory does not fail twice
        in the same way, so the head's owner signed another state than its commit gives."""

        def compare() -> bool:
            altered = self._state.altered(shard)
            is_same = altered is not None and altered.is_told_by(reason)
            if is_same:
                self._state.accept(shard)
            return is_same

        def report(is_same: bool) -> None:
            if is_same:
                self._driver.feed(ev.Failed("owner", shard, peer, "it has the same state"))

        self._driver.submit(compare, report, shard=shard)

    async def _take_ahead(self, shard: ShardId) -> Fetched | None:
        """Wait for a download that was begun ahead and return it; None if there is none, or it failed."""
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
        """Begin the downloads that the machine will ask for next."""
        view = self._view
        self._ahead = {shard: future for shard, future in self._ahead.items() if view.head(shard) is None}
        width = self._state.form.width
        room = AHEAD_BYTES - width * sum(self._layout.shards[shard].elements for shard in self._ahead)
        for shard in view.unfetched():
            if shard in self._ahead:
                continue
            if room <= 0 or len(self._ahead) >= AHEAD_MOST:
                return
            donors = [peer for peer in view.offering(shard) if not self._blocklist.is_blocked(peer)]
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
            future.exception()  # mark it as retrieved, because possibly nobody awaits it
            if self._ahead.get(shard) is future:
                del self._ahead[shard]
        finally:
            future.cancel()

    async def _offer(self, shard: ShardId, peer: PeerId) -> StateOffer:
        """Request and verify an offer of the shard from ``peer``.

        Raises RequestError if there is none that can be used, ValueError if its proof is invalid."""
        if self._blocklist.is_blocked(peer):
            raise RequestError("it sent a wrong state before and is not asked for now")
        response = await self._host.links.request(peer, encode(GetState(shard)), timeout_s=PATIENCE_S)
        body = response.body
        try:
            offer = await self._check_offer(peer, shard, body)
        except ValueError as error:
            self._verifier.report_false(error)
            self._blame(peer, str(error))
            raise
        head = offer.proof.state.head
        for commit in offer.lineage:
            self._payload_cache.find_contradiction(commit.header, commit.signature)
        if offer.proof.header is not None:
            self._payload_cache.find_contradiction(offer.proof.header, offer.proof.signature)
        self._verifier.report_contradictions()
        self._driver.feed(ev.StateOffered(peer, head, ancestors(offer.proof, offer.lineage), owner_of(offer.proof)))
        if problem := self._view.refusal(head):
            raise RequestError(problem)
        return offer

    async def _check_offer(self, peer: PeerId, shard: ShardId, body: bytes) -> StateOffer:
        """Verify an offer (``checked_offer``). If it names an unknown member, ask ``peer`` for its members and try
        again."""
        draws = Random(self._host.draw())

        def check() -> StateOffer:
            return checked_offer(self._manifest, self._layout, shard, body, self._verifier.permissions, draws)

        try:
            return await self._host.work("checks", check)
        except UnknownMemberError:
            await self._verifier.ask_for_members(peer)
        return await self._host.work("checks", check)

    async def _download(self, shard: ShardId, peer: PeerId, offer: StateOffer) -> Sequence[memoryview]:
        if shard in self._downloads:  # not expected: the machine fetches a shard only once at a time
            raise RequestError("it is being fetched already")
        sizes = self._state.form.chunk_sizes(self._layout.shards[shard].elements)
        download = self._downloads[shard] = _Download(offer, sizes)
        self._plan.begin(shard, download.sizes, peer)
        self._plan.add(peer)
        if self._looking is None:
            self._looking = self._host.keep(self._keep_asking, name="look after downloads")
        self._ask_more()
        try:
            await download.done
        finally:
            del self._downloads[shard]
            self._cancel(self._plan.end(shard))
        return [chunk for chunk in download.chunks if chunk is not None]

    async def _keep_asking(self) -> None:
        """Look for donors and overdue requests at intervals, while something is being fetched."""
        while not self._plan.is_idle:
            self._find_donors()
            self._ask_more()
            await self._host.sleep(LOOK_S)
        self._looking = None

    def _find_donors(self) -> None:
        """Add donors, besides the peers that offered a shard. The choice stays the same while these peers live."""
        view = self._view
        for peer in self._seen.difference(view.live):
            self._cancel(self._plan.drop(peer))
        self._seen = set(view.live)
        able = [peer for peer in view.marks() if not self._blocklist.is_blocked(peer)]
        mine = self._view.me
        for peer in sorted(able, key=lambda peer: digest_of(f"{mine}/{peer}".encode()))[:DONORS_MOST]:
            self._plan.add(peer)

    def _ask_more(self) -> None:
        is_ending = self._ahead.keys() >= set(self._view.unfetched())
        for ask in self._plan.next(self._host.now(), is_ending=is_ending):
            asking = self._ask(ask, self._downloads[ask.piece.shard])
            self._asking[ask] = self._host.spawn(asking, name=f"fetch {ask.piece}")
        for shard, download in self._downloads.items():
            if not download.done.done() and not self._plan.can_end(shard):
                download.done.set_exception(RequestError(download.last_error))

    async def _ask(self, ask: Ask, download: _Download) -> None:
        """Request one chunk from one donor, and verify it."""
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
                raise ValueError(f"chunk {chunk} of shard {shard} does not match its owner's signature")
            self._on_chunk(ask, download, data)
        except (RequestError, ValueError) as error:
            if self._is_asking(ask):
                self._on_chunk_failed(ask, download, error)
        finally:
            if self._is_asking(ask):
                del self._asking[ask]
                self._ask_more()

    def _is_asking(self, ask: Ask) -> bool:
        """Return whether the current task still owns this request.

        A task that is cancelled just as its request ends runs to its end. By then another task may have made the same
        request.
        """
        return self._asking.get(ask) is asyncio.current_task()

    def _on_chunk_failed(self, ask: Ask, download: _Download, error: RequestError | ValueError) -> None:
        download.last_error = str(error)
        if not isinstance(error, RequestError):
            self._blame(ask.donor, str(error), (download.head, ask.piece.chunk))
            return
        self._plan.failed(ask, is_unable=True)
        if not isinstance(error, RequestRefused):
            self._cancel(self._plan.drop(ask.donor))

    def _is_listed(self, offer: StateOffer, chunk: int, data: memoryview) -> asyncio.Future[bool]:
        return self._host.work("checks", lambda: is_listed(offer, chunk, data, self._state.form))

    def _on_chunk(self, ask: Ask, download: _Download, data: memoryview) -> None:
        self._cancel([other for other in self._plan.arrived(ask, self._host.now()) if other != ask])
        chunk = ask.piece.chunk
        if download.chunks[chunk] is not None or download.done.done():
            return
        download.chunks[chunk] = data
        self._blocklist.record_right(ask.donor, (download.head, chunk))
        download.missing -= 1
        self.arrivals.on_chunk(len(data))
        if not download.missing:
            download.done.set_result(None)

    def _blame(self, peer: PeerId, reason: str, chunk: tuple[Digest, int] | None = None) -> None:
        """Stop asking a peer for a while, because it sent wrong data: it lies, or its memory is at fault."""
        self._blocklist.record_wrong(peer, chunk)
        self._cancel(self._plan.drop(peer))
        self._metrics.report_fault(peer, "state", reason)

    def _cancel(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            if (task := self._asking.pop(ask, None)) is not None:
                task.cancel()
