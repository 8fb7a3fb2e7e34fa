"""Updates for the learner: its parameters move by *shifts*, which it adds at a step boundary.

Rules of this file:
1. The node never reads or writes the learner's parameters. A shift is (new global - old global), plus own contributions
   that were merged, minus those that a fork took back. The learner thus keeps every step that it made meanwhile
   (``carry``).
2. A shard has at most one shift in flight. Shifts that come before the learner has added it are summed in a queue.
3. A snapshot is updated with all shifts that the learner had not added when it was taken. An outer gradient is
   therefore always relative to the head that it names.
4. A buffer's memory is in use until the learner has taken the shift, or the snapshot is encoded (``VectorMemory``).
5. A new learner gets the global parameters piece by piece, each after it has taken the previous one. Changes made
   meanwhile reach it with the piece, or as a shift if it has that piece already.
6. Everything runs on the threads of ``model_state``, in the order of its rule 1. ``begin_shift``, ``has_snapshot`` and
   ``release_snapshot`` are jobs of one shard; all others are jobs of none.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal, NamedTuple

from torch import Tensor

from p2pdiloco.codec import quantization
from p2pdiloco.codec.compression import Body
from p2pdiloco.protocol.ids import FragmentId, LearnerId, ShardId
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.training.shared_memory import SharedVectors, SpareVector

# -- Memory of updates and snapshots -----------------------------------------------------------------------------------
# Memory of shifts and snapshots, given back to the system when it is not used.
# Rules of this section:
# 1. Parts in use keep their memory. Of the others, the most recently used keep it, ``KEPT`` parameters in all, because
#    fresh memory costs more than the arithmetic in it. A part that was not used between two calls of
#    ``release_unused`` is given back too.
# 2. Threads that work on different shards share this object, under its lock.
# 3. Nothing is given back while a learner may have page-locked the memory: its device would keep using the old pages.


Place = Literal["shift", "queued", "snapshot"]
# In parameters: 64 MB, whatever the model. With 32 times as much, an outer step alone takes 1.6 instead of 2.1 ns per
# parameter, but an exchange is no faster (benchmarks/notes.md).
KEPT = 16 << 20


class VectorMemory:
    """The memory of shifts and snapshots, by shard."""

    def __init__(self, layout: Layout, vectors: SharedVectors) -> None:
        self._shards = layout.shards
        self._vectors = vectors
        # The queue's vector, private to this process.
        self.spare = SpareVector(layout.elements)
        # True if the learner's device has page-locked the shared vectors, or may have.
        self.is_pinned = False
        self._lock = threading.RLock()
        self._used: set[tuple[Place, ShardId]] = set()
        # Unused parts that still have memory, most recently used last. True: used since the last ``release_unused``.
        self._kept: dict[tuple[Place, ShardId], bool] = {}
        self._kept_elements = 0

    def acquire(self, place: Place, shard: ShardId) -> None:
        """Mark a shard's memory as used."""
        with self._lock:
            self._used.add((place, shard))
            if self._kept.pop((place, shard), None) is not None:
                self._kept_elements -= self._shards[shard].elements

    def release(self, place: Place, shard: ShardId, *, is_kept: bool = True) -> None:
        """Mark a shard's memory as unused. ``is_kept``: keep it for a while, because it may be needed soon."""
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

    def release_all(self) -> None:
        """Mark all memory as unused."""
        for place, shard in list(self._used):
            self.release(place, shard)

    def release_unused(self) -> None:
        """Give back the memory that was not used since the last call."""
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
    buffer: Tensor | None
    """The shift buffer or the queue; None without a learner."""
    is_added: bool
    """True: add to the buffer's content. False: replace it."""
    is_reset: bool
    """True: the buffer takes the new parameters, not the changes."""
    snapshot: Tensor | None
    """The snapshot buffer, if the shard's part of it must be kept up to date."""
    settled: Sequence[Sequence[Body]]
    restored: Sequence[Sequence[Body]]
    """Bodies of own contributions, by chunk; so is ``settled``."""

    def take(self, chunk: int, span: slice, theta: Tensor, change: Tensor) -> None:
        """Record one chunk's new parameters ``theta`` and their ``change``, both float32 [n]. Overwrites ``change``."""
        if self.buffer is None:
            return
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
    """Pending updates of one peer's learner, over all parameters in the layout's flat order."""

    def __init__(self, layout: Layout, vectors: SharedVectors) -> None:
        self._layout = layout
        self.shift = vectors.shift
        self.snapshot = vectors.snapshot
        self._vectors = vectors
        self.memory = VectorMemory(layout, vectors)
        # Shifts that wait until the learner has added the previous one. Few ever wait; elsewhere the content is
        # undefined.
        self.queued = self.memory.spare.values
        # Shards that a new learner has not been given yet.
        self._unloaded: deque[ShardId] = deque()
        # Shards of the present piece that the learner has not taken yet.
        self._piece: set[ShardId] = set()
        # Shards whose snapshots the learner is writing.
        self._asked: set[ShardId] = set()
        self.learner: LearnerId | None = None
        self._in_flight = [ShiftKind.NONE] * len(layout.shards)
        self._in_queue = [ShiftKind.NONE] * len(layout.shards)
        # True if the shard's part of the snapshot buffer holds the learner's parameters, up to date.
        self._has_snapshot = [False] * len(layout.shards)

    def _range(self, vector: Tensor, shard: ShardId) -> Tensor:
        piece = self._layout.shards[shard]
        return vector[piece.start : piece.stop]

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
        """Copy the next piece of the global parameters into the shift buffer; return the shards of the piece."""
        elements = 0
        while self._unloaded and elements < PIECE:
            shard = self._unloaded.popleft()
            self.memory.acquire("shift", shard)
            self._range(self.shift, shard).copy_(self._range(self._vectors.theta, shard))
            self._in_flight[shard] = ShiftKind.REPLACE
            self._piece.add(shard)
            elements += self._layout.shards[shard].elements
        return tuple(sorted(self._piece))

    def unload(self) -> None:
        """Forget the learner, because it is gone.

        The next learner may page-lock the memory before it reports so, hence ``is_pinned``.
        """
        self.learner = None
        self.memory.is_pinned = True

    # -- shifts --------------------------------------------------------------------------------------------------------

    def begin_shift(self, shard: ShardId, moves: Moves, bodies: Callable[[Payload], Sequence[Body]]) -> Handover:
        """Begin a shift: into the shift buffer if the learner has taken the previous one, else into the queue.

        ``bodies`` decompresses a payload.
        """
        if self.learner is None or shard in self._unloaded:
            return Handover(Shifts((), ()), None, False, False, None, (), ())
        kind = ShiftKind.REPLACE if moves.is_reset else ShiftKind.ADD
        if moves.is_reset:
            self._has_snapshot[shard] = False  # the learner loses the steps that the snapshot holds
        shifts, buffer, is_added = Shifts((), ()), self.queued, False
        if self._in_flight[shard] is ShiftKind.NONE:
            assert self._in_queue[shard] is ShiftKind.NONE, "a shift waits in the queue but none is in flight"
            self._in_flight[shard] = kind
            shifts = Shifts((), (shard,)) if moves.is_reset else Shifts((shard,), ())
            buffer = self.shift
            self.memory.acquire("shift", shard)
        else:
            self.memory.acquire("queued", shard)
            is_first = self._in_queue[shard] is ShiftKind.NONE
            is_added = not is_first and not moves.is_reset
            if is_first or moves.is_reset:
                self._in_queue[shard] = kind
        is_mine = moves.learner == self.learner and not moves.is_reset
        return Handover(
            shifts,
            buffer,
            is_added,
            moves.is_reset,
            self.snapshot if self._has_snapshot[shard] else None,
            [bodies(payload) for payload in moves.settled] if is_mine else (),
            [bodies(payload) for payload in moves.restored] if is_mine else (),
        )

    def next_shifts(self, shards: Sequence[ShardId]) -> Shifts:
        """Move queued shifts of ``shards`` to the shift buffer where the learner has taken the previous one; return
        them."""
        ready: dict[ShiftKind, list[ShardId]] = {ShiftKind.ADD: [], ShiftKind.REPLACE: []}
        for shard in shards:
            kind = self._in_queue[shard]
            if kind is not ShiftKind.NONE and self._in_flight[shard] is ShiftKind.NONE:
                self.memory.acquire("shift", shard)
                self._range(self.shift, shard).copy_(self._range(self.queued, shard))
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
        taken = self._piece.intersection(shards)
        self._piece -= taken
        for shard in shards:
            if self._in_flight[shard] is ShiftKind.NONE:
                self.memory.release("shift", shard, is_kept=shard not in taken)
        if self._piece or not self._unloaded:
            return shifts
        return Shifts(shifts.added, shifts.replaced + self._next_piece(), not self._unloaded)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def has_snapshot(self, shard: ShardId) -> bool:
        """Return whether the shard has a snapshot to encode."""
        return self._has_snapshot[shard]

    def begin_snapshot(self, fragment: FragmentId) -> None:
        """Reserve the fragment's part of the snapshot buffer for the learner to write."""
        for shard in self._layout.fragments[fragment]:
            self._has_snapshot[shard] = False
            self._asked.add(shard)
            self.memory.acquire("snapshot", shard)

    def complete_snapshot(self, fragment: FragmentId) -> None:
        """Update the fragment's snapshot with the shifts that the learner had not added when it wrote it."""
        for shard in self._layout.fragments[fragment]:
            self._asked.discard(shard)
            waiting = ((self._in_flight[shard], self.shift), (self._in_queue[shard], self.queued))
            self._has_snapshot[shard] = all(kind is not ShiftKind.REPLACE for kind, _ in waiting)
            for kind, buffer in waiting:
                if kind is ShiftKind.ADD:
                    self._range(self.snapshot, shard).add_(self._range(buffer, shard))

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
