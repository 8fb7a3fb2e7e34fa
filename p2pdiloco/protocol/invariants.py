"""What must hold in one machine after every event, whatever other peers do. Invariants of the whole swarm are the
simulator's (``simulation.checkers``)."""

from __future__ import annotations

from p2pdiloco.protocol.adoption import Adoption
from p2pdiloco.protocol.contributions import Contributions
from p2pdiloco.protocol.core import Core
from p2pdiloco.protocol.merges import Merges


def check_chains(core: Core) -> None:
    """Heads, their mark, logs. Raises AssertionError."""
    assert not core.is_current or all(c.head is not None for c in core.chains)
    mark = 0
    for chain in core.chains:
        if chain.head is None:
            continue
        mark ^= int(chain.head.id[:15], 16)
        assert len(chain.log) == len(chain.log_ids) <= core.config.log_length
        if chain.log:
            assert chain.log_ids[-1] == chain.head.id
            assert chain.log[-1].tokens == chain.head.tokens
    assert mark == core.heads_mark
    if core.learner is not None:
        assert all(0 <= core.learner.unmerged(c.shard) <= core.learner.tokens for c in core.chains)


def check_work(core: Core, merges: Merges, contributions: Contributions, adoption: Adoption) -> None:
    """Turns, what is on offer, what waits. Raises AssertionError."""
    for shard, pending in contributions.pending.items():
        assert pending.contribution.base.id == core.head(shard).id, "a pending contribution's base is the head"
    for turn in contributions.turns:
        for shard, (base, _) in turn.open.items():
            assert base == core.head(shard).id, "a turn is over when the head moves"
    for waiting in adoption.orphans.waiting.values():
        assert len(waiting) <= core.config.log_length
    for early in merges.early:
        assert len(early) <= len(core.membership.peers) + 1
