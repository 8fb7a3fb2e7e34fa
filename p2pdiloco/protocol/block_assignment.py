"""The blocks of data that this peer's learner is given, has trained, and has not seen merged.

Rules of this file:
1. The learner always has a block in hand and one in reserve: it never waits for the next.
2. What it has trained travels with its contribution to shard 0, by the range of tokens: whatever happens to that
   contribution (refused, taken over, undone by a fork), its blocks share its fate.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import shake_128
from struct import unpack

from p2pdiloco.protocol.data_blocks import SLOTS, Block, Duty
from p2pdiloco.protocol.effects import Train
from p2pdiloco.protocol.ids import PeerId, RunId, ShardId
from p2pdiloco.protocol.messages import MAX_CLAIMS
from p2pdiloco.protocol.state import Core

IN_HAND = 2
REMEMBERED = 4096
"""Blocks trained in this life of the learner, kept for forks and for its next contributions."""
RECENT = 16
"""Of those, the last ones stay claimed: others may not have the commit yet that merges them."""


@lru_cache(maxsize=1024)
def _draws(run: RunId, epoch: int, peer: PeerId) -> tuple[int, ...]:
    """What a peer draws for each slot of an epoch, and one more for its place: 16 bits each. The highest draw is the
    slot's first, the next its second: rendezvous hashing with equal weights, a hash for all slots at once."""
    drawn = shake_128(f"{run}/{epoch}/{peer}".encode()).digest(2 * SLOTS + 2)
    return unpack(f">{SLOTS + 1}H", drawn)


@lru_cache(maxsize=256)
def duties(run: RunId, epoch: int, peers: tuple[PeerId, ...]) -> dict[PeerId, Duty]:
    """Return the duty of each peer in ``epoch``; ``peers`` sorted."""
    draws = {peer: _draws(run, epoch, peer) for peer in peers}
    own: dict[PeerId, list[int]] = {peer: [] for peer in peers}
    helped: dict[PeerId, list[int]] = {peer: [] for peer in peers}
    for slot in range(SLOTS):
        ranked = sorted(peers, key=lambda peer: draws[peer][slot], reverse=True)
        own[ranked[0]].append(slot)
        if len(ranked) > 1:
            helped[ranked[1]].append(slot)
    return {peer: Duty(own[peer], helped[peer], draws[peer][SLOTS] / 2**16) for peer in peers}


class BlockAssignment:
    """Assigns blocks of data to this peer's learner."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.is_taking = False
        """The learner has the run's data, and trains."""
        self.assigned: list[Block] = []
        self.trained: list[tuple[int, Block]] = []
        """With the learner's tokens at the block's end; oldest first."""

    def start(self, *, has_blocks: bool) -> None:
        """Assign blocks to a new learner; ``has_blocks``: it has the run's data."""
        self.reset()
        self.is_taking = has_blocks and self.core.config.blocks > 0
        self.assign()

    def stop(self) -> None:
        """The learner trains no more; what it holds but has not finished is free."""
        self.is_taking = False
        self.assigned.clear()

    def reset(self) -> None:
        """The learner is gone."""
        self.stop()
        self.trained.clear()

    def on_block_finished(self, block: Block, tokens: int) -> None:
        """The learner has trained ``block``; it had ``tokens`` tokens then."""
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
        membership = core.membership
        taken = {block for peer in membership.live for block in membership.claims_of(peer)}
        taken.update(self.claims())
        while len(self.assigned) < IN_HAND:
            block = ledger.next_free(taken, self._duty)
            if block is None:
                return
            taken.add(block)
            self.assigned.append(block)
            core.effects.append(Train(block))

    def _duty(self, epoch: int) -> Duty:
        """This peer's slots among those of all whose learners train."""
        core = self.core
        peers = tuple(sorted({core.config.peer, *core.membership.participating}))
        return duties(core.config.run, epoch, peers)[core.config.peer]

    def claims(self) -> tuple[Block, ...]:
        """Return the blocks that others should not train: those in hand, and those trained that the chain does not have
        yet."""
        ledger = self.core.chains[0].ledger
        if ledger is None:
            return ()
        recent = max(0, len(self.trained) - RECENT)
        waiting = [block for _, block in self.trained[:recent] if not ledger.is_trained(block)]
        return (*self.assigned, *waiting, *(block for _, block in self.trained[recent:]))[:MAX_CLAIMS]

    def blocks_between(self, shard: ShardId, start: int, stop: int) -> tuple[Block, ...]:
        """The blocks that a contribution to ``shard`` of the learner's tokens from ``start`` to ``stop`` carries."""
        if shard != 0:
            return ()
        return tuple(sorted(block for tokens, block in self.trained if start < tokens <= stop))[:MAX_CLAIMS]
