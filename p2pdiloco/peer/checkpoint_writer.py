"""Checkpoint writer: decides when a node writes checkpoints, and writes them one shard at a time.

Each shard is copied between two jobs on the worker thread and written by the disk thread. Training and merging do not
wait, and at most one shard is in memory twice. If the disk is full, that is logged and the checkpoint is tried again;
existing checkpoints stay.

Where writing is cheap, a checkpoint follows every exchange. If all peers of a run die then, little is lost beyond what
was not merged yet. ``every_s`` is the longest time between two checkpoints.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from p2pdiloco.peer.checkpoint import Draft, KnownGood, go_back, good_heads, read_shard
from p2pdiloco.peer.commit_wal import LoggedCommit
from p2pdiloco.peer.disk_budget import DAY_S, HOUR_S, DiskBudget
from p2pdiloco.peer.driver import CopyError, Driver
from p2pdiloco.peer.state_proof import SavedState, ancestors, unbroken_lineage
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import Digest, ShardId
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.protocol.messages import commit_id
from p2pdiloco.util import logs

# -- Following the commits ---------------------------------------------------------------------------------------------
# Commits since the last checkpoint are appended to the write-ahead log. A crash then costs at most what was committed
# in the last ``EVERY_S`` seconds, however rarely whole checkpoints are written.
#
# Rules of this section:
# 1. For each shard, every commit after the head at which the segment began is appended, in order. Own commits are in
#    the log already. If a commit is missing (the state was fetched instead, or its payload is gone), nothing of that
#    shard is logged until the next checkpoint, which then comes sooner. A write that the disk refused is retried.
# 2. If commits exceed the write budget, other peers' commits are only counted, not logged, until a checkpoint finds
#    that the rate has dropped.


log = logs.get("node")

# Interval between two looks for new commits.
EVERY_S = 10.0


class CommitFollower:
    """Appends other peers' commits to the log, within the disk's write budget, during one life of a peer."""

    def __init__(self, driver: Driver, budget: DiskBudget) -> None:
        self.every_s = EVERY_S
        self._view = driver.view
        self._payload_cache = driver.payload_cache
        self._commit_log = driver.commit_log
        self._host = driver.host
        self._budget = budget
        # True: commits are appended. False: they are only counted.
        self._is_following = False
        # The head up to which each shard is logged; None: a commit is missing, so nothing can follow.
        self._heads: list[Digest | None] = [None] * len(self._view.heads())
        # Bytes of commits since the segment began. ``_own`` is this peer's share of them, which is always written.
        self._counted = self._own = 0
        self._since = self._host.now()
        self._looked_at = self._host.now()
        # The disk refused the last commits. Keeps the log to one warning per outage.
        self._is_failing = False

    def forget(self) -> None:
        """Log nothing until the next checkpoint begins: the run went back, and the segments were set aside."""
        self._heads = [None] * len(self._heads)
        self._is_following = False

    @property
    def is_due(self) -> bool:
        """True if the last look for new commits is ``every_s`` ago."""
        return self._host.now() - self._looked_at >= self.every_s

    async def begin(self) -> int:
        """Begin the log segment of the checkpoint that is about to be copied; return the number of both.

        Raises:
            OSError: the disk does not accept writes.
        """
        await self.follow()  # if the new checkpoint is torn, the previous one needs these commits
        heads = self._view.heads()
        fits = self._a_day(self._counted) <= self._budget.most_log_bytes_per_day
        number = await self._commit_log.begin_segment(heads, is_bounded=not fits)
        self._is_following, self._counted, self._own, self._since = fits, 0, 0, self._host.now()
        self._heads = [None if head is None else head.id for head in heads]
        self._update_budget()
        return number

    async def follow(self) -> None:
        """Append what was committed since the last look, and sync it."""
        self._looked_at = self._host.now()
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
                    log.warning("cannot write commits to the log; trying again", reason=os.strerror(error.errno or 0))
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
        """Return a shard's commits after the head ``known``, oldest first; None if one of them is missing here."""
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
            log.info("commits exceed the disk's write budget; writing only checkpoints and own commits")
            self._is_following = False
        self._budget.log_bytes_per_day = rate if self._is_following else self._a_day(self._own)
        self._budget.is_logged = self._is_following and None not in self._heads


