"""When and how a node writes its checkpoints: a copy of all shards between two jobs, written by a thread of its own.

Training does not notice: the learner's parameters are not touched, and the copy of the global state is made on the
worker thread. A full disk is reported and tried again; the checkpoints that are there stay.

Where writing is cheap a checkpoint follows every turn, so that a run whose peers all die loses about what was not
merged yet; ``every_s`` is the longest that is waited for one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from p2pdiloco.peer.checkpoint import SavedState, save
from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.host import within
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.peer.offers import lineage_of
from p2pdiloco.protocol.identifiers import Digest, ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.runtime import logs
from p2pdiloco.wire.bodies import StateProof

log = logs.get("node")

TRIES = 20
"""Copies that may fall between a shard's new state and the machine's word of it before one checkpoint is skipped."""
COPY_S = 60.0
LOOK_S = 0.2
STATE_BYTES = 8
"""A parameter's in a checkpoint; so much again, or less, is what the learner writes of its own."""
DAY_S = 86400.0
LONGEST_S = 3600.0
"""Between two checkpoints, whatever they may write."""
COST_SHARE = 0.02
"""Of the time, that writing checkpoints may take, unless ``every_s`` demands more."""

Copied = tuple[list[Digest | None], Tensor, Tensor]
Taken = tuple[tuple[SavedState, ...], Tensor, Tensor]


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
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._driver = driver
        self._host = driver.host
        self._proof = proof
        self._metrics = metrics
        self._keep = keep
        self._save_learner = save_learner
        self._saved_mark: int | None = None
        """Of the heads in the last checkpoint."""

    async def keep_saving(self, every_s: float, bytes_per_day: float | None = None) -> None:
        """Write a checkpoint when there is something new, as often as ``COST_SHARE`` and ``bytes_per_day`` allow and,
        but for the latter, at least every ``every_s`` seconds, until cancelled. The learner saves its own state by the
        clock alone, since it waits for its copy."""
        least_s = shortest_s(Layout.of(self._manifest).elements, bytes_per_day)
        every_s = max(every_s, least_s)
        learner_saved_at = self._host.now()
        rest_s = 0.0
        while True:
            await self._host.sleep(max(LOOK_S, least_s, min(rest_s, every_s)))
            began = self._host.now()
            if began - learner_saved_at >= every_s:
                self._save_learner()
                learner_saved_at = began
            if self._driver.machine.view.is_current:
                is_written = await self.save(is_last=False)
                rest_s = (self._host.now() - began) / COST_SHARE if is_written else every_s

    async def save(self, *, is_last: bool) -> bool:
        """Write a checkpoint if anything is new. False: it should have been written, and was not."""
        view = self._driver.machine.view
        mark = view.heads_mark
        if self._driver.is_closed or not view.is_current or mark == self._saved_mark:
            return mark == self._saved_mark
        taken = await self._take()
        if taken is None:
            log.warning("checkpoint skipped: no quiet moment")
            return False
        try:
            await self._host.work(
                "disk", lambda: save(self._folder, self._manifest, *taken, keep=self._keep, disk=self._host.disk)
            )
        except OSError as error:
            log.error(
                "checkpoint not written, the last one stays", folder=self._folder, reason=os.strerror(error.errno or 0)
            )
            self._metrics.write("checkpoint-failed", reason=os.strerror(error.errno or 0))
            return False
        except ValueError as error:
            log.error("checkpoint not written, the last one stays", folder=self._folder, reason=str(error))
            self._metrics.write("checkpoint-failed", reason=str(error))
            self._driver.job(self._driver.state.integrity.look_again, lambda _: None)  # it is found and mended
            return False
        self._saved_mark = mark
        self._metrics.write("checkpoint", is_last=is_last)
        return True

    async def _take(self) -> Taken | None:
        """A copy of all shards with the heads that they are at."""
        state = self._driver.state
        for _ in range(TRIES):
            taken: asyncio.Future[Taken | None] = asyncio.get_running_loop().create_future()

            def copy() -> Copied:
                return list(state.heads), state.theta.clone(), state.momentum.clone()

            def prove(copied: Copied, taken: asyncio.Future[Taken | None] = taken) -> None:
                """Pair the copy with the machine's heads, in the same breath; None if a shard is between two."""
                heads, theta, momentum = copied
                now = [None if head is None else head.id for head in self._driver.machine.view.heads()]
                is_whole = None not in now and now == heads
                if not taken.done():
                    proofs = tuple(self._saved(ShardId(shard)) for shard in range(len(heads))) if is_whole else ()
                    taken.set_result((proofs, theta, momentum) if is_whole else None)

            self._driver.job(copy, prove)
            try:
                found = await within(self._host, taken, COPY_S)
            except TimeoutError:
                return None  # the next look tries again
            if found is not None:
                return found
        return None

    def _saved(self, shard: ShardId) -> SavedState:
        """The machine's state of a shard, with its proof and what led to it."""
        proof, proofs = self._proof(shard), self._driver.cargo.shelves[shard].proofs
        ancestry = self._driver.machine.view.ancestry(shard)
        lineage = lineage_of(proofs.get(commit) for commit in reversed(ancestry))
        return SavedState(proof.state, proof.header, proof.signature, lineage)


def shortest_s(elements: int, bytes_per_day: float | None) -> float:
    """Between two checkpoints of a model of ``elements`` parameters, and as many savings of its learner, so that both
    together write no more than that."""
    if bytes_per_day is None:
        return 0.0
    return min(LONGEST_S, 2 * STATE_BYTES * elements * DAY_S / bytes_per_day)
