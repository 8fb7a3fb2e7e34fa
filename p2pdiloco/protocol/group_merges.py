"""Merges of groups: a collector merges its group's contributions and sends the result to the owner (``groups``).

Rules of this file:
1. A collector of rank r sends its merge to the owner of rank r, and after each further takeover time to the next one:
   if the first owner fails, the next one gets the merges of all groups.
2. What comes after the merge is merged with the rest, for all owners that have the first merge: once all have answered,
   or after a takeover time.
3. A group's merge that comes too late is lost. Its contributions are not: their learners contribute again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from p2pdiloco.protocol.effects import Merge
from p2pdiloco.protocol.events import GroupMerged
from p2pdiloco.protocol.gathering import Collection, Gatherer
from p2pdiloco.protocol.ids import Digest, LearnerId, PeerId, ShardId
from p2pdiloco.protocol.messages import Contribution, Part, part_as_one
from p2pdiloco.protocol.state import Core
from p2pdiloco.protocol.waiting import Waits


def group_name(group: int) -> PeerId:
    """Return the name that stands for a group where an owner waits for answers."""
    return PeerId(f"group {group}")


def merged_parts(contributions: Sequence[Contribution], factors: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields of a commit that say what was merged: its contributors, factors and parts."""
    groups = [contribution.group for contribution in contributions if contribution.group is not None]
    if not groups:
        return {"contributors": tuple(c.contributor for c in contributions), "factors": factors}
    listed = sorted((c for group in groups for c in group.contributors), key=lambda c: c.learner)
    places, own = {c.learner: place for place, c in enumerate(listed)}, [100] * len(listed)
    parts = []
    for group, factor in zip(groups, factors or (100,) * len(groups), strict=True):
        members = tuple(places[c.learner] for c in group.contributors)
        for place, its in zip(members, group.factors, strict=False):
            own[place] = its
        parts.append(Part(group.collector, group.payload, group.signature, members, factor))
    return {
        "contributors": tuple(listed),
        "factors": tuple(own) if any(group.factors for group in groups) else (),
        "parts": tuple(parts),
    }


class Offer:
    """A group's merge that this peer has made, and the owners that it was sent to."""

    __slots__ = ("asked", "at", "contribution", "laps")

    def __init__(self, contribution: Contribution, asked: list[PeerId], laps: int, at: float) -> None:
        self.contribution = contribution
        self.asked = asked
        self.laps = laps
        """Passes over all owners, the current one included; in the n-th, each has n takeover times."""
        self.at = at
        """Time at which the last of them was asked."""

    @property
    def learners(self) -> set[LearnerId]:
        """Learners whose outer gradients this group's merge holds."""
        return {c.learner for c in self.contribution.contributors}


