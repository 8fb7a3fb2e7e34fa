"""Updates for the learner: its parameters move by *shifts*, which it adds at a step boundary.

Rules of this file:
1. The node never reads or writes the learner's parameters. A shift is (new global - old global), plus own contributions
   that were merged, minus those that a fork took back. The learner thus keeps every step that it made meanwhile
   (``carry``).
2. A shard has at most one shift in flight. Shifts that come before the learner has added it are summed in a queue.
3. A snapshot is updated with all shifts that the learner had not added when it was taken. An outer gradient is
   therefore always relative to the head that it names.
4. A shard's slot is in use until the learner has taken the shift, or the snapshot is encoded (``VectorMemory``).
5. A new learner gets the global parameters piece by piece, each after it has taken the previous one. Changes made
   meanwhile reach it with the piece, or as a shift if it has that piece already.
6. Everything runs on the threads of ``model_state``, in the order of its rule 1. ``begin_shift``, ``has_snapshot`` and
   ``release_snapshot`` are jobs of one shard; all others are jobs of none.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal, NamedTuple

from torch import Tensor

from p2pdiloco.codec import quantization
from p2pdiloco.codec.compression import Body
from p2pdiloco.protocol.ids import FragmentId, LearnerId, ShardId
from p2pdiloco.protocol.manifest import Layout, Shard
from p2pdiloco.training.shared_memory import SharedVectors, SpareVector, ring_elements, slot_elements

# -- Memory of updates and snapshots -----------------------------------------------------------------------------------
# Slots for the shifts and snapshots that are in flight, in three rings: shifts, shifts that wait, and snapshots.
# Rules of this section:
# 1. A shard gets the lowest free slot, so that all shards use the same few, one after the other: fresh memory costs
#    more than the arithmetic in it.
# 2. The first slots of shifts and of snapshots, as many as the rounds of two steps need, keep their memory. So a round
#    finds memory, however long ago the previous one was.
# 3. Other free slots keep it for a while: ``KEPT`` parameters in all, the lowest ones, and until a slot was not used
#    between two calls of ``release_unused``.
# 4. Threads that work on different shards share this object, under its lock.
# 5. Nothing is given back while a learner may have page-locked the memory: its device would keep using the old pages.


Place = Literal["shift", "queued", "snapshot"]
# In parameters: 64 MB, whatever the model.
KEPT = 16 << 20


def rounds_at_once(layout: Layout, sync_every: int) -> int:
    """Return how many fragments have their round in two steps, and may have snapshots at once."""
    return min(len(layout.fragments), 2 * -(-len(layout.fragments) // sync_every))


class VectorMemory:
    """The slots of shifts and snapshots."""

    def __init__(self, layout: Layout, vectors: SharedVectors, sync_every: int) -> None:
        ring = ring_elements(layout)
        if min(len(vectors.shift), len(vectors.snapshot)) < ring:
            raise ValueError(f"shift and snapshot must have {ring} elements: create them with ring_elements(layout)")
        self._vectors = vectors
        # The queue's ring, private to this process.
        self.spare = SpareVector(ring)
        # True if the learner's device has page-locked slots, or may have.
        self.is_pinned = False
        self._lock = threading.RLock()
        self._slot = slot_elements(layout)
        most = max(map(len, layout.fragments)) * rounds_at_once(layout, sync_every)
        # Slots below this number keep their memory.
        self._lasting: dict[Place, int] = {"shift": most, "queued": 0, "snapshot": most}
        # Heaps of slots that hold no shard, and the slots of the shards.
        self._free: dict[Place, list[int]] = {place: list(range(len(layout.shards))) for place in self._lasting}
        self._used: dict[tuple[Place, ShardId], int] = {}
        # Free slots that keep their memory for a while. True: used since the last ``release_unused``.
        self._kept: dict[tuple[Place, int], bool] = {}

    def acquire(self, place: Place, shard: ShardId) -> None:
        """Give a shard a slot, if it has none."""
        with self._lock:
            if (place, shard) not in self._used:
                slot = self._used[place, shard] = heapq.heappop(self._free[place])
                self._kept.pop((place, slot), None)

    def part(self, place: Place, shard: Shard) -> slice:
        """Return the elements of ``place`` that a shard has."""
        start = self._used[place, shard.shard] * self._slot
        return slice(start, start + shard.elements)

    def starts(self, place: Place, shards: Sequence[ShardId]) -> tuple[int, ...] | None:
        """Return the first element of each shard in ``place``; None if one has no slot any more."""
        with self._lock:
            slots = [self._used.get((place, shard)) for shard in shards]
        return None if None in slots else tuple(slot * self._slot for slot in slots if slot is not None)

    def release(self, place: Place, shard: ShardId) -> None:
        """Free a shard's slot. Its memory is kept for a while, because it may be needed soon."""
        with self._lock:
            slot = self._used.pop((place, shard), None)
            if slot is None:
                return
            heapq.heappush(self._free[place], slot)
            if slot < self._lasting[place]:
                return
            self._kept[place, slot] = True
            if self.is_pinned:
                return
            while len(self._kept) * self._slot > KEPT:
                self._give_back(*max(self._kept, key=lambda key: key[1]))

    def release_all(self) -> None:
        """Take all slots."""
        for place, shard in list(self._used):
            self.release(place, shard)

    def release_unused(self) -> None:
        """Give back the memory that was not used since the last call."""
        if self.is_pinned:
            return
        with self._lock:
            for (place, slot), is_fresh in list(self._kept.items()):
                if is_fresh:
                    self._kept[place, slot] = False
                else:
                    self._give_back(place, slot)

    def _give_back(self, place: Place, slot: int) -> None:
        del self._kept[place, slot]
        start, stop = slot * self._slot, (slot + 1) * self._slot
        if place == "queued":
            self.spare.give_back(start, stop)
        else:
            self._vectors.give_back(place, start, stop)


