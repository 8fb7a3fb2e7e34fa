"""Payload store: keeps the newest payloads in memory and the others in one file of the run's folder.

Rules of this file:
1. The cache decides which payloads are kept (``Machine.payloads``); this module decides where. Payloads that are still
   to be merged or applied (``Machine.at_work``) stay in memory, so that no exchange waits for the disk. The file
   belongs to one life of the peer. A file of an earlier life is useless and is removed first.
2. A payload gets a place in the file, which is written before its memory is released. The place is reused when nobody
   holds the payload any more. (Creating and removing a file for each payload costs three times as much as writing it.)
   The file is not synced. It is removed when it holds nothing that is needed.
3. A payload that is read back is compared with its digest. A disk that alters it costs only that payload.
4. If the disk is full, or the day's write budget is used up, payloads stay in memory. That is bounded, since fewer are
   kept then.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from p2pdiloco.peer.disk_budget import HOUR_S, DiskBudget
from p2pdiloco.peer.host import Disk, Host
from p2pdiloco.peer.learner_updates import Payload
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.protocol.ids import Digest, digest_of
from p2pdiloco.util import logs
from p2pdiloco.util.files import SECTOR_BYTES

# -- File allocator ----------------------------------------------------------------------------------------------------
# First-fit allocator for places in one file.
# Rules of this section:
# 1. Pure. Two places never share a sector (``SECTOR_BYTES``), so each can be written past the system's cache.
# 2. The first gap that is large enough is used. A freed place joins its neighbouring gaps and the file's end.
# 3. Sizes are rounded, so that payloads of nearly the same size, as a shard's are, get places of equal size. Otherwise
#    each leaves a sliver of its gap, and the search passes thousands of them.


# Place sizes per power of two (in whole sectors), so at most 1/32 is unused. With 500 shards over 120 exchanges there
# were 1,638 gaps and the slowest search took 1.0 ms; with places of any number of sectors, 4,589 gaps and 8.2 ms
# (benchmarks/notes.md).
STEPS = 32


def place_bytes(size: int) -> int:
    """Return the size of a place for ``size`` bytes."""
    size = max(1, size)
    step = max(SECTOR_BYTES, (1 << ((size - 1).bit_length() - 1)) // STEPS if size > 1 else 0)
    return -(-size // step) * step


class Place(NamedTuple):
    """A range of the file, in whole sectors."""

    at: int
    size: int

    @property
    def end(self) -> int:
        """Offset after its last byte."""
        return self.at + self.size


class FileAllocator:
    """Allocates places in one file, which is empty at first."""

    def __init__(self) -> None:
        # End of the last allocated place.
        self.end = 0
        # Free places in order. No two touch, and none ends at ``end``.
        self._gaps: list[Place] = []

    def allocate(self, size: int) -> Place:
        """Allocate a place for ``size`` bytes."""
        size = place_bytes(size)
        for index, gap in enumerate(self._gaps):
            if gap.size >= size:
                self._gaps[index : index + 1] = [Place(gap.at + size, gap.size - size)] if gap.size > size else []
                return Place(gap.at, size)
        self.end += size
        return Place(self.end - size, size)

    def free(self, place: Place) -> None:
        """Free a place that was allocated."""
        index = bisect.bisect(self._gaps, place)
        if index < len(self._gaps) and self._gaps[index].at == place.end:
            place = Place(place.at, place.size + self._gaps.pop(index).size)
        if index and self._gaps[index - 1].end == place.at:
            before = self._gaps.pop(index := index - 1)
            place = Place(before.at, before.size + place.size)
        if place.end == self.end:
            self.end = place.at
        else:
            self._gaps.insert(index, place)

    def allocated_bytes(self) -> int:
        """Return the total bytes of all allocated places."""
        return self.end - sum(gap.size for gap in self._gaps)


# -- Payload store -----------------------------------------------------------------------------------------------------


log = logs.get("node")

# The store's folder in a run's folder.
PAYLOADS = "payloads"
# The file in that folder.
FILE = "payloads.bin"
# Size of the newest payloads of each shard that stay in memory: in int4 one payload, Huffman-coded or not.
WINDOW_BYTES_PER_PARAMETER = 0.51
# Write budget that was not used for this long can be used later.
BURST_S = HOUR_S
# Limit on payloads that are being read at once (one may be larger). Beyond it, a read fails and the peer asks again.
READ_BYTES = 64 << 20
# After a failed write, nothing is written for this long.
AGAIN_S = 60.0


class Held:
    """One payload, in memory or in the file."""

    __slots__ = ("__weakref__", "at", "data", "digest", "is_written", "path", "size")

    def __init__(self, digest: Digest, data: Payload) -> None:
        self.digest = digest
        self.size = len(data)
        # None: only the file has the bytes.
        self.data: Payload | None = data
        # The file that has the bytes, set when the write begins.
        self.path: Path | None = None
        # Offset of the bytes in that file.
        self.at = 0
        self.is_written = False

    def __len__(self) -> int:
        return self.size

    def read(self, disk: Disk) -> Payload:
        """Return the payload's bytes. Blocks if they are in a file.

        Raises:
            ValueError: the disk has lost or altered them.
        """
        data = self.data
        if data is not None:
            return data
        assert self.path is not None
        try:
            found = disk.read(self.path, self.at, self.size)
        except OSError as error:
            raise ValueError(f"payload {self.digest[:8]} cannot be read: {error}") from error
        if digest_of(found) != self.digest:
            raise ValueError(f"the disk has altered payload {self.digest[:8]}")
        return found


class PayloadStore:
    """Stores payloads in a file, as far as the disk write ``budget`` allows."""

    def __init__(self, host: Host, options: PeerOptions, budget: DiskBudget) -> None:
        self._host = host
        self._budget = budget
        folder = options.folder / PAYLOADS
        self._path = folder / FILE
        self.places = FileAllocator()
        self._least_bytes = options.payload_memory_bytes
        self._allowed = (budget.spare_bytes_per_s() or 0.0) * BURST_S
        self._counted_at = host.now()
        self._failed_at: float | None = None
        self._reading_bytes = 0
        self._doomed: list[tuple[weakref.ref[Held], Place]] = []
        host.work("disk", lambda: host.disk.remove_folder(folder))

    def window_bytes(self, elements: int, share: float) -> int:
        """Return how many bytes of payloads stay in memory for a shard of ``elements`` parameters, ``share`` of the
        model."""
        return int(max(WINDOW_BYTES_PER_PARAMETER * elements, self._least_bytes * share))

    def may_write(self) -> bool:
        """Return whether the store may write to disk now."""
        now, rate = self._host.now(), self._budget.spare_bytes_per_s()
        if rate is not None:
            self._allowed = min(rate * BURST_S, self._allowed + rate * (now - self._counted_at))
        self._counted_at = now
        is_resting = self._failed_at is not None and now - self._failed_at < AGAIN_S
        return not is_resting and (rate is None or self._allowed > 0)

    def spill(self, held: Held) -> None:
        """Write a payload into the file, then release its memory."""
        if held.is_written:
            held.data = None
        if held.path is not None or held.data is None:
            return
        place = self.places.allocate(held.size)
        held.path, held.at = self._path, place.at
        self._allowed -= held.size
        data = held.data

        def done(future: asyncio.Future[None]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                self._failed_at = None
                held.is_written, held.data = True, None
                return
            held.path = None
            if all(place != doomed for _, doomed in self._doomed):  # a place of a dropped payload is freed by ``sweep``
                self._free([place])
            if self._failed_at is None:
                log.warning(
                    "cannot write payloads; keeping them in memory", folder=self._path.parent, reason=str(error)
                )
            self._failed_at = self._host.now()

        self._host.work("disk", lambda: self._host.disk.put(self._path, place.at, data)).add_done_callback(done)

    def fetch(self, held: Held, then: Callable[[Payload], None], fail: Callable[[], None]) -> None:
        """Call ``then`` with the payload's bytes, at once if they are in memory. If they cannot be read, call
        ``fail``."""
        if held.data is not None:
            then(held.data)
            return
        if self._reading_bytes and self._reading_bytes + held.size > READ_BYTES:
            log.info("payload not read: too many reads are running", payload=held.digest)
            fail()
            return
        self._reading_bytes += held.size

        def done(future: asyncio.Future[Payload]) -> None:
            self._reading_bytes -= held.size
            if future.cancelled():
                return
            error = future.exception()
            if isinstance(error, ValueError):
                log.warning("cannot read a payload from disk", reason=str(error))
                fail()
            else:
                then(future.result())

        self._host.work("disk", lambda: held.read(self._host.disk)).add_done_callback(done)

    def drop(self, dropped: Sequence[Held]) -> None:
        """Give up payloads that are not needed. Their places are freed when the last reader is done."""
        for held in dropped:
            if held.path is not None:
                self._doomed.append((weakref.ref(held), Place(held.at, place_bytes(held.size))))

    def sweep(self) -> None:
        """Free the places of dropped payloads that nobody reads any more."""
        gone = [place for held, place in self._doomed if held() is None]
        if gone:
            self._doomed = [(held, place) for held, place in self._doomed if held() is not None]
            self._free(gone)

    def _free(self, places: Sequence[Place]) -> None:
        for place in places:
            self.places.free(place)
        if not self.places.end:
            self._host.work("disk", partial(self._remove, self._path))

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._host.disk.remove(path)
