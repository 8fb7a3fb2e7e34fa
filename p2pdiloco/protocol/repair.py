"""A state that is not what its head stands for: this machine's memory has altered it. It is fetched anew, at its head.

Whoever finds out says ``Failed("state")``. Until another has given the shard's state, nothing is merged or given here.
"""

from __future__ import annotations

from p2pdiloco.protocol.adopting import Adopting
from p2pdiloco.protocol.core import Core
from p2pdiloco.protocol.identifiers import ShardId
from p2pdiloco.protocol.merging import Merging

TRIES = 8
"""Askings, a heartbeat apart and more, after which nobody has the head of a spoilt shard: the peer goes on with it."""


class Repair:
    """Of all shards."""

    def __init__(self, core: Core, adopting: Adopting, merging: Merging) -> None:
        self.core = core
        self.adopting = adopting
        self.merging = merging
        self.tries: dict[ShardId, int] = {}
        """Since the shard was last sound."""

    def begin(self, shard: ShardId, reason: str) -> None:
        """Ask somebody for the state, if anybody may have it; contributions that are here wait."""
        adopting = self.adopting
        self.core.note("warning", "repair", f"shard {shard}: {reason}")
        self.merging.jobs.pop(shard, None)
        self.merging.close(shard)
        tries = self.tries[shard] = self.tries.get(shard, 0) + 1
        donors = [p for p in self.core.membership.live if adopting.is_donor(p)] if tries <= TRIES else []
        is_busy = shard in adopting.asked or shard in adopting.applying
        if donors or is_busy:
            adopting.repairing.add(shard)
        if donors and not is_busy:
            adopting.fetch(shard, donors[self.core.membership.sequence % len(donors)])
        elif not donors:
            adopting.repairing.discard(shard)
            self.merging.reopen(shard)

    def go_on(self) -> None:
        """Ask again for what has not come: who was asked did not have it, or is gone."""
        self.tries = {shard: tries for shard, tries in self.tries.items() if shard in self.adopting.repairing}
        for shard in sorted(self.adopting.repairing):
            if shard not in self.adopting.asked and shard not in self.adopting.applying:
                self.begin(shard, "its state has not come yet")
