"""Assigns blocks of data to this peer's learner and tracks those that it has trained but the chain has not merged.

Rules of this file:
1. The learner always has one block in work and one in reserve, so that it never waits for the next.
2. Trained blocks travel with the contribution to shard 0 that covers their range of tokens. They share its fate if it
   is refused, taken over, or undone by a fork.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import shake_128
from struct import unpack

from p2pdiloco.protocol.data_blocks import SLOTS, Block, EpochSlots
from p2pdiloco.protocol.effects import Train
from p2pdiloco.protocol.ids import PeerId, RunId, ShardId
from p2pdiloco.protocol.messages import MAX_CLAIMS
from p2pdiloco.protocol.state import Core

IN_HAND = 2
REMEMBERED = 4096
"""Number of blocks trained by the current learner that are kept for forks and for its next contributions."""
RECENT = 16
"""The last of those stay claimed: other peers may not have the commit yet that merges them."""


@lru_cache(maxsize=1024)
def _draws(run: RunId, epoch: int, peer: PeerId) -> tuple[int, ...]:
    """Return a peer's 16-bit draw for each slot of an epoch, and one more for its starting position.

    The peer with the highest draw owns the slot, the next one helps. This is rendezvous hashing with equal weights; one
    hash yields the draws of all slots.
    """
    drawn = shake_128(f"{run}/{epoch}/{peer}".encode()).digest(2 * SLOTS + 2)
    return unpack(f">{SLOTS + 1}H", drawn)


@lru_cache(maxsize=256)
def epoch_slots(run: RunId, epoch: int, peers: tuple[PeerId, ...]) -> dict[PeerId, EpochSlots]:
    """Return the slots of each peer in ``epoch``. ``peers`` must be sorted."""
    draws = {peer: _draws(run, epoch, peer) for peer in peers}
    own: dict[PeerId, list[int]] = {peer: [] for peer in peers}
    helped: dict[PeerId, list[int]] = {peer: [] for peer in peers}
    for slot in range(SLOTS):
        ranked = sorted(peers, key=lambda peer: draws[peer][slot], reverse=True)
        own[ranked[0]].append(slot)
        if len(ranked) > 1:
            helped[ranked[1]].append(slot)
    return {peer: EpochSlots(own[peer], helped[peer], draws[peer][SLOTS] / 2**16) for peer in peers}


class BlockAssignment:
    """Assigns blocks of data to this peer's learner."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.is_taking = False
        """Whether the learner trains on the run's data now."""
        self.has_blocks = False
        """Whether the learner has the run's data."""
        self.assigned: list[Block] = []
        self.trained: list[tuple[int, Block]] = []
        """Trained blocks and the learner's token count at the end of each, oldest first."""

    def start(self, *, has_blocks: bool) -> None:
        """Assign blocks to a new learner. ``has_blocks`` says whether the learner has the run's data."""
        self.reset()
        self.is_taking = self.has_blocks = has_blocks and self.core.config.blocks > 0
        self.assign()

    def stop(self) -> None:
        """Stop assigning blocks: the learner no longer trains. Its unfinished blocks become free."""
        self.is_taking = False
        self.assigned.clear()

    def go_on(self) -> None:
        """Assign blocks again: the learner trains on, since the run was prolonged."""
        self.is_taking = self.has_blocks
        self.assign()

    def reset(self) -> None:
        """Forget all blocks: the learner is gone."""
        self.stop()
        self.trained.clear()

    def on_block_finished(self, block: Block, tokens: int) -> None:
        """Record that the learner has trained ``block`` and has now trained ``tokens`` tokens in total."""
        if block in self.assigned:
            self.assigned.remove(block)
            self.trained.append((tokens, block))
            del self.trained[:-REMEMBERED]
        self.assign()

    def assign(self) -> None:
        """Give the learner free blocks until it has enough."""
        core = self.core
        if not self.is_taking or not core.is_current or len(self.assigned) >= IN_HAND:
            return
        ledger = core.chains[0].ledger
        assert ledger is not None
        taken = {block for peer in core.participation.peers(ShardId(0)) for block in core.membership.claims_of(peer)}
        taken.update(self.claims())
        group, groups = core.participation.group(ShardId(0), core.config.peer), 1 << core.chains[0].group_bits
        while len(self.assigned) < IN_HAND:
            block = ledger.next_free(taken, self._epoch_slots, group, groups)
            if block is None:
                return
            taken.add(block)
            self.assigned.append(block)
            core.effects.append(Train(block))

    def _epoch_slots(self, epoch: int) -> EpochSlots:
        """Return this peer's slots among the peers of its group whose learners train."""
        core, shard = self.core, ShardId(0)
        members = core.participation.members(shard, core.participation.group(shard, core.config.peer))
        peers = tuple(sorted(members | {core.config.peer}))
        return epoch_slots(core.config.run, epoch, peers)[core.config.peer]

    def claims(self) -> tuple[Block, ...]:
        """Return the blocks that other peers should not train.

        These are the assigned blocks and the trained blocks that the chain has not merged yet.
        """
        ledger = self.core.chains[0].ledger
        if ledger is None:
            return ()
        recent = max(0, len(self.trained) - RECENT)
        waiting = [block for _, block in self.trained[:recent] if not ledger.is_trained(block)]
        return (*self.assigned, *waiting, *(block for _, block in self.trained[recent:]))[:MAX_CLAIMS]

    def blocks_between(self, shard: ShardId, start: int, stop: int) -> tuple[Block, ...]:
        """Return the blocks that a contribution to ``shard`` carries for the learner's tokens ``start`` to ``stop``."""
        if shard != 0:
            return ()
        return tuple(sorted(block for tokens, block in self.trained if start < tokens <= stop))[:MAX_CLAIMS]
