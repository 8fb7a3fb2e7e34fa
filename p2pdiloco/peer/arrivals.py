"""What is told, and kept, of the states that a node downloads.

Rules of this file:
1. While a peer joins, a terminal shows one line that is written over, below all others; without one the log gets a
   line every ``LOG_S`` seconds. The event log gets both ends and the same lines.
2. Shards that came while joining are kept on the disk until a checkpoint has them (``kept_shards``), if the download
   looks like lasting ``KEEP_FROM_S`` or more: a shorter one is sooner repeated than written. At most ``WAITING_MOST``
   wait to be written; more are not kept.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from p2pdiloco.peer import kept_shards
from p2pdiloco.peer.host import Host
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.peer.transfer_progress import TransferProgress
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.util import logs
from p2pdiloco.util.logs import bottom_line
from p2pdiloco.wire.control_messages import StateOffer

log = logs.get("node")

LOG_S = 5.0
DRAW_S = 0.2
WAITING_MOST = 8
KEEP_FROM_S = 20.0


class Arrivals:
    """See the module's rules. ``width``: bytes of a parameter's state; ``folder``: where shards are kept."""

    def __init__(
        self, layout: Layout, width: int, folder: Path, metrics: Metrics, host: Host, *, stream: TextIO | None = None
    ) -> None:
        self._layout = layout
        self._width = width
        self._folder = folder
        self._metrics = metrics
        self._host = host
        self._stream = stream or sys.stderr
        self._progress: TransferProgress | None = None
        """While the peer joins."""
        self._told_at = float("-inf")
        self._waiting = 0
        self._writing = asyncio.Lock()

    def begin(self, missing: Sequence[int]) -> None:
        """The peer joins, and has all shards but those with so many parameters each."""
        now = self._host.now()
        self._progress = TransferProgress(self._width * sum(missing), now)
        self._told_at = now
        self._metrics.write("joining", shards=len(missing), of=len(self._layout.shards), **self._progress.fields(now))
        log.info("downloading the run's state", shards=len(missing), of=len(self._layout.shards))

    def chunk(self, size: int) -> None:
        """One chunk of ``size`` bytes came, and is right."""
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

    def shard(self, offer: StateOffer, chunks: Sequence[memoryview]) -> None:
        """All chunks of one shard are here."""
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
        """Every shard has a state; whether files were kept, which a checkpoint replaces."""
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
        """A checkpoint has all that was kept."""
        async with self._writing:
            await self._host.work("disk", lambda: kept_shards.clear(self._folder, self._host.disk))

    async def _keep(self, offer: StateOffer, chunks: Sequence[memoryview]) -> None:
        try:
            async with self._writing:
                if self._progress is not None:
                    await self._host.work(
                        "disk", lambda: kept_shards.keep(self._folder, offer, chunks, self._host.disk)
                    )
        except OSError as error:
            log.warning("downloaded shard not kept", folder=self._folder, reason=os.strerror(error.errno or 0))
        finally:
            self._waiting -= 1

    def _draw(self, now: float) -> None:
        assert self._progress is not None
        bottom_line.draw(self._progress.line(now, shutil.get_terminal_size().columns - 1), self._stream)
