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

from p2pdiloco.peer.checkpoint import Draft
from p2pdiloco.peer.commit_log import CommitLog
from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.known_good import KnownGood
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.peer.offers import lineage_of
from p2pdiloco.peer.proofs import SavedState
from p2pdiloco.peer.shard_copy import CopyError, copied
from p2pdiloco.peer.write_budget import WriteBudget
from p2pdiloco.protocol.ids import Digest, ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.messages import Head
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import StateProof

log = logs.get("node")

TRIES = 20
"""Copies of a shard that may fall between its new state and the machine's word of it before a checkpoint is skipped."""
LOOK_S = 0.2
SHORT_S = 1e-6
COST_SHARE = 0.02
"""Of the time, that writing checkpoints may take, unless ``every_s`` demands more."""


class Saver:
    """A node's checkpoints in ``folder``; the newest ``keep`` stay."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        driver: Driver,
        proof: Callable[[ShardId], StateProof],
        metrics: Metrics,
        *,
        keep: int,
        save_learner: Callable[[], None],
        budget: WriteBudget,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._driver = driver
        self._host = driver.host
        self._proof = proof
        self._metrics = metrics
        self._keep = keep
        self._save_learner = save_learner
        self._layout = Layout.of(manifest)
        self._budget = budget
        self._log = CommitLog(folder, driver, budget)
        self._known_good = KnownGood(folder, driver.host.disk)
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
            if self._driver.machine.view.is_current:
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
        view = self._driver.machine.view
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
            self._driver.job(self._driver.state.integrity.look_again, lambda _: None)  # it is found and mended
        else:
            self._saved_mark = mark
            self._heads.append(draft.heads)
            if len(self._heads) == self._keep:
                self._driver.own.forget(self._heads[0])
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
        width = self._driver.state.form.width
        room = memoryview(bytearray(width * max(piece.elements for piece in self._layout.shards)))
        for piece in self._layout.shards:
            data = room[: width * piece.elements]
            saved = await self._copied(piece.shard, data)
            await self._host.work("disk", partial(draft.add, saved, data))
            if self._log.is_due:
                await self._log.follow()
        await self._host.work("disk", partial(draft.finish, keep=self._keep))
        if self._driver.average is not None:
            await self._driver.average.save(self._folder, self._host)

    async def _copied(self, shard: ShardId, data: memoryview) -> SavedState:
        """A shard's state in ``data``, and what proves it."""

        def prove(head: Digest, _: bytes) -> SavedState | None:
            """None if it is between two heads."""
            now = self._driver.machine.view.head(shard)
            return self._saved(shard) if now is not None and now.id == head else None

        for _ in range(TRIES):
            saved = await copied(self._driver, shard, data, prove, is_checked=False)
            if saved is not None:
                return saved
        raise CopyError("it is always changing")

    def _saved(self, shard: ShardId) -> SavedState:
        """The machine's state of a shard, with its proof and what led to it."""
        proof, proofs = self._proof(shard), self._driver.cargo.shelves[shard].proofs
        ancestry = self._driver.machine.view.ancestry(shard)
        lineage = lineage_of(proofs.get(commit) for commit in reversed(ancestry))
        return SavedState(proof.state, proof.header, proof.signature, lineage)
