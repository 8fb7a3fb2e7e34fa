"""A state that is not what its head stands for: this machine's memory has altered it. It is fetched anew, at its head.

Whoever finds out says ``Failed("state")``. Until another has given the shard's state, nothing is merged or given here.
"""

from __future__ import annotations

from p2pdiloco.protocol.adoption import Adoption
from p2pdiloco.protocol.core import Core
from p2pdiloco.protocol.identifiers import ShardId
from p2pdiloco.protocol.merges import Merges

TRIES = 8
"""Askings, a heartbeat apart and more, after which nobody has the head of a spoilt shard: the peer goes on with it."""


class Repair:
    """Of all shards."""

    def __init__(self, core: Core, adoption: Adoption, merges: Merges) -> None:
        self.core = core
        self.adoption = adoption
        self.merges = merges
        self.tries: dict[ShardId, int] = {}
        """Since the shard was last sound."""

    def begin(self, shard: ShardId, reason: str) -> None:
        """Ask somebody for the state, if anybody may have it; contributions that are here wait."""
        adoption = self.adoption
        self.core.note("warning", "repair", f"shard {shard}: {reason}")
        self.merges.jobs.pop(shard, None)
        self.merges.close(shard)
        tries = self.tries[shard] = self.tries.get(shard, 0) + 1
        donors = [p for p in self.core.membership.live if adoption.is_donor(p)] if tries <= TRIES else []
        is_busy = shard in adoption.asked or shard in adoption.applying
        if donors or is_busy:
            adoption.repairing.add(shard)
        if donors and not is_busy:
            adoption.fetch(shard, donors[self.core.membership.sequence % len(donors)])
        elif not donors:
            adoption.repairing.discard(shard)
            self.merges.reopen(shard)

    def go_on(self) -> None:
        """Ask again for what has not come: who was asked did not have it, or is gone."""
        self.tries = {shard: tries for shard, tries in self.tries.items() if shard in self.adoption.repairing}
        for shard in sorted(self.adoption.repairing):
            if shard not in self.adoption.asked and shard not in self.adoption.applying:
                self.begin(shard, "its state has not come yet")