# -- Updates for the learner -------------------------------------------------------------------------------------------


# Compressed bytes of a contribution or a commit. Read-only.
Payload = bytes | memoryview
# Minimum parameters of a piece that a new learner gets at a time: 64 MB of shared memory, whatever the model.
PIECE = 16 << 20


class Shifts(NamedTuple):
    """Shards whose part of the shift buffer the learner is to take now."""

    added: tuple[ShardId, ...]
    """parameters += shift"""
    replaced: tuple[ShardId, ...]
    """parameters = shift"""
    is_last_piece: bool = False
    """With these, a new learner has all global parameters."""


class ShiftKind(Enum):
    """Kind of a shift: none, add to the parameters, or replace them."""

    NONE = 0
    ADD = 1
    REPLACE = 2


class Moves(NamedTuple):
    """Changes that a new head makes to this peer's learner, as payloads of its own contributions.

    ``settled`` contributions were merged; ``restored`` ones were taken back by a fork. ``is_reset``: the learner takes
    the global parameters instead.
    """

    learner: LearnerId | None
    settled: Sequence[Payload]
    restored: Sequence[Payload]
    is_reset: bool


class Handover(NamedTuple):
    """Destinations of the changes of one shard's parameters, besides the global parameters."""

    shifts: Shifts
    """Shifts to announce to the learner."""
    start: int
    """The shard's first element in the flat layout."""
    buffer: Tensor | None
    """The shard's slot for shifts, or its slot in the queue; None without a learner."""
    is_added: bool
    """True: add to the buffer's content. False: replace it."""
    is_reset: bool
    """True: the buffer takes the new parameters, not the changes."""
    snapshot: Tensor | None
    """The shard's snapshot, if it must be kept up to date."""
    settled: Sequence[Sequence[Body]]
    restored: Sequence[Sequence[Body]]
    """Bodies of own contributions, by chunk; so is ``settled``."""

    def take(self, chunk: int, span: slice, theta: Tensor, change: Tensor) -> None:
        """Record one chunk's new parameters ``theta`` and their ``change``, both float32 [n]. Overwrites ``change``.

        ``span``: the chunk's elements in the flat layout.
        """
        if self.buffer is None:
            return
        span = slice(span.start - self.start, span.stop - self.start)
        if self.is_reset:
            self.buffer[span].copy_(theta)
            return
        for bodies in self.settled:
            quantization.add_chunk(bodies[chunk], 1.0, change)
        for bodies in self.restored:
            quantization.add_chunk(bodies[chunk], -1.0, change)
        if self.is_added:
            self.buffer[span].add_(change)
        else:
            self.buffer[span].copy_(change)
        if self.snapshot is not None:
            self.snapshot[span].add_(change)