# -- Checkpoint writer -------------------------------------------------------------------------------------------------


# Copies of a shard that may fall between its new state and the machine's event for it, before a checkpoint is skipped.
TRIES = 20
LOOK_S = 0.2
SHORT_S = 1e-6
# How long the last checkpoint is tried again, and the pause between two tries.
LAST_S, LAST_PAUSE_S = 10.0, 1.0
# Share of the time that writing checkpoints may take, unless ``every_s`` demands more.
COST_SHARE = 0.02


class CheckpointWriter:
    """Writes a node's checkpoints into ``folder`` and keeps the newest ``keep``."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        driver: Driver,
        *,
        keep: int,
        save_learner: Callable[[], None],
        budget: DiskBudget,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._driver = driver
        self._view = driver.view
        self._state = driver.state
        self._payload_cache = driver.payload_cache
        self._host = driver.host
        self._metrics = driver.metrics
        self._keep = keep
        self._save_learner = save_learner
        self._layout = driver.state.layout
        self._budget = budget
        self._commit_log = driver.commit_log
        self._follower = CommitFollower(driver, budget)
        self._known_good = KnownGood(folder, driver.host.disk)
        self._one_at_a_time = asyncio.Lock()
        # Mark of the heads in the last checkpoint.
        self._saved_mark: int | None = None
        # The known-good checkpoint, while everything newer is set aside (``restore``).
        self._back_to: int | None = None
        # Why the newest state could not be written; empty if it was, or if nobody has tried yet.
        self._problem = ""

    async def keep_saving(self, every_s: float) -> None:
        """Write checkpoints and commits until cancelled.

        A checkpoint is written when there is something new, as often as ``COST_SHARE`` and the write budget allow, and
        at least every ``every_s`` seconds unless the budget forbids it. Between checkpoints, new commits are logged.
        The learner saves its own state on a timer.
        """
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
        async with self._one_at_a_time:
            if not self._driver.is_closed:
                await self._follower.follow()

    async def save(self, *, is_last: bool) -> bool:
        """Write a checkpoint if anything is new. Returns False if it should have been written and was not."""
        async with self._one_at_a_time:
            return await self._save(is_last=is_last)

    async def save_last(self) -> str:
        """Write the checkpoint of the peer's end. If that fails, try again for ``LAST_S``.

        Returns why it was not written; empty if it was, or if nothing is new.
        """
        until = self._host.now() + LAST_S
        while not await self.save(is_last=True) and self._problem:
            if self._driver.is_closed or self._host.now() >= until:
                return self._problem
            await self._host.sleep(LAST_PAUSE_S)
        return ""

    async def _save(self, *, is_last: bool) -> bool:
        view = self._view
        mark = view.heads_mark
        if self._driver.is_closed or not view.is_current or mark == self._saved_mark:
            return mark == self._saved_mark
        draft = Draft(self._folder, self._manifest, self._host.disk)
        try:
            await self._write(draft)
        except CopyError:
            reason = "a shard kept changing while it was copied"
        except OSError as error:
            reason = os.strerror(error.errno or 0)
        except MemoryError:
            reason = os.strerror(errno.ENOMEM)
        except ValueError as error:
            reason = str(error)
            # The state in memory is altered: have every chunk verified again, so that the shard is fetched again.
            self._driver.submit(self._state.integrity.invalidate, lambda _: None)
        else:
            self._saved_mark, self._problem, self._back_to = mark, "", None
            self._metrics.write("checkpoint", is_last=is_last)
            await self._judge(draft.number)
            return True
        self._problem = reason
        await self._host.work("disk", draft.discard)
        log.error("checkpoint not written; the previous one is kept", folder=self._folder, reason=reason)
        self._metrics.write("checkpoint-failed", reason=reason)
        return False

    async def _judge(self, number: int) -> None:
        """Judge the previous checkpoint by the training loss since it was written. None is good while this peer, or
        most, measure a far higher held-out loss than usual."""
        loss = None if self._view.is_doubtful else self._metrics.loss
        try:
            if await self._host.work("disk", lambda: self._known_good.judge_previous(number, loss)):
                self._metrics.write("checkpoint-good", loss=loss)
                heads = await self._host.work("disk", lambda: good_heads(self._folder, self._host.disk))
                self._driver.feed(ev.CheckpointGood(heads))
        except (OSError, ValueError) as error:
            log.warning("cannot mark the checkpoint as good", reason=str(error))

    async def restore(self, shard: ShardId) -> None:
        """Stage a shard's state of the known-good checkpoint; feeds ``Restored`` to the machine.

        Everything newer is set aside first, so that a restart does not lead back to what the run has left.
        """
        async with self._one_at_a_time:
            try:
                found = await self._read_good(shard)
            except (OSError, ValueError) as error:
                log.warning("cannot go back to the known-good checkpoint", shard=shard, reason=str(error))
                found = None
        if found is None:
            self._driver.feed(ev.Restored(shard, None))
            return
        proof, data, listed = found
        lineage, size = unbroken_lineage(proof, proof.lineage), self._state.form.chunk_bytes
        chunks = [data[at : at + size] for at in range(0, len(data), size)]

        def staged(_: None) -> None:
            self._payload_cache.keep_proofs(proof, lineage)
            self._driver.feed(ev.Restored(shard, proof.state, ancestors(proof, lineage)))

        head = proof.state.head.id
        self._driver.submit(lambda: self._state.stage(shard, head, chunks, listed), staged, shard=shard)

    async def _read_good(self, shard: ShardId) -> tuple[SavedState, memoryview, bytes] | None:
        """Read a shard of the known-good checkpoint; None if there is none."""
        if self._back_to is None:
            self._driver.save_convictions()  # on the same queue, so that a crash in between forgets nothing
            self._follower.forget()
            self._known_good.forget_newest()
            self._saved_mark = None
            self._back_to = await self._host.work("log", self._set_aside)
        number, disk = self._back_to, self._host.disk
        if number is None:
            return None
        return await self._host.work("disk", lambda: read_shard(self._folder, number, self._manifest, shard, disk))

    def _set_aside(self) -> int | None:
        """Set everything aside that is newer than the known-good checkpoint; return its number. Blocks."""
        number = go_back(self._folder, self._host.disk)
        if number is not None:
            self._commit_log.forget()
        return number

    async def _write(self, draft: Draft) -> None:
        """Write the shards one after the other: each is copied between two jobs, and written before the next one."""
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

    async def _copied(self, shard: ShardId, data: memoryview) -> SavedState:
        """Copy a shard's state into ``data``; return it with its proof."""

        def prove(head: Digest, _: bytes) -> SavedState | None:
            """Return None if the machine has not yet heard of the head that was copied."""
            now = self._view.head(shard)
            return self._saved(shard) if now is not None and now.id == head else None

        for _ in range(TRIES):
            saved = await self._driver.copy_shard(shard, data, prove, is_checked=False)
            if saved is not None:
                return saved
        raise CopyError("it kept changing")

    def _saved(self, shard: ShardId) -> SavedState:
        """Return the machine's state of a shard, with its proof and its lineage."""
        proof = self._payload_cache.proof_of(self._view.state(shard))
        lineage = self._payload_cache.lineage(shard, self._view.ancestry(shard))
        return SavedState(proof.state, proof.header, proof.signature, lineage)
