"""Updates that the learner has not received yet: its parameters move by *shifts*, which it adds at a step boundary.

Rules of this file:
1. The learner's parameters are never read or written here. A shift is (new global - old global), plus own contributions
   that were merged, minus those that a fork took back. So the learner keeps every step it made meanwhile (``carry``).
2. A shard has one shift in flight at a time; what comes before the learner has added it waits in a queue, added up.
3. A snapshot is brought up to date with all shifts that the learner had not added when it was taken. An outer gradient
   is therefore always relative to the head it claims.
4. What is written is in use until the learner has taken it, or it is encoded (``VectorMemory``).
5. A new learner is given the global parameters piece by piece, each when it has taken the one before. What changes
   meanwhile reaches it with its piece, or as a shift if it has that already.
6. All of it runs on the threads of ``model_state``, in the order that its rule 1 says: ``begin_shift``,
   ``has_snapshot`` and ``release_snapshot`` are for one shard, all else for none.
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
# The memory of shifts and snapshots: for what is in flight, and for a little more.
# Rules of this file:
# 1. What is in use keeps its memory. Of what is not, the parts that were used last keep theirs, ``KEPT`` parameters in
#    all: fresh memory costs more than the arithmetic in it. What nobody has used from one ``rest`` to the next goes,
#    too.
# 2. Threads that work on different shards share it.
# 3. Nothing is given back under a learner that has page-locked it: its device would go on with the old pages.


Place = Literal["shift", "queued", "snapshot"]
KEPT = 16 << 20
"""Parameters: 64 MB, whatever the model. 32 times as much makes an outer step alone a quarter faster, and an exchange
no faster (benchmarks/notes.md)."""


class VectorMemory:
    """Memory of shifts and snapshots, by shard."""

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

    def acquire(self, place: Place, shard: ShardId) -> None:
        """Mark a shard's memory as used."""
        with self._lock:
            self._used.add((place, shard))
            if self._kept.pop((place, shard), None) is not None:
                self._kept_elements -= self._shards[shard].elements

    def release(self, place: Place, shard: ShardId, *, is_kept: bool = True) -> None:
        """Mark a shard's memory as unused, if it is used. ``is_kept``: it may be wanted soon."""
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


# -- Updates for the learner -------------------------------------------------------------------------------------------
# What the learner is still to be told: its parameters move by *shifts*, which it adds at a step boundary.


Payload = bytes | memoryview
"""Of a contribution or a commit, compressed; not to be changed."""
PIECE = 16 << 20
"""Parameters, at least, that a new learner is given at a time: 64 MB of shared memory, whatever the model."""


class Shifts(NamedTuple):
    """Shards whose part of the shift buffer the learner is to take now."""

    added: tuple[ShardId, ...]
    """parameters += shift"""
    replaced: tuple[ShardId, ...]
    """parameters = shift"""
    is_last_piece: bool = False
    """With these a new learner has been given everything."""


class ShiftKind(Enum):
    """How the learner applies a shift."""

    NONE = 0
    ADD = 1
    REPLACE = 2


class Moves(NamedTuple):
    """What an own learner's delta gains and loses with a new head (payloads of its own contributions)."""

    learner: LearnerId | None
    settled: Sequence[Payload]
    restored: Sequence[Payload]
    is_reset: bool