class GroupMerges(Gatherer):
    """Collects the contributions of this peer's group, and offers their merges to owners."""

    alarm = "group"

    def __init__(self, core: Core, owner: Gatherer, collect: Callable[[PeerId, Contribution], None]) -> None:
        """``owner`` collects what this peer merges as an owner, and is given merges through ``collect``."""
        super().__init__(core, owner.response_times)
        self._owner = owner
        self._collect = collect
        self._offers: dict[ShardId, Offer] = {}
        """Merges for the next versions that this peer has made."""

    def _group(self, shard: ShardId) -> int:
        return self.core.participation.group(shard, self.core.config.peer)

    def participants(self, shard: ShardId) -> frozenset[PeerId]:
        """Return the participants of this peer's group."""
        return self.core.participation.members(shard, self._group(shard))

    def ranked(self, shard: ShardId) -> tuple[PeerId, ...]:
        """Return the collectors of this peer's group."""
        return self.core.participation.collectors(shard, self._group(shard))

    def rank(self, shard: ShardId) -> int:
        """Return this peer's place among them; or among the owners, if that is better: its own commit is the next."""
        return min(super().rank(shard), self._owner.rank(shard))

    def quorum(self, shard: ShardId, collection: Collection) -> int:
        """Return 1: the commit has a quorum."""
        return 1

    def waits(self) -> Waits:
        """Return how long to wait for what, as of now."""
        return self._owner.waits()

    def start(self, shard: ShardId, contributions: tuple[Contribution, ...]) -> Merge:
        """Return the group's merge. The commit has a limit, and each of its groups counts for no more than others."""
        return Merge(shard, self.core.head(shard), contributions, math.inf, is_group=True)

    def merge_if_due(self, shard: ShardId) -> None:
        """Start a merge if it is due, or offer the last one to the next owner."""
        core, collection, offer = self.core, self.collections[shard], self._offers.get(shard)
        if offer is not None and not collection.is_closed:
            is_due = core.now >= (due_at := self._due_at(offer))
            is_same = collection.given.keys() == offer.learners
            if not is_due and (is_same or not self.participants(shard) <= collection.answered):
                core.alarms.set((self.alarm, shard), due_at)
                return
            if is_same:
                self._offer(shard, offer, self._next_owner(shard, offer))
                return
        super().merge_if_due(shard)
        if shard in self.jobs:
            collection.is_closed = False

    def on_merged(self, event: GroupMerged) -> None:
        """Offer a group's merge to the owner."""
        shard, collection = event.shard, self.collections[event.shard]
        if self.finish(shard, event.base) is None or collection.is_closed:
            return
        one, head, last = part_as_one(event.group), self.core.head(shard), self._offers.get(shard)
        contribution = Contribution(shard, head, collection.step, one, event.payload_bytes, event.group)
        asked, laps, at = ([], 1, -math.inf) if last is None else (last.asked, last.laps, last.at)
        self._offers[shard] = offer = Offer(contribution, asked, laps, at)
        is_due = self.core.now >= self._due_at(offer)
        self._offer(shard, offer, *offer.asked, *([self._next_owner(shard, offer)] if is_due else []))
        self._owner.merge_if_due(shard)

    def on_merge_failed(self, shard: ShardId, culprit: PeerId | None, reason: str) -> None:
        """Drop the contribution that made a merge fail, then check again, for the owner, too."""
        super().on_merge_failed(shard, culprit, reason)
        self._owner.merge_if_due(shard)

    def on_candidates_changed(self) -> None:
        """Offer merges to the next owner whose last one is gone."""
        for shard, offer in list(self._offers.items()):
            if offer.asked[-1] not in self.core.participation.ranked_owners(shard):
                self._offer(shard, offer, self._next_owner(shard, offer))

    def _due_at(self, offer: Offer) -> float:
        """Return when the turn of the owner that was asked last is over."""
        return offer.at + offer.laps * self.waits().takeover_s

    def _next_owner(self, shard: ShardId, offer: Offer) -> PeerId:
        owners, rank = self.core.participation.ranked_owners(shard), self.rank(shard)
        order = owners[rank:] + owners[:rank]
        if set(order) <= set(offer.asked):
            offer.asked, offer.laps = [], offer.laps + 1
        return next(owner for owner in order if owner not in offer.asked)

    def _offer(self, shard: ShardId, offer: Offer, *owners: PeerId) -> None:
        core, me = self.core, self.core.config.peer
        if owners[-1] not in offer.asked:
            offer.asked, offer.at = [*offer.asked, owners[-1]], core.now
        core.alarms.set((self.alarm, shard), self._due_at(offer))
        core.send(tuple(owner for owner in dict.fromkeys(owners) if owner != me), offer.contribution)
        if me in owners:
            self._collect(me, offer.contribution)

    def begin(self, shard: ShardId) -> None:
        """Start to collect for the shard's next version."""
        self.core.alarms.cancel((self.alarm, shard))
        self._offers.pop(shard, None)
        self.collections[shard] = Collection(self.core.now)

    def payloads(self, shard: ShardId) -> set[Digest]:
        """Return the payloads that may still be merged here, and that of the merge on offer."""
        offered = {self._offers[shard].contribution.payload} if shard in self._offers else set[Digest]()
        return super().payloads(shard) | offered
