"""When and how a node writes its checkpoints: one shard after the other, copied between two jobs on the worker thread
and written by the disk's.

Neither training nor merging notices, and no more than one shard is in memory twice. A full disk is reported and tried
again; the checkpoints that are there stay.

Where writing is cheap a checkpoint follows every turn, so that a run whose peers all die loses about what was not
merged yet; ``every_s`` is the longest that is waited for one.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from p2pdiloco.peer import commit_wal
from p2pdiloco.peer.checkpoint import Draft, KnownGood
from p2pdiloco.peer.disk_budget import DAY_S, HOUR_S, DiskBudget
from p2pdiloco.peer.driver import CopyError, Driver
from p2pdiloco.peer.durable_commits import DurableCommits
from p2pdiloco.peer.ema import RunningAverage
from p2pdiloco.peer.host import Host
from p2pdiloco.peer.learner_updates import Payload
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.peer.model_state import ModelState
from p2pdiloco.peer.payload_cache import PayloadCache
from p2pdiloco.peer.payload_store import Held
from p2pdiloco.peer.state_proof import SavedState
from p2pdiloco.protocol.ids import Digest, ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.messages import CommitHeader, Head, commit_id
from p2pdiloco.protocol.view import MachineView
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import CommitParts

# -- Write-ahead log ---------------------------------------------------------------------------------------------------
# Commits since the last checkpoint, appended beside it while the peer goes on: a crash costs what was committed in the
# last ``EVERY_S`` seconds, however seldom whole checkpoints are written.
#
# Rules of this file:
# 1. A segment is begun with a checkpoint, before its first shard is copied (``segments``). Of each shard every commit
#    after the head of then is appended, in order. Where one is missing (a state was fetched in its place, its payload
#    is gone, the disk took nothing) nothing of that shard follows until the next checkpoint, which comes sooner then.
# 2. Commits that make more bytes than the budget has are not written, only counted, until a checkpoint finds that they
#    have become fewer.


log = logs.get("node")

EVERY_S = 10.0
"""Between two looks at what was committed."""


class _Entry(NamedTuple):
    """A commit to be appended."""

    header: CommitHeader
    held: Held
    parts_of: Callable[[Payload], CommitParts]


class CommitLog:
    """The log of commits that one life of a peer keeps in ``folder``."""

    def __init__(
        self, folder: Path, view: MachineView, payload_cache: PayloadCache, host: Host, budget: DiskBudget
    ) -> None:
        self.every_s = EVERY_S
        self._folder = folder
        self._view = view
        self._payload_cache = payload_cache
        self._host = host
        self._budget = budget
        self._path: Path | None = None
        """The segment that is written; None: commits are only counted."""
        self._heads: list[Digest | None] = [None] * len(view.heads())
        """By shard, where the segment has come to; None: nothing can follow."""
        self._counted = self._own = 0
        """Bytes of commits since then; of those, that were written as this peer's own (``own_commits``), too."""
        self._since = self._host.now()
        self._looked_at = self._host.now()

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return self._host.now() - self._looked_at >= self.every_s

    async def begin(self, number: int) -> None:
        """A segment for the checkpoint of that number, which is about to be copied.

        Raises:
            OSError: the disk takes nothing.
        """
        await self.follow()  # the checkpoint may be torn: then those before lead on
        fits = self._path is not None or self._rate() <= self._budget.most_log_bytes_per_day
        self._counted, self._own, self._since = 0, 0, self._host.now()
        self._heads = [None if head is None else head.id for head in self._view.heads()]
        self._path = None
        if fits:
            path = commit_wal.path_of(self._folder, number)
            await self._host.work("disk", lambda: self._create(path))
            self._path = path
        self._tell()

    def _create(self, path: Path) -> None:
        self._host.disk.write(path, [b""])
        self._host.disk.sync(path)
        self._host.disk.sync_folder(path.parent)

    async def follow(self) -> None:
        """Append what was committed since the last look; it is on the disk then."""
        self._looked_at = self._host.now()
        entries, heads = list[_Entry](), list(self._heads)
        for shard, known in enumerate(self._heads):
            found = None if known is None else self._after(ShardId(shard), known)
            heads[shard] = None if found is None else commit_id(found[-1].header) if found else known
            entries += found or []
        mine = self._view.me
        self._own += sum(entry.held.size for entry in entries if entry.header.owner == mine)
        self._counted += sum(entry.held.size for entry in entries)
        path = self._path
        if path is not None and entries:
            try:
                await self._host.work("disk", lambda: self._append(path, entries))
            except (OSError, ValueError) as error:
                reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
                log.warning("commits are not kept until the next checkpoint", folder=self._folder, reason=reason)
                self._path = None
        self._heads = heads
        self._tell()

    def _after(self, shard: ShardId, known: Digest) -> list[_Entry] | None:
        """A shard's commits after a head; None: they are not all here."""
        commits = self._view.commits_after(shard, known)
        if commits is None:
            return None
        parts = [self._payload_cache.commit_parts(header) for header in commits]
        entries = [_Entry(header, *one) for header, one in zip(commits, parts, strict=True) if one is not None]
        return entries if len(entries) == len(commits) else None

    def _append(self, path: Path, entries: list[_Entry]) -> None:
        """On the disk's thread."""
        for header, held, parts_of in entries:
            self._host.disk.append(path, commit_wal.packed(header, parts_of(held.read(self._host.disk))))
        self._host.disk.sync(path)

    def _rate(self) -> float:
        return self._a_day(self._counted + self._own)

    def _a_day(self, size: int) -> float:
        return size * DAY_S / max(self._host.now() - self._since, HOUR_S)

    def _tell(self) -> None:
        """The budget."""
        rate = self._rate()
        if rate > self._budget.most_log_bytes_per_day and self._path is not None:
            log.info("commits are more than the disk's budget has: checkpoints alone are written")
            self._path = None
        self._budget.log_bytes_per_day = self._a_day(self._own) if self._path is None else rate
        self._budget.is_logged = self._path is not None and None not in self._heads