class Handover(NamedTuple):
    """Where changes of one shard's parameters go, besides into them."""

    shifts: Shifts
    """What to tell the learner of."""
    buffer: Tensor | None
    """The shift buffer, or the queue; None without a learner."""
    is_added: bool
    """To what the buffer holds; else it takes its place."""
    is_reset: bool
    """It takes new parameters, not changes."""
    snapshot: Tensor | None
    """The snapshot buffer, if the shard's part of it is to be kept up to date."""
    settled: Sequence[Sequence[Body]]
    restored: Sequence[Sequence[Body]]
    """Own contributions, by chunks."""

    def take(self, chunk: int, span: slice, theta: Tensor, change: Tensor) -> None:
        """One chunk's new parameters, and what they changed by; ``change`` loses its content."""
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
    """What one peer's learner is still to be told, over all parameters in the layout's flat order."""

    def __init__(self, layout: Layout, vectors: SharedVectors) -> None:
        self._layout = layout
        self.shift = vectors.shift
        self.snapshot = vectors.snapshot
        self._vectors = vectors
        self.memory = VectorMemory(layout, vectors)
        self.queued = self.memory.spare.values
        """Shifts that wait until the learner has added the last one; any content where none waits. Few ever wait."""
        self._unloaded: deque[ShardId] = deque()
        """What a new learner has not been given yet."""
        self._piece: set[ShardId] = set()
        """What it is to take before it is given more."""
        self._asked: set[ShardId] = set()
        """The learner is writing their snapshots."""
        self.learner: LearnerId | None = None
        self._in_flight = [ShiftKind.NONE] * len(layout.shards)
        self._in_queue = [ShiftKind.NONE] * len(layout.shards)
        self._has_snapshot = [False] * len(layout.shards)
        """The shard's part of the snapshot buffer holds what the learner has trained, brought up to date."""

    def _range(self, vector: Tensor, shard: ShardId) -> Tensor:
        piece = self._layout.shards[shard]
        return vector[piece.start : piece.stop]

    @property
    def is_empty(self) -> bool:
        """The learner has added all that there was."""
        kinds = (*self._in_flight, *self._in_queue)
        return not self._unloaded and all(kind is ShiftKind.NONE for kind in kinds)

    # -- a learner's life ----------------------------------------------------------------------------------------------

    def load(self, learner: LearnerId) -> Shifts:
        """Begin to give a new learner the global parameters; what to tell it of. It must acknowledge with ``shifted``,
        which has the next piece."""
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
        """Put more of the global parameters where a new learner takes them from."""
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
        """The learner is gone. The next one may have page-locked the memory before it says so."""
        self.learner = None
        self.memory.is_pinned = True

    # -- shifts --------------------------------------------------------------------------------------------------------

    def begin_shift(self, shard: ShardId, moves: Moves, bodies: Callable[[Payload], Sequence[Body]]) -> Handover:
        """Begin to move the learner: its buffer if it has taken the last shift, else the queue. ``bodies`` opens a
        payload."""
        if self.learner is None or shard in self._unloaded:
            return Handover(Shifts((), ()), None, False, False, None, (), ())
        kind = ShiftKind.REPLACE if moves.is_reset else ShiftKind.ADD
        if moves.is_reset:
            self._has_snapshot[shard] = False  # what was copied there, the learner has lost
        shifts, buffer, is_added = Shifts((), ()), self.queued, False
        if self._in_flight[shard] is ShiftKind.NONE:
            assert self._in_queue[shard] is ShiftKind.NONE, "what waits, waits for something"
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
        """Hand queued shifts of ``shards`` over where the learner has taken the last; returns what to tell it of."""
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
        """The learner has taken these shifts; returns the next ones to tell it of."""
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
        """Whether there is one to encode."""
        return self._has_snapshot[shard]

    def begin_snapshot(self, fragment: FragmentId) -> None:
        """Leave the fragment's part of the snapshot buffer to the learner from now on."""
        for shard in self._layout.fragments[fragment]:
            self._has_snapshot[shard] = False
            self._asked.add(shard)
            self.memory.acquire("snapshot", shard)

    def complete_snapshot(self, fragment: FragmentId) -> None:
        """The learner has written the fragment: add the shifts that it had not added by then."""
        for shard in self._layout.fragments[fragment]:
            self._asked.discard(shard)
            waiting = ((self._in_flight[shard], self.shift), (self._in_queue[shard], self.queued))
            self._has_snapshot[shard] = all(kind is not ShiftKind.REPLACE for kind, _ in waiting)
            for kind, buffer in waiting:
                if kind is ShiftKind.ADD:
                    self._range(self.snapshot, shard).add_(self._range(buffer, shard))

    def release_snapshot(self, shard: ShardId) -> None:
        """The next contribution has a snapshot of its own: no need to keep this one up."""
        self._has_snapshot[shard] = False

    def end_snapshot(self, fragment: FragmentId) -> None:
        """All that is given from the fragment's snapshot is encoded; the learner is not writing another one."""
        for shard in self._layout.fragments[fragment]:
            if shard not in self._asked:
                self._has_snapshot[shard] = False
                self.memory.release("snapshot", shard)
