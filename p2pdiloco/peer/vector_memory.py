"""The memory of shifts and snapshots: for what is in flight, and for a little more.

Rules of this file:
1. What is in use keeps its memory. Of what is not, the parts that were used last keep theirs, ``KEPT`` parameters in
   all: fresh memory costs more than the arithmetic in it. What nobody has used from one ``rest`` to the next goes, too.
2. Threads that work on different shards share it.
3. Nothing is given back under a learner that has page-locked it: its device would go on with the old pages.
"""

from __future__ import annotations

import threading
from typing import Literal

from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.training.shared_memory import SharedVectors, SpareVector

Place = Literal["shift", "queued", "snapshot"]
KEPT = 16 << 20
"""Parameters: 64 MB, whatever the model."""


class VectorMemory:
    """Of one node, by shards."""

    def __init__(self, layout: Layout, vectors: SharedVectors) -> None:
        self._shards = layout.shards
        self._vectors = vectors
        self.spare = SpareVector(layout.elements)
        """What is queued: of this process alone."""
        self.is_pinned = False
        """The learner's device has page-locked the shared vectors, or may have."""
        self._lock = threading.RLock()
        self._used: set[tuple[Place, ShardId]] = set()
        self._kept: dict[tuple[Place, ShardId], bool] = {}
        """What was in use, the latest last; whether that was since the last ``rest``."""
        self._kept_elements = 0

    def use(self, place: Place, shard: ShardId) -> None:
        """It holds something from now on."""
        with self._lock:
            self._used.add((place, shard))
            if self._kept.pop((place, shard), None) is not None:
                self._kept_elements -= self._shards[shard].elements

    def free(self, place: Place, shard: ShardId, *, is_kept: bool = True) -> None:
        """What it holds is wanted no more, if it holds anything. ``is_kept``: its memory may be wanted soon."""
        with self._lock:
            if (place, shard) not in self._used:
                return
            self._used.discard((place, shard))
            self._kept[place, shard] = True
            self._kept_elements += self._shards[shard].elements
            if not is_kept and not self.is_pinned:
                self._give_back(place, shard)
            while self._kept_elements > KEPT and not self.is_pinned:
                self._give_back(*next(iter(self._kept)))

    def free_all(self) -> None:
        """Nothing is wanted any more."""
        for place, shard in list(self._used):
            self.free(place, shard)

    def rest(self) -> None:
        """Give back what has not been used since the last call."""
        if not self.is_pinned:
            for (place, shard), is_fresh in list(self._kept.items()):
                if is_fresh:
                    self._kept[place, shard] = False
                else:
                    self._give_back(place, shard)

    def _give_back(self, place: Place, shard: ShardId) -> None:
        del self._kept[place, shard]
        piece = self._shards[shard]
        self._kept_elements -= piece.elements
        if place == "queued":
            self.spare.give_back(piece.start, piece.stop)
        else:
            self._vectors.give_back(place, piece.start, piece.stop)
