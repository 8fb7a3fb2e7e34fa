"""Store of payloads: the newest in memory, the others in a file of the run's folder.

Rules of this file:
1. What is kept is decided elsewhere (``Machine.payloads``); here only where. What is still to be merged or applied
   (``Machine.at_work``) stays in memory: no disk holds up a turn. The file lives as long as a life of the peer:
   what an earlier life left is of no use, and goes first.
2. A payload has a place in the file, which is written before its memory is given back, and given to another when
   nobody holds the payload any more (to make and to remove a file for each costs three times as much as to write it).
   It is not forced to the disk. A file of which nothing is needed goes.
3. What is read back is compared with its digest: a disk that alters a payload costs that payload.
4. A disk that is full, or may be written no more for today, costs memory: bounded, since less is kept then.
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
# Places in one file for pieces of any length, which come and go.
# Rules of this file:
# 1. Pure. Two pieces never share a sector (``SECTOR_BYTES``): each can be written past the system's cache.
# 2. The first gap that is large enough is taken; what is given back joins the gaps beside it, and the file's end.
# 3. Pieces of nearly one size, as a shard's are, get places of one size: else each leaves a sliver of its gap, and
#    there are thousands of them to be looked through.


STEPS = 32
"""Sizes of places per power of two, where these are whole sectors: at most 1/32 is unused. Measured with 500 shards
over 120 turns: 1,638 gaps and 1.0 ms for the slowest search, against 4,589 gaps and 8.2 ms with places of any number of
sectors (benchmarks/notes.md)."""


def place_bytes(size: int) -> int:
    """How many bytes a place for ``size`` of them takes."""
    size = max(1, size)
    step = max(SECTOR_BYTES, (1 << ((size - 1).bit_length() - 1)) // STEPS if size > 1 else 0)
    return -(-size // step) * step


class Place(NamedTuple):
    """Bytes of the file: whole sectors."""

    at: int
    size: int

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        return self.at + self.size


class FileAllocator:
    """Allocates places in one file, which is empty at first."""

    def __init__(self) -> None:
        self.end = 0
        """The end of the last place that is allocated."""
        self._gaps: list[Place] = []
        """In order; no two touch, and none ends at ``end``."""

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
        """Free a place that was allocated and is not needed any more."""
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
        """Bytes of all places that were not freed."""
        return self.end - sum(gap.size for gap in self._gaps)


# -- Payload store -----------------------------------------------------------------------------------------------------
# Where payloads are kept: the newest in memory, the others in a file of the run's folder.


log = logs.get("node")

PAYLOADS = "payloads"
"""The folder in a run's folder."""
FILE = "payloads.bin"
"""The file in that folder."""
WINDOW_BYTES_PER_PARAMETER = 0.51
"""Stay in memory, of each shard's payloads the newest; in int4 one, Huffman-coded or not."""
BURST_S = HOUR_S
"""What was not written in this time may be written later."""
READ_BYTES = 64 << 20
"""Of payloads that are being read at once, to be sent, or one that has more: who asks for more asks again."""
AGAIN_S = 60.0
"""After a failure nothing is written for so long."""


class Held:
    """One payload that is kept."""

    __slots__ = ("__weakref__", "at", "data", "digest", "is_written", "path", "size")

    def __init__(self, digest: Digest, data: Payload) -> None:
        self.digest = digest
        self.size = len(data)
        self.data: Payload | None = data
        """None: only the file has it."""
        self.path: Path | None = None
        """The file that has it, from when it begins to be written."""
        self.at = 0
        """Where it begins in that file."""
        self.is_written = False

    def __len__(self) -> int:
        return self.size

    def read(self, disk: Disk) -> Payload:
        """Return its bytes. Blocks if they are in a file.

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
    """Keeps payloads in the file of one life, which is written with what the ``budget`` has to spare."""

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
        """How many bytes of payloads stay in memory for a shard of ``elements`` parameters, ``share`` of the model."""
        return int(max(WINDOW_BYTES_PER_PARAMETER * elements, self._least_bytes * share))

    def may_write(self) -> bool:
        """Whether the disk takes more now."""
        now, rate = self._host.now(), self._budget.spare_bytes_per_s()
        if rate is not None:
            self._allowed = min(rate * BURST_S, self._allowed + rate * (now - self._counted_at))
        self._counted_at = now
        is_resting = self._failed_at is not None and now - self._failed_at < AGAIN_S
        return not is_resting and (rate is None or self._allowed > 0)

    def spill(self, held: Held) -> None:
        """Write a payload into the file, then let go of its memory."""
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
            if all(place != doomed for _, doomed in self._doomed):  # else it was dropped meanwhile
                self._free([place])
            if self._failed_at is None:
                log.warning("payloads stay in memory", folder=self._path.parent, reason=str(error))
            self._failed_at = self._host.now()

        self._host.work("disk", lambda: self._host.disk.put(self._path, place.at, data)).add_done_callback(done)

    def fetch(self, held: Held, then: Callable[[Payload], None], fail: Callable[[], None]) -> None:
        """``then`` gets the payload's bytes, at once if they are in memory; else ``fail`` is called."""
        if held.data is not None:
            then(held.data)
            return
        if self._reading_bytes and self._reading_bytes + held.size > READ_BYTES:
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

    def drop(self, dropped: Sequence[Held]) -> None:
        """Give up payloads that nobody needs; their places are freed when the last reader is done."""
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