class LearnerUpdates:
    """Pending updates of one peer's learner."""

    def __init__(self, layout: Layout, vectors: SharedVectors, sync_every: int) -> None:
        """``sync_every``: inner steps between two rounds of a fragment (H)."""
        self._layout = layout
        self._vectors = vectors
        self.memory = VectorMemory(layout, vectors, sync_every)
        # ``queued``: shifts that wait until the learner has added the previous one. Few ever wait.
        self._rings: dict[Place, Tensor] = {
            "shift": vectors.shift,
            "queued": self.memory.spare.values,
            "snapshot": vectors.snapshot,
        }
        # Shards that a new learner has not been given yet.
        self._unloaded: deque[ShardId] = deque()
        # Shards of the present piece that the learner has not taken yet.
        self._piece: set[ShardId] = set()
        # Shards whose snapshots the learner is writing.
        self._asked: set[ShardId] = set()
        self.learner: LearnerId | None = None
        self._in_flight = [ShiftKind.NONE] * len(layout.shards)
        self._in_queue = [ShiftKind.NONE] * len(layout.shards)
        # True if the shard's slot for snapshots holds the learner's parameters, up to date.
        self._has_snapshot = [False] * len(layout.shards)

    def part(self, place: Place, shard: ShardId) -> Tensor:
        """Return the values of a shard that has a slot in ``place``, float32 [n]."""
        return self._rings[place][self.memory.part(place, self._layout.shards[shard])]

    @property
    def is_empty(self) -> bool:
        """True if the learner has added all shifts."""
        kinds = (*self._in_flight, *self._in_queue)
        return not self._unloaded and all(kind is ShiftKind.NONE for kind in kinds)

    # -- a learner's life ----------------------------------------------------------------------------------------------

    def load(self, learner: LearnerId) -> Shifts:
        """Begin to give a new learner the global parameters; return the first piece.

        The learner acknowledges each piece with ``Shifted``; ``acknowledge`` then returns the next one.
        """
        self.learner = learner
        self._asked.clear()
        self._piece.clear()
        self.memory.release_all()
        self._unloaded = deque(piece.shard for piece in self._layout.shards)
        for shard in self._unloaded:
            self._in_flight[shard] = self._in_queue[shard] = ShiftKind.NONE
            self._has_snapshot[shard] = False
        return Shifts((), self._next_piece(), not self._unloaded)

    def _next_piece(self) -> tuple[ShardId, ...]:
        """Copy the next piece of the global parameters into the slots for shifts; return the shards of the piece."""
        elements = 0
        while self._unloaded and elements < PIECE:
            shard = self._unloaded.popleft()
            self.memory.acquire("shift", shard)
            piece = self._layout.shards[shard]
            self.part("shift", shard).copy_(self._vectors.theta[piece.start : piece.stop])
            self._in_flight[shard] = ShiftKind.REPLACE
            self._piece.add(shard)
            elements += piece.elements
        return tuple(sorted(self._piece))

    def unload(self) -> None:
        """Forget the learner, because it is gone.

        The next learner may page-lock the memory before it reports so, hence ``is_pinned``.
        """
        self.learner = None
        self.memory.is_pinned = True

    # -- shifts --------------------------------------------------------------------------------------------------------

    def begin_shift(self, shard: ShardId, moves: Moves, bodies: Callable[[Payload], Sequence[Body]]) -> Handover:
        """Begin a shift: into a slot for shifts if the learner has taken the previous one, else into the queue.

        ``bodies`` decompresses a payload.
        """
        start = self._layout.shards[shard].start
        if self.learner is None or shard in self._unloaded:
            return Handover(Shifts((), ()), start, None, False, False, None, (), ())
        kind = ShiftKind.REPLACE if moves.is_reset else ShiftKind.ADD
        if moves.is_reset:
            self._has_snapshot[shard] = False  # the learner loses the steps that the snapshot holds
        shifts, is_added = Shifts((), ()), False
        place: Place = "queued"
        if self._in_flight[shard] is ShiftKind.NONE:
            assert self._in_queue[shard] is ShiftKind.NONE, "a shift waits in the queue but none is in flight"
            self._in_flight[shard] = kind
            shifts = Shifts((), (shard,)) if moves.is_reset else Shifts((shard,), ())
            place = "shift"
        else:
            is_first = self._in_queue[shard] is ShiftKind.NONE
            is_added = not is_first and not moves.is_reset
            if is_first or moves.is_reset:
                self._in_queue[shard] = kind
        self.memory.acquire(place, shard)
        is_mine = moves.learner == self.learner and not moves.is_reset
        return Handover(
            shifts,
            start,
            self.part(place, shard),
            is_added,
            moves.is_reset,
            self.part("snapshot", shard) if self._has_snapshot[shard] else None,
            [bodies(payload) for payload in moves.settled] if is_mine else (),
            [bodies(payload) for payload in moves.restored] if is_mine else (),
        )

    def next_shifts(self, shards: Sequence[ShardId]) -> Shifts:
        """Move queued shifts of ``shards`` to slots for shifts where the learner has taken the previous one; return
        them."""
        ready: dict[ShiftKind, list[ShardId]] = {ShiftKind.ADD: [], ShiftKind.REPLACE: []}
        for shard in shards:
            kind = self._in_queue[shard]
            if kind is not ShiftKind.NONE and self._in_flight[shard] is ShiftKind.NONE:
                self.memory.acquire("shift", shard)
                self.part("shift", shard).copy_(self.part("queued", shard))
                self.memory.release("queued", shard)
                self._in_queue[shard] = ShiftKind.NONE
                self._in_flight[shard] = kind
                ready[kind].append(shard)
        return Shifts(tuple(ready[ShiftKind.ADD]), tuple(ready[ShiftKind.REPLACE]))

    def acknowledge(self, shards: Sequence[ShardId]) -> Shifts:
        """Note that the learner has taken these shifts; return the next ones."""
        for shard in shards:
            self._in_flight[shard] = ShiftKind.NONE
        shifts = self.next_shifts(shards)
        self._piece.difference_update(shards)
        for shard in shards:
            if self._in_flight[shard] is ShiftKind.NONE:
                self.memory.release("shift", shard)
        if self._piece or not self._unloaded:
            return shifts
        return Shifts(shifts.added, shifts.replaced + self._next_piece(), not self._unloaded)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def has_snapshot(self, shard: ShardId) -> bool:
        """Return whether the shard has a snapshot to encode."""
        return self._has_snapshot[shard]

    def begin_snapshot(self, fragment: FragmentId) -> None:
        """Give the fragment's shards slots for the learner to write to."""
        for shard in self._layout.fragments[fragment]:
            self._has_snapshot[shard] = False
            self._asked.add(shard)
            self.memory.acquire("snapshot", shard)

    def complete_snapshot(self, fragment: FragmentId) -> None:
        """Update the fragment's snapshot with the shifts that the learner had not added when it wrote it."""
        for shard in self._layout.fragments[fragment]:
            if shard not in self._asked:
                continue  # a learner asked before has ended since
            self._asked.discard(shard)
            waiting: tuple[tuple[ShiftKind, Place], ...]
            waiting = ((self._in_flight[shard], "shift"), (self._in_queue[shard], "queued"))
            self._has_snapshot[shard] = all(kind is not ShiftKind.REPLACE for kind, _ in waiting)
            for kind, place in waiting:
                if kind is ShiftKind.ADD:
                    self.part("snapshot", shard).add_(self.part(place, shard))

    def release_snapshot(self, shard: ShardId) -> None:
        """Stop keeping the shard's snapshot up to date: it was encoded, and the next contribution has its own."""
        self._has_snapshot[shard] = False

    def end_snapshot(self, fragment: FragmentId) -> None:
        """Release the fragment's snapshot after all its shards are encoded, unless the learner is writing another
        one."""
        for shard in self._layout.fragments[fragment]:
            if shard not in self._asked:
                self._has_snapshot[shard] = False
                self.memory.release("snapshot", shard)
