"""Blocks of the run's data that have been trained, and the choice of a learner's next block. There is no coordinator.

Each epoch's samples lie in a random order (``training.corpus``), cut into equal, numbered blocks. Block n of the run is
block n % blocks of epoch n // blocks.

Rules of this file:
1. A block has been trained once the commit of shard 0 that merges its last token is on the chain. So peers with the
   same head agree, and blocks that a dead learner had not contributed are free again.
2. Peers take free blocks and announce them in heartbeats. A faster peer takes more. Two peers that take the same block
   within a heartbeat both train it. That costs a repeated block, nothing else, and is counted.
3. The blocks of an epoch are divided among the groups (``groups``), and those of a group into slots, by number.
   Rendezvous hashing gives each slot an owner, which takes its blocks in ascending order, and a helper. That one takes
   blocks in descending order once it has no others, so it meets the owner only at the very end. Each peer begins at its
   own place, so that peers that do not know each other yet rarely take the same block.
4. Two epochs are open at a time: the next one begins while the last blocks of the current one are still in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, NamedTuple, NewType

import msgspec
from msgspec import Meta

Block = NewType("Block", int)
"""Number of a block, counted over all epochs."""

MAX_BLOCKS = 1 << 16
"""Maximum number of blocks in an epoch."""
OPEN_EPOCHS = 2
SLOTS = 64
"""Number of slots in an epoch; block ``index`` lies in slot ``index % SLOTS``."""
Row = Annotated[bytes, Meta(max_length=MAX_BLOCKS // 8)]


_DIGITS = bytes.maketrans(b"\x00\x01", b"01")
_BITS = bytes.maketrans(b"01", b"\x00\x01")


class EpochSlots(NamedTuple):
    """A peer's slots in one epoch."""

    own: Sequence[int]
    """Slots that the peer owns."""
    helped: Sequence[int]
    """Slots in which the peer helps."""
    place: float
    """Fraction of the epoch at which the peer begins, in [0, 1)."""


class Trained(msgspec.Struct, frozen=True, array_like=True):
    """A block ledger in the form that travels with a shard's state."""

    epoch: Annotated[int, Meta(ge=0, le=2**40)] = 0
    """The oldest open epoch: all blocks before it have been trained."""
    rows: tuple[Row, ...] = ()
    """One row for each open epoch, one bit for each block."""
    trained: Annotated[int, Meta(ge=0, le=2**56)] = 0
    """Number of different blocks trained, over all epochs."""
    repeated: Annotated[int, Meta(ge=0, le=2**56)] = 0
    """Number of times that a block was trained again."""


class BlockLedger:
    """The blocks that one chain has trained, in epochs of ``blocks`` blocks."""

    __slots__ = ("blocks", "epoch", "repeated", "rows", "trained")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.restore(Trained())

    def restore(self, state: Trained) -> None:
        """Replace the contents by ``state``. Missing rows are empty; bits beyond the epoch are dropped."""
        self.epoch, self.trained, self.repeated = state.epoch, state.trained, state.repeated
        self.rows = [self._unpack(row) for row in state.rows[:OPEN_EPOCHS]]
        self.rows += [bytearray(self.blocks) for _ in range(OPEN_EPOCHS - len(self.rows))]
        self._close_epochs()

    def copied(self) -> BlockLedger:
        """Return an independent copy."""
        other = BlockLedger(self.blocks)
        other.epoch, other.trained, other.repeated = self.epoch, self.trained, self.repeated
        other.rows = [bytearray(row) for row in self.rows]
        return other

    def state(self) -> Trained:
        """Return the ledger in the form that travels with a state."""
        return Trained(self.epoch, tuple(map(self._pack, self.rows)), self.trained, self.repeated)

    def _unpack(self, row: bytes) -> bytearray:
        digits = f"{int.from_bytes(row, 'little'):0{self.blocks}b}"[::-1][: self.blocks]
        return bytearray(digits.encode().translate(_BITS))

    def _pack(self, row: bytearray) -> bytes:
        return int(row[::-1].translate(_DIGITS), 2).to_bytes(-(-self.blocks // 8), "little")

    def add(self, blocks: Iterable[Block]) -> None:
        """Add the blocks that a commit merges. Blocks of an epoch that has not begun are ignored."""
        for block in blocks:
            epoch, index = divmod(block, self.blocks)
            if epoch < self.epoch:
                self.repeated += 1
            elif epoch < self.epoch + OPEN_EPOCHS:
                row = self.rows[epoch - self.epoch]
                self.trained += not row[index]
                self.repeated += row[index]
                row[index] = 1
        self._close_epochs()

    def _close_epochs(self) -> None:
        while all(self.rows[0]):
            self.rows = [*self.rows[1:], bytearray(self.blocks)]
            self.epoch += 1

    def is_trained(self, block: Block) -> bool:
        """Return whether the chain has trained ``block``."""
        epoch, index = divmod(block, self.blocks)
        return epoch < self.epoch or (epoch < self.epoch + OPEN_EPOCHS and bool(self.rows[epoch - self.epoch][index]))

    def next_free(
        self, taken: Iterable[Block], epoch_slots: Callable[[int], EpochSlots], group: int = 0, groups: int = 1
    ) -> Block | None:
        """Return the next block for a peer, or None if all open blocks are taken.

        Args:
            taken: the blocks in work at any peer.
            epoch_slots: returns this peer's slots in an epoch, among the peers of its group.
            group: the peer's group of ``groups``. Each has an equal part of an epoch, since peers of two groups do not
                know what the others take.
        """
        occupied = [bytearray(row) for row in self.rows]
        for block in taken:
            epoch, index = divmod(block, self.blocks)
            if 0 <= epoch - self.epoch < OPEN_EPOCHS:
                occupied[epoch - self.epoch][index] = 1
        for number, whole in enumerate(occupied):
            row = whole[group::groups]
            if row.find(0) >= 0:
                own, helped, place = epoch_slots(self.epoch + number)
                first, begin = (self.epoch + number) * self.blocks + group, int(place * len(row))
                found = [at for slot in own if (at := _first(row, slot, begin)) >= 0]
                if found:
                    return Block(first + (min(found) + begin) % len(row) * groups)
                found = [at for slot in helped if (at := _last(row, slot, begin)) >= 0]
                if found:
                    return Block(first + (max(found) + begin) % len(row) * groups)
        for number, row in enumerate(occupied):
            if (at := row.rfind(0)) >= 0:
                return Block((self.epoch + number) * self.blocks + at)
        return None


def _first(row: bytearray, slot: int, begin: int) -> int:
    """Return the distance from ``begin`` to the slot's first free block, cyclically; -1 if the slot has none."""
    blocks, lane = len(row), row[slot::SLOTS]
    at = lane.find(0, max(0, -((slot - begin) // SLOTS)))
    at = lane.find(0) if at < 0 else at
    return -1 if at < 0 else (slot + SLOTS * at - begin) % blocks


def _last(row: bytearray, slot: int, begin: int) -> int:
    """Return the distance from ``begin`` to the slot's last free block, cyclically; -1 if the slot has none."""
    blocks, lane = len(row), row[slot::SLOTS]
    at = lane.rfind(0, 0, max(0, -((slot - begin) // SLOTS)))
    at = lane.rfind(0) if at < 0 else at
    return -1 if at < 0 else (slot + SLOTS * at - begin) % blocks
