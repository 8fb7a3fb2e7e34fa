"""Places in one file for pieces of any length, which come and go.

Rules of this file:
1. Pure. Two pieces never share a sector (``SECTOR_BYTES``): each can be written past the system's cache.
2. The first gap that is large enough is taken; what is given back joins the gaps beside it, and the file's end.
3. Pieces of nearly one size, as a shard's are, get places of one size: else each leaves a sliver of its gap, and there
   are thousands of them to be looked through (docs/lab-notes.md).
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from p2pdiloco.util.files import SECTOR_BYTES

STEPS = 32
"""Sizes of places per power of two, where these are whole sectors: at most 1/32 is unused."""


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


class Places:
    """Of one file, that is empty."""

    def __init__(self) -> None:
        self.end = 0
        """Behind the last that is taken."""
        self._gaps: list[Place] = []
        """In order; no two touch, and none ends at ``end``."""

    def take(self, size: int) -> Place:
        """A place for ``size`` bytes."""
        size = place_bytes(size)
        for index, gap in enumerate(self._gaps):
            if gap.size >= size:
                self._gaps[index : index + 1] = [Place(gap.at + size, gap.size - size)] if gap.size > size else []
                return Place(gap.at, size)
        self.end += size
        return Place(self.end - size, size)

    def give(self, place: Place) -> None:
        """It was taken, and is not needed any more."""
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

    def taken_bytes(self) -> int:
        """Of all places that were not given back."""
        return self.end - sum(gap.size for gap in self._gaps)
