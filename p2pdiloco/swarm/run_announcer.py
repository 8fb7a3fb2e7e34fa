"""Announces an open run in the directory, where newcomers look it up by its name.

Rules of this file:
1. Every peer of the run announces it. The interval grows with the number of peers, so that all together announce as
   often as FEW peers would. There is no single announcer, since it might fail.
2. An announcement expires after LIVES intervals. A peer that leaves withdraws its own.
3. A private run is not announced.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec

from p2pdiloco.discovery.directory import Directory, DirectoryError
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.util import logs
from p2pdiloco.wire.directory_records import RunRecord

log = logs.get("announcement")

PAUSE_S, PAUSE_MOST_S = 20.0, 480.0
FEW = 2
LIVES = 3.0
# Lower bound of the random factor on each pause, so that peers that started together drift apart.
SHORTEST = 0.7


class RunAnnouncer:
    """Announces the run of ``manifest``. ``others`` returns the number of other peers that announce it, too."""

    def __init__(self, manifest: Manifest, directory: Directory, others: Callable[[], int]) -> None:
        self._run = manifest.run
        self._is_open = manifest.config.access == "open"
        self._record = msgspec.msgpack.encode(RunRecord(manifest.config.name, Layout.of(manifest).elements))
        self._directory = directory
        self._others = others

    async def keep(self) -> None:
        """Announce the run until cancelled."""
        while self._is_open:
            pause_s = min(PAUSE_MOST_S, PAUSE_S * max(1.0, (1 + self._others()) / FEW))
            try:
                await self._directory.publish_run(self._run, self._record, LIVES * pause_s)
            except DirectoryError as error:
                log.debug("run not announced", reason=str(error))
                pause_s = PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(SHORTEST, 1.0))

    async def withdraw(self) -> None:
        """Withdraw the announcement, and stop announcing."""
        self._is_open = False
        try:
            await self._directory.withdraw_run(self._run)
        except DirectoryError as error:
            log.debug("the announcement of the run could not be withdrawn", reason=str(error))
