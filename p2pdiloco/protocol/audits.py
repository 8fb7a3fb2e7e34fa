"""Audits: peers make other owners' merges again and compare the values, so that a lying owner is found (rules V5).

Rules of this file:
1. The header of a commit and the payloads of its contributions determine its values to the bit. So whoever has them can
   tell whether a merge is right, and believes nobody else.
2. Each peer that could audit a commit does so with a probability that makes ``AUDIT_SHARE`` audits in all. The driver
   draws: neither the owner nor another peer can foresee it.
3. An owner keeps the contributions of its newest merges for auditors. One that does not deliver them is not barred, as
   it may have restarted. But each of its next commits is audited until it delivers, and each for which it does not
   counts as a missed takeover time, except those that were made before the first such audit ended.
"""

from __future__ import annotations

from p2pdiloco.protocol.aggregation import Aggregation
from p2pdiloco.protocol.barred_owners import audited_payloads
from p2pdiloco.protocol.chain import HeadChange, SizeOf
from p2pdiloco.protocol.effects import Audit
from p2pdiloco.protocol.events import Audited
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.messages import CommitHeader
from p2pdiloco.protocol.state import Core

AUDIT_SHARE = 0.1
"""Expected number of audits of a commit, over all peers; docs/results.md says how soon that finds a lying owner. An
audit moves each contribution once and a version moves it twice (up, and down as part of the commits to all peers), so
audits cost 5 % of the traffic."""
LONG_AUDITS = 2.0
"""The same for an update that is longer than usual, and for a young chain's: there an owner could do most harm."""
LONG = 3
"""An update is longer than usual if its length is more than a third of the largest that is allowed."""
AUDITED_VERSIONS = 4
"""Number of versions of a shard's chain during which their owner keeps the contributions for auditors."""
MOST_AUDITED_BYTES = 4 << 30
"""Payloads of one commit that are fetched for an audit. A larger merge is not audited."""
MISSING_MOST = 1024
"""Owners whose missing deliveries are remembered; the latest stay."""


class Audits:
    """Decides which commits are audited, and which payloads this peer keeps for auditors of its own."""

    def __init__(self, core: Core, aggregation: Aggregation) -> None:
        self.core = core
        self._aggregation = aggregation
        self._missing: set[PeerId] = set()
        """Owners that did not deliver for the last audit."""
        self._excused: dict[PeerId, tuple[int, ...]] = {}
        """For each owner that once did not deliver, in this order, the versions of all shards at that time. It may have
        lost the contributions of these, but not of later ones. An owner is excused once, or it could lie each time."""

    def on_head_changed(self, change: HeadChange) -> None:
        """Have the commit audited if its owner can be asked."""
        core, header = self.core, change.taken
        peers = core.participation.peers(change.shard)
        if not isinstance(header, CommitHeader) or not core.is_current or core.departure:
            return
        chain, barred = core.chains[change.shard], core.membership.owners.barred
        is_far = chain.norm_bound.is_young or LONG * header.length > header.longest
        is_long = header.longest > 0.0 and is_far and not chain.is_few(header.contributors)
        for part, owner in enumerate((header.owner, *(part.collector for part in header.parts)), start=-1):
            if owner in peers and owner not in barred:
                # The live peers without the owner, and this one, are as many as the live peers.
                share = (LONG_AUDITS if is_long else AUDIT_SHARE) / len(peers)
                chance = 1.0 if owner in self._missing else min(1.0, share)
                patience_s = self._aggregation.waits().takeover_s
                core.effects.append(Audit(change.shard, change.head.id, chance, patience_s, part))

    def on_audited(self, event: Audited) -> None:
        """Have the next commits of an owner audited that did not deliver, and count those that it does not deliver."""
        core, owner, owners = self.core, event.owner, self.core.membership.owners
        if event.has_delivered:
            self._missing.discard(owner)
            owners.withholding.discard(owner)
            return
        if owner not in core.participation.peers(event.shard) or event.head_version > event.version + 1:
            return
        self._missing.add(owner)
        if owner not in self._excused:
            self._excused[owner] = tuple(0 if chain.head is None else chain.head.version for chain in core.chains)
        if len(self._excused) > MISSING_MOST:
            oldest = next(iter(self._excused))
            del self._excused[oldest]
            self._missing.discard(oldest)
            owners.withholding.discard(oldest)
        if event.version <= self._excused[owner][event.shard]:
            return
        if owner not in owners.withholding:
            core.note("warning", "audit", f"{owner} does not deliver what it merged, so it owns after all others")
        owners.withholding.add(owner)
        core.membership.on_takeover_missed(owner, core.now, self._aggregation.waits().takeover_s)

    def payloads(self, shard: ShardId, size_of: SizeOf, most_bytes: int) -> set[Digest]:
        """Return the payloads of the contributions to this peer's newest merges that fit into ``most_bytes`` together;
        always those of the newest."""
        found, total = set[Digest](), 0
        for header in reversed([*self.core.chains[shard].log][-AUDITED_VERSIONS:]):
            mine = [part for part, its in enumerate(header.parts) if its.collector == self.core.config.peer]
            if header.owner == self.core.config.peer:
                mine.append(-1)
            if not mine:
                continue
            needed = set[Digest]().union(*(audited_payloads(header, part) for part in mine))
            total += sum(map(size_of, needed))
            if found and total > most_bytes:
                break
            found |= needed
        return found
