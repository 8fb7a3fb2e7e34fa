"""Writes a node's checkpoints, one shard at a time: each is copied between two jobs on the worker thread and written by
the disk thread.

Neither training nor merging notices, and no more than one shard is in memory twice. A full disk is reported and tried
again; the checkpoints that are there stay.

Where writing is cheap a checkpoint follows every turn, so that a run whose peers all die loses about what was not
merged yet; ``every_s`` is the longest that is waited for one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from p2pdiloco.peer.checkpoint import Draft, KnownGood
from p2pdiloco.peer.commit_wal import CommitLog, LoggedCommit
from p2pdiloco.peer.disk_budget import DAY_S, HOUR_S, DiskBudget
from p2pdiloco.peer.driver import CopyError, Driver
from p2pdiloco.peer.ema import RunningAverage
from p2pdiloco.peer.host import Host
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.peer.model_state import ModelState
from p2pdiloco.peer.payload_cache import PayloadCache
from p2pdiloco.peer.state_proof import SavedState
from p2pdiloco.protocol.ids import Digest, ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.messages import commit_id
from p2pdiloco.protocol.view import MachineView
from p2pdiloco.util import logs

# -- Following the commits ---------------------------------------------------------------------------------------------
# Commits since the last checkpoint are appended to the write-ahead log while the peer goes on: a crash costs what was
# committed in the last ``EVERY_S`` seconds, however seldom whole checkpoints are written.
#
# Rules of this file:
# 1. Of each shard every commit after the head of when the segment was begun is appended, in order; own commits are
#    there already. Where one is missing (a state was fetched in its place, its payload is gone) nothing of that shard
#    follows until the next checkpoint, which comes sooner then. What a disk did not take is tried again.
# 2. Commits that make more bytes than the budget has are only counted, but for own ones, until a checkpoint finds that
#    they have become fewer.


log = logs.get("node")

EVERY_S = 10.0
"""Between two looks at what was committed."""


class CommitFollower:
    """Appends to the log what others commit, within the disk's budget, in one life of a peer."""

    def __init__(
        self, view: MachineView, payload_cache: PayloadCache, commit_log: CommitLog, host: Host, budget: DiskBudget
    ) -> None:
        self.every_s = EVERY_S
        self._view = view
        self._payload_cache = payload_cache
        self._commit_log = commit_log
        self._host = host
        self._budget = budget
        self._is_following = False
        """Whether commits are appended; else they are only counted."""
        self._heads: list[Digest | None] = [None] * len(view.heads())
        """By shard, where the log has come to; None: nothing can follow."""
        self._counted = self._own = 0
        """Bytes of commits since the segment was begun; of those, this peer's own, which are written in any case."""
        self._since = self._host.now()
        self._with_average_at = self._host.now()
        self._is_failing = False
        """The disk did not take the last commits."""

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return self._host.now() - self._with_average_at >= self.every_s

    async def begin(self) -> int:
        """Begin the segment of the checkpoint that is about to be copied; the number of both.

        Raises:
            OSError: the disk takes nothing.
        """
        await self.follow()  # the checkpoint may be torn: then those before lead on
        heads = self._view.heads()
        fits = self._a_day(self._counted) <= self._budget.most_log_bytes_per_day
        number = await self._commit_log.begin_segment(heads, is_bounded=not fits)
        self._is_following, self._counted, self._own, self._since = fits, 0, 0, self._host.now()
        self._heads = [None if head is None else head.id for head in heads]
        self._update_budget()
        return number

    async def follow(self) -> None:
        """Append what was committed since the last look, and sync it."""
        self._with_average_at = self._host.now()
        commits, heads = list[LoggedCommit](), list(self._heads)
        for shard, known in enumerate(self._heads):
            found = None if known is None else self._after(ShardId(shard), known)
            heads[shard] = None if found is None else commit_id(found[-1].header) if found else known
            commits += found or []
        if self._is_following and commits:
            try:
                lost = await self._commit_log.append(commits)
            except OSError as error:
                if not self._is_failing:
                    log.warning(
                        "commits are not written, until the disk takes them", reason=os.strerror(error.errno or 0)
                    )
                self._is_failing = True
                return
            heads = [None if shard in lost else head for shard, head in enumerate(heads)]
        self._is_failing = False
        mine = self._view.me
        self._own += sum(commit.held.size for commit in commits if commit.header.owner == mine)
        self._counted += sum(commit.held.size for commit in commits)
        self._heads = heads
        self._update_budget()

    def _after(self, shard: ShardId, known: Digest) -> list[LoggedCommit] | None:
        """A shard's commits after a head; None: they are not all here."""
        commits = self._view.commits_after(shard, known)
        if commits is None:
            return None
        parts = [self._payload_cache.commit_parts(header) for header in commits]
        found = [LoggedCommit(header, *one) for header, one in zip(commits, parts, strict=True) if one is not None]
        return found if len(found) == len(commits) else None

    def _a_day(self, size: int) -> float:
        return size * DAY_S / max(self._host.now() - self._since, HOUR_S)

    def _update_budget(self) -> None:
        rate = self._a_day(self._counted)
        if rate > self._budget.most_log_bytes_per_day and self._is_following:
            log.info("commits are more than the disk's budget has: checkpoints alone are written")
            self._is_following = False
        self._budget.log_bytes_per_day = rate if self._is_following else self._a_day(self._own)
        self._budget.is_logged = self._is_following and None not in self._heads


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
    """Writes a node's checkpoints into ``folder`` and keeps the newest ``keep``."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        driver: Driver,
        view: MachineView,
        state: ModelState,
        payload_cache: PayloadCache,
        commit_log: CommitLog,
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
        self._average = average
        self._host = host
        self._metrics = metrics
        self._keep = keep
        self._save_learner = save_learner
        self._layout = Layout.of(manifest)
        self._budget = budget
        self._follower = CommitFollower(view, payload_cache, commit_log, host, budget)
        self._known_good = KnownGood(folder, host.disk)
        self._one_at_a_time = asyncio.Lock()
        self._saved_mark: int | None = None
        """Of the heads in the last checkpoint."""

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
            await self._host.sleep(max(SHORT_S, min(due_at - self._host.now(), self._follower.every_s)))
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
        """Bring what was committed to the disk."""
        async with self._one_at_a_time:
            if not self._driver.is_closed:
                await self._follower.follow()

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
            self._metrics.write("checkpoint", is_last=is_last)
            await self._judge(draft.number)
            return True
        await self._host.work("disk", draft.discard)
        log.error("checkpoint not written, the last one stays", folder=self._folder, reason=reason)
        self._metrics.write("checkpoint-failed", reason=reason)
        return False

    async def _judge(self, number: int) -> None:
        """Judge the checkpoint before this one by how training went since."""
        loss = self._metrics.loss
        try:
            if await self._host.work("disk", lambda: self._known_good.judge_previous(number, loss)):
                self._metrics.write("checkpoint-good", loss=loss)
        except OSError as error:
            log.warning("no checkpoint is marked as good", reason=os.strerror(error.errno or 0))

    async def _write(self, draft: Draft) -> None:
        """One shard after the other, each copied between two jobs and written before the next is copied.

        Raises:
            CopyError: a shard is never there.
            OSError, ValueError: as ``Draft`` does.
        """
        number = await self._follower.begin()
        await self._host.work("disk", partial(draft.begin, number))
        width = self._state.form.width
        room = memoryview(bytearray(width * max(piece.elements for piece in self._layout.shards)))
        for piece in self._layout.shards:
            data = room[: width * piece.elements]
            saved = await self._copied(piece.shard, data)
            await self._host.work("disk", partial(draft.add, saved, data))
            if self._follower.is_due:
                await self._follower.follow()
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
