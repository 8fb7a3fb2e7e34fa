"""Commits since the last checkpoint, appended beside it while the peer goes on: a crash costs what was committed in the
last ``EVERY_S`` seconds, however seldom whole checkpoints are written.

Rules of this file:
1. A segment is begun with a checkpoint, before its first shard is copied (``segments``). Of each shard every commit
   after the head of then is appended, in order. Where one is missing (a state was fetched in its place, its payload is
   gone, the disk took nothing) nothing of that shard follows until the next checkpoint, which comes sooner then.
2. Commits that make more bytes than the budget has are not written, only counted, until a checkpoint finds that they
   have become fewer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from p2pdiloco.peer import segments
from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.payload_store import Held
from p2pdiloco.peer.shift_queue import Payload
from p2pdiloco.peer.write_budget import DAY_S, HOUR_S, WriteBudget
from p2pdiloco.protocol.ids import Digest, ShardId
from p2pdiloco.protocol.messages import CommitHeader, commit_id
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import CommitParts

log = logs.get("node")

EVERY_S = 10.0
"""Between two looks at what was committed."""


class _Entry(NamedTuple):
    """A commit to be appended."""

    header: CommitHeader
    held: Held
    parts_of: Callable[[Payload], CommitParts]


class CommitLog:
    """Of one life, in ``folder``."""

    def __init__(self, folder: Path, driver: Driver, budget: WriteBudget) -> None:
        self.every_s = EVERY_S
        self._folder = folder
        self._driver = driver
        self._host = driver.host
        self._budget = budget
        self._path: Path | None = None
        """The segment that is written; None: commits are only counted."""
        self._heads: list[Digest | None] = [None] * len(driver.state.layout.shards)
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
        self._heads = [None if head is None else head.id for head in self._driver.machine.view.heads()]
        self._path = None
        if fits:
            path = segments.path_of(self._folder, number)
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
        mine = self._driver.identity.peer_id
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
        commits = self._driver.machine.view.commits_after(shard, known)
        if commits is None:
            return None
        parts = [self._driver.cargo.parts(header) for header in commits]
        entries = [_Entry(header, *one) for header, one in zip(commits, parts, strict=True) if one is not None]
        return entries if len(entries) == len(commits) else None

    def _append(self, path: Path, entries: list[_Entry]) -> None:
        """On the disk's thread."""
        for header, held, parts_of in entries:
            self._host.disk.append(path, segments.packed(header, parts_of(held.read(self._host.disk))))
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
