"""Where payloads are kept: the newest in memory, the others in files of the run's folder.

Rules of this file:
1. What is kept is decided elsewhere (``Machine.payloads``); here only where. What is still to be merged or applied
   (``Machine.at_work``) stays in memory: no disk holds up a turn. Files live as long as a life of the peer:
   what an earlier life left is of no use, and goes first.
2. A file is written before its memory is given back, and goes when nobody holds its payload any more. It is not forced
   to the disk.
3. What is read back is compared with its digest: a disk that alters a payload costs that payload.
4. A disk that is full, or may be written no more for today, costs memory: bounded, since less is kept then.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from p2pdiloco.peer.disk import Disk
from p2pdiloco.peer.host import Host
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.peer.shift_queue import Payload
from p2pdiloco.peer.write_budget import HOUR_S, WriteBudget
from p2pdiloco.protocol.identifiers import Digest, ShardId, digest_of
from p2pdiloco.runtime import logs

log = logs.get("node")

PAYLOADS = "payloads"
"""The folder in a run's folder."""
WINDOW_BYTES_PER_PARAMETER = 0.51
"""Stay in memory, of each shard's payloads the newest; in int4 one, Huffman-coded or not."""
BURST_S = HOUR_S
"""What was not written in this time may be written later."""
READ_BYTES = 64 << 20
"""Of payloads that are being read at once, to be sent: who asks for more asks again."""
AGAIN_S = 60.0
"""After a failure nothing is written for so long."""


class Held:
    """One payload that is kept."""

    __slots__ = ("__weakref__", "data", "digest", "is_written", "path", "size")

    def __init__(self, digest: Digest, data: Payload) -> None:
        self.digest = digest
        self.size = len(data)
        self.data: Payload | None = data
        """None: only the file has it."""
        self.path: Path | None = None
        """Its file, from when that begins to be written."""
        self.is_written = False

    def __len__(self) -> int:
        return self.size

    def read(self, disk: Disk) -> Payload:
        """Its bytes. Blocks if they are in a file.

        Raises:
            ValueError: the disk has lost or altered them.
        """
        data = self.data
        if data is not None:
            return data
        assert self.path is not None
        try:
            found = disk.read(self.path, 0, self.size)
        except OSError as error:
            raise ValueError(f"payload {self.digest[:8]} cannot be read: {error}") from error
        if digest_of(found) != self.digest:
            raise ValueError(f"the disk has altered payload {self.digest[:8]}")
        return found


class PayloadStore:
    """The files of one life, of what the ``budget`` has to spare."""

    def __init__(self, host: Host, options: PeerOptions, budget: WriteBudget) -> None:
        self._host = host
        self._budget = budget
        self._folder = folder = options.folder / PAYLOADS
        self._least_bytes = options.payload_memory_bytes
        self._allowed = (budget.spare_bytes_per_s() or 0.0) * BURST_S
        self._counted_at = host.now()
        self._failed_at: float | None = None
        self._files = 0
        self._reading_bytes = 0
        self._doomed: list[tuple[weakref.ref[Held], Path]] = []
        host.work("disk", lambda: host.disk.remove_folder(folder))

    def window_bytes(self, elements: int, share: float) -> int:
        """Of a shard of ``elements`` parameters, ``share`` of the model: what stays in memory."""
        return int(max(WINDOW_BYTES_PER_PARAMETER * elements, self._least_bytes * share))

    def may_write(self) -> bool:
        """Whether the disk takes more now."""
        now, rate = self._host.now(), self._budget.spare_bytes_per_s()
        if rate is not None:
            self._allowed = min(rate * BURST_S, self._allowed + rate * (now - self._counted_at))
        self._counted_at = now
        is_resting = self._failed_at is not None and now - self._failed_at < AGAIN_S
        return not is_resting and (rate is None or self._allowed > 0)

    def spill(self, shard: ShardId, held: Held) -> None:
        """Write a payload's file, then let go of its memory."""
        if held.is_written:
            held.data = None
        if held.path is not None or held.data is None:
            return
        self._files += 1
        path = held.path = self._folder / f"{shard:08d}-{self._files:012d}"
        self._allowed -= held.size
        self._host.work("disk", partial(self._write, held, held.data, path))

    def fetch(self, held: Held, then: Callable[[Payload], None], fail: Callable[[], None]) -> None:
        """``then`` gets the payload's bytes, at once if they are in memory; else ``fail`` is called."""
        if held.data is not None:
            then(held.data)
            return
        if self._reading_bytes + held.size > READ_BYTES:
            log.info("payload not read: too many are being read", payload=held.digest)
            fail()
            return
        self._reading_bytes += held.size

        def done(future: asyncio.Future[Payload]) -> None:
            self._reading_bytes -= held.size
            if future.cancelled():
                return
            error = future.exception()
            if isinstance(error, ValueError):
                log.warning("payload is lost", reason=str(error))
                fail()
            else:
                then(future.result())

        self._host.work("disk", lambda: held.read(self._host.disk)).add_done_callback(done)

    def _write(self, held: Held, data: Payload, path: Path) -> None:
        """On the disk's thread."""
        try:
            self._host.disk.write(path, [data])
        except OSError as error:
            with contextlib.suppress(OSError):
                self._host.disk.remove(path)
            held.path = None
            if self._failed_at is None:
                log.warning("payloads stay in memory", folder=self._folder, reason=str(error))
            self._failed_at = self._host.now()
        else:
            self._failed_at = None
            held.is_written = True
            held.data = None

    def drop(self, dropped: Sequence[Held]) -> None:
        """Nobody needs these; files go when the last who still reads them is done."""
        self._doomed += [(weakref.ref(held), held.path) for held in dropped if held.path is not None]

    def sweep(self) -> None:
        """Remove files of what was dropped."""
        gone = [path for held, path in self._doomed if held() is None]
        if gone:
            self._doomed = [(held, path) for held, path in self._doomed if held() is not None]
            self._host.work("disk", partial(self._remove, gone))

    def _remove(self, gone: Sequence[Path]) -> None:
        for path in gone:
            with contextlib.suppress(OSError):
                self._host.disk.remove(path)
