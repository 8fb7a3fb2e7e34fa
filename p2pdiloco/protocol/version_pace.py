"""Pace of each shard's versions: how many a fork can have made since it left the chain here."""

from __future__ import annotations

from p2pdiloco.protocol.chain import Chain, HeadChange
from p2pdiloco.protocol.events import ShardState
from p2pdiloco.protocol.ids import Digest, ShardId
from p2pdiloco.protocol.state import Core

FORK_PACE = 1.25
"""Versions of a fork that are believed for each round since it left the chain here. Others may be faster than the
learners that this peer knows."""
PACE_VERSIONS = 8
"""Versions that came here from which a pace is measured."""
LATE_ROUNDS = 3
"""Rounds without a commit before a peer takes a state that follows its head, or the lighter chain of most peers."""


class VersionPace:
    """When this peer came to its latest heads."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._had_at: dict[ShardId, dict[Digest, float]] = {}

    def round_s(self, shard: ShardId) -> float:
        """Return the usual time between two versions of a shard, in seconds.

        It is the mean of those that came here, or, while they are few, the time in which learners make ``sync_every``
        steps. No single peer's claim shortens it.
        """
        core, own_s = self.core, self.core.step_time_s()
        median_s = core.membership.median_step_s(own_s)
        trained_s = core.config.sync_every * (min(own_s, median_s) if own_s else median_s)
        times = tuple(self._had_at.get(shard, {}).values())
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > PACE_VERSIONS else trained_s

    def is_plausible(self, chain: Chain, parted: int, version: int) -> bool:
        """Return whether a chain that left this one ``parted`` versions ago may have come to ``version`` by now.

        If it follows the head here (0), the commits themselves should come, unless nothing has come for long.
        """
        assert chain.head is not None
        common = (*chain.ancestry, chain.head.id)[-1 - parted]
        since_s = self.core.now - self._had_at.get(chain.shard, {}).get(common, self.core.now)
        round_s, versions = self.round_s(chain.shard), version - chain.head.version + parted
        return versions * round_s <= FORK_PACE * since_s and (parted > 0 or since_s >= LATE_ROUNDS * round_s)

    def on_head_changed(self, change: HeadChange) -> None:
        """Record when this peer came to its head. Each version before a fetched state took one round."""
        chain, now, times = self.core.chains[change.shard], self.core.now, self._had_at.setdefault(change.shard, {})
        if isinstance(change.taken, ShardState):
            round_s, lineage = self.round_s(change.shard), tuple(chain.ancestry)
            known = {head: now - round_s * (len(lineage) - at) for at, head in enumerate(lineage)}
            times = self._had_at[change.shard] = known | {head: times[head] for head in lineage if head in times}
        times[change.head.id] = now
        while len(times) > chain.length + 1:
            del times[next(iter(times))]