# -- Checkpoint writer -------------------------------------------------------------------------------------------------
# When and how a node writes its checkpoints: one shard after the other, copied between two jobs on the worker thread
# and written by the disk's.


TRIES = 20
"""Copies of a shard that may fall between its new state and the machine's word of it before a checkpoint is skipped."""
LOOK_S = 0.2
SHORT_S = 1e-6
COST_SHARE = 0.02
"""Of the time, that writing checkpoints may take, unless ``every_s`` demands more."""


class CheckpointWriter:
    """A node's checkpoints in ``folder``; the newest ``keep`` stay."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        driver: Driver,
        view: MachineView,
        state: ModelState,
        payload_cache: PayloadCache,
        own_commits: DurableCommits,
        average: RunningAverage | None,
        host: Host,
        metrics: Metrics,
        *,
        keep: int,
        save_learner: Callable[[], None],
        budget: DiskBudget,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._driver = driver
        self._view = view
        self._state = state
        self._payload_cache = payload_cache
        self._own_commits = own_commits
        self._average = average
        self._host = host
        self._metrics = metrics
        self._keep = keep
        self._save_learner = save_learner
        self._layout = Layout.of(manifest)
        self._budget = budget
        self._log = CommitLog(folder, view, payload_cache, host, budget)
        self._known_good = KnownGood(folder, host.disk)
        self._one_at_a_time = asyncio.Lock()
        self._saved_mark: int | None = None
        """Of the heads in the last checkpoint."""
        self._heads: deque[list[Head]] = deque(maxlen=keep)
        """Heads of the checkpoints that are there, as far as they were written in this life."""

    async def keep_saving(self, every_s: float) -> None:
        """Write a checkpoint when there is something new, as often as ``COST_SHARE`` and the budget allow and, but for
        the latter, at least every ``every_s`` seconds, until cancelled; in between, what is committed. The learner
        saves its own state by the clock alone."""
        learner_saved_at = waits_since = self._host.now()
        wanted_s, rest_s = every_s, 0.0
        while True:
            least_s = 0.0 if self._saved_mark is None else self._budget.checkpoint_s()
            every_s = max(wanted_s, least_s)
            due_at = waits_since + max(LOOK_S, least_s, min(rest_s, every_s))
            await self._host.sleep(max(SHORT_S, min(due_at - self._host.now(), self._log.every_s)))
            now = self._host.now()
            if now - learner_saved_at >= max(wanted_s, self._budget.learner_s()):
                self._save_learner()
                learner_saved_at = now
            if now < due_at:
                await self._follow()
                continue
            if self._view.is_current:
                is_written = await self.save(is_last=False)
                rest_s = (self._host.now() - now) / COST_SHARE if is_written else every_s
            waits_since = self._host.now()

    async def _follow(self) -> None:
        """What was committed is on the disk, too."""
        async with self._one_at_a_time:
            if not self._driver.is_closed:
                await self._log.follow()

    async def save(self, *, is_last: bool) -> bool:
        """Write a checkpoint if anything is new. False: it should have been written, and was not."""
        async with self._one_at_a_time:
            return await self._save(is_last=is_last)

    async def _save(self, *, is_last: bool) -> bool:
        view = self._view
        mark = view.heads_mark
        if self._driver.is_closed or not view.is_current or mark == self._saved_mark:
            return mark == self._saved_mark
        draft = Draft(self._folder, self._manifest, self._host.disk)
        try:
            await self._write(draft)
        except CopyError:
            reason = "no quiet moment"
        except OSError as error:
            reason = os.strerror(error.errno or 0)
        except ValueError as error:
            reason = str(error)
            self._driver.submit(self._state.integrity.invalidate, lambda _: None)  # it is found and mended
        else:
            self._saved_mark = mark
            self._heads.append(draft.heads)
            if len(self._heads) == self._keep:
                self._own_commits.forget(self._heads[0])
            self._metrics.write("checkpoint", is_last=is_last)
            await self._judge(draft.number)
            return True
        await self._host.work("disk", draft.discard)
        log.error("checkpoint not written, the last one stays", folder=self._folder, reason=reason)
        self._metrics.write("checkpoint-failed", reason=reason)
        return False

    async def _judge(self, number: int) -> None:
        """Whether the checkpoint before this one is good, by how training went since."""
        loss = self._metrics.loss
        try:
            if await self._host.work("disk", lambda: self._known_good.written(number, loss)):
                self._metrics.write("checkpoint-good", loss=loss)
        except OSError as error:
            log.warning("no checkpoint is marked as good", reason=os.strerror(error.errno or 0))

    async def _write(self, draft: Draft) -> None:
        """One shard after the other, each copied between two jobs and written before the next is copied.

        Raises:
            CopyError: a shard is never there.
            OSError, ValueError: as ``Draft`` does.
        """
        await self._host.work("disk", draft.begin)
        await self._log.begin(draft.number)
        width = self._state.form.width
        room = memoryview(bytearray(width * max(piece.elements for piece in self._layout.shards)))
        for piece in self._layout.shards:
            data = room[: width * piece.elements]
            saved = await self._copied(piece.shard, data)
            await self._host.work("disk", partial(draft.add, saved, data))
            if self._log.is_due:
                await self._log.follow()
        await self._host.work("disk", partial(draft.finish, keep=self._keep))
        if self._average is not None:
            await self._average.save(self._folder, self._host)

    async def _copied(self, shard: ShardId, data: memoryview) -> SavedState:
        """A shard's state in ``data``, and what proves it."""

        def prove(head: Digest, _: bytes) -> SavedState | None:
            """None if it is between two heads."""
            now = self._view.head(shard)
            return self._saved(shard) if now is not None and now.id == head else None

        for _ in range(TRIES):
            saved = await self._driver.copy_shard(shard, data, prove, is_checked=False)
            if saved is not None:
                return saved
        raise CopyError("it is always changing")

    def _saved(self, shard: ShardId) -> SavedState:
        """The machine's state of a shard, with its proof and what led to it."""
        proof = self._payload_cache.proof_of(self._view.state(shard))
        lineage = self._payload_cache.lineage(shard, self._view.ancestry(shard))
        return SavedState(proof.state, proof.header, proof.signature, lineage)
