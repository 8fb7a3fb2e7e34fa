"""Heads that other peers have reported: who stands by a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import NamedTuple

from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.messages import Head
from p2pdiloco.protocol.state import Core
from p2pdiloco.protocol.support import Support


class ReportedHead(NamedTuple):
    """The head of one shard that a peer reported last."""

    head: Digest
    earlier: Digest
    """The head that it reported before."""
    at: float
    tokens: int
    moved_at: float
    """When it reported this head first."""


class HeadReports:
    """The newest reports of all connected peers."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._heads: dict[PeerId, dict[ShardId, ReportedHead]] = {}

    def record(self, peer: PeerId, head: Head, parent: Digest | None = None) -> None:
        """Record the head that ``peer`` reports. ``parent``: it made this commit, and so was at ``parent`` before."""
        mine, now = self._heads.setdefault(peer, {}), self.core.now
        before = mine.get(head.shard)
        if before is None or parent is not None:
            mine[head.shard] = ReportedHead(head.id, parent or head.id, now, head.tokens, now)
        elif before.head == head.id:
            mine[head.shard] = before._replace(at=now, tokens=head.tokens)
        else:
            mine[head.shard] = ReportedHead(head.id, before.head, now, head.tokens, now)

    def forget(self, peer: PeerId) -> None:
        """Forget what a peer that is gone has reported."""
        self._heads.pop(peer, None)

    def of(self, peer: PeerId, shard: ShardId) -> ReportedHead | None:
        """Return what ``peer`` has reported of ``shard``."""
        return self._heads.get(peer, {}).get(shard)

    def stands_by(self, peer: PeerId, shard: ShardId, heads: Container[Digest], rivals: Container[Digest] = ()) -> bool:
        """Return whether the last head that ``peer`` reported is in ``heads``, or the one before, unless the last is in
        ``rivals``: the last may be a version that follows and that is not known here."""
        told = self.of(peer, shard)
        return told is not None and (told.head in heads or (told.earlier in heads and told.head not in rivals))

    def support(
        self,
        shard: ShardId,
        heads: Container[Digest],
        donors: Sequence[PeerId] | None = None,
        rivals: Container[Digest] = (),
    ) -> Support:
        """Return how many of ``donors`` (None: all) stand by one of ``heads``."""
        counted = self.core.participation.donors(shard) if donors is None else donors
        return Support(sum(self.stands_by(donor, shard, heads, rivals) for donor in counted), len(counted))

    def most_elsewhere(self, shard: ShardId, heads: Container[Digest], donors: Sequence[PeerId]) -> int:
        """Return how many of ``donors`` have lately reported the most common head that is not in ``heads``."""
        told = (self.of(donor, shard) for donor in donors)
        others = (head for one in told if one is not None for head in {one.head, one.earlier} if head not in heads)
        return max(Counter(others).values(), default=0)

    def off_chain(self, shard: ShardId, *, are_heavier: bool) -> list[ReportedHead]:
        """Return the donors' heads that are not on this peer's chain, and heavier or lighter than its head."""
        chain = self.core.chains[shard]
        assert chain.head is not None
        own, tokens = chain.heads(), chain.head.tokens
        told = ((peer, heads.get(shard)) for peer, heads in self._heads.items())
        there = {peer: one for peer, one in told if one is not None and one.head not in own}
        donors = self.core.participation.donors(shard) if there else ()
        found = [there[donor] for donor in donors if donor in there]
        return [one for one in found if (one.tokens > tokens if are_heavier else one.tokens < tokens)]

    def is_known(self, shard: ShardId) -> bool:
        """Return whether most donors have reported their head of ``shard``."""
        donors = self.core.participation.donors(shard)
        return Support(sum(self.of(donor, shard) is not None for donor in donors), len(donors)).is_most

    def is_fresh(self, shard: ShardId, donors: Sequence[PeerId], offering: PeerId) -> bool:
        """Return whether most ``donors`` have reported lately, the one that is ``offering`` a state included."""
        oldest, told = self.core.now - self.core.config.request_s, (self.of(donor, shard) for donor in donors)
        fresh = sum(
            donor == offering or (one is not None and one.at >= oldest) for donor, one in zip(donors, told, strict=True)
        )
        return Support(fresh, len(donors)).is_most

    def is_newest(self, shard: ShardId) -> bool:
        """Return whether most donors report no heavier head of ``shard`` than this peer's."""
        head, donors = self.core.head(shard), self.core.participation.donors(shard)
        told = (self.of(donor, shard) for donor in donors)
        lighter = [one for one in told if one is not None and (one.tokens, one.head) <= (head.tokens, head.id)]
        return Support(len(lighter), len(donors)).is_most

    def is_back(self, peer: PeerId, shard: ShardId) -> bool:
        """Return whether ``peer`` reports a head that is not abandoned, as far as is known here."""
        told = self.of(peer, shard)
        return told is not None and told.head not in self.core.abandoned

    def has_left(self, peer: PeerId) -> bool:
        """Return whether ``peer`` reports a head that is lighter than this peer's and not on its chain."""
        for shard, told in self._heads.get(peer, {}).items():
            chain = self.core.chains[shard]
            if chain.head is not None and told.tokens < chain.head.tokens and told.head not in chain.ancestry:
                return True
        return False
