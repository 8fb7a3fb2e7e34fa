"""The owner's side of a round: collect contributions, close by quorum and grace window, merge, commit.

Rules of this file:
1. A contribution is accepted only for the current head of its shard, once per learner and version, and only with tokens
   that the chain has not merged. Its sender is the learner's own peer.
2. A stale contribution is refused, and the newest head is attached. A contribution to a later head waits until this
   peer has caught up.
3. There is no election. Any peer that holds contributions may merge them once its rank's turn has come.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from p2pdiloco.protocol.chain import HeadChange
from p2pdiloco.protocol.counted_tokens import usual_prints
from p2pdiloco.protocol.events import Merged
from p2pdiloco.protocol.gathering import SMOOTHING, Collection, Gatherer
from p2pdiloco.protocol.group_merges import GroupMerges, group_name, merged_parts
from p2pdiloco.protocol.groups import group_of, most_members
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.messages import MAX_PARTS, CommitHeader, Contribution, Head
from p2pdiloco.protocol.own_commits import OwnCommitLog
from p2pdiloco.protocol.response_times import ResponseTimes
from p2pdiloco.protocol.state import Core
from p2pdiloco.protocol.support import Support
from p2pdiloco.protocol.suspicion import SmallCommits, is_crowd, took_part
from p2pdiloco.protocol.waiting import LONGEST_WAIT, CommitDue, CommitView, Times, Waits, due, waits

ARRIVAL_KEPT = 0.95
"""Share of the longest arrival of a commit that is left after the next one."""


def is_on_head(contribution: Contribution, head: Head) -> bool:
    """Return whether the outer gradient is relative to this head; if not, it is stale or ahead of this peer."""
    return contribution.base.id == head.id


def is_ahead(contribution: Contribution, head: Head) -> bool:
    """Return whether the contribution may be relative to a head that this peer has yet to reach."""
    return contribution.base.version > head.version or contribution.base.tokens > head.tokens


class Aggregation(Gatherer):
    """Collects what this peer merges as an owner: contributions, or the groups' merges where there are groups."""

    def __init__(self, core: Core) -> None:
        super().__init__(core, ResponseTimes(len(core.chains)))
        self.groups = GroupMerges(core, self, self.collect)
        self.early: list[dict[PeerId, Contribution]] = [{} for _ in core.chains]
        """By shard: contributions to versions that this peer has not reached, one per peer."""
        self.small_commits = SmallCommits()
        self.round_s = core.config.takeover_floor_s
        """Smoothed time from the announcement of a round to its last commit, in seconds."""
        self.arrival_s = 0.0
        """Longest of the latest times from the first news of a head to its commit, in seconds, decaying."""
        self.own_commits = OwnCommitLog(len(core.chains), core.config.log_length)

    # -- measured times ------------------------------------------------------------------------------------------------

    def record_round(self, seconds: float) -> None:
        """Add the duration of a round, from its announcement to its last commit, to the mean, unless this peer leaves:
        it has no time to wait for longer turns."""
        if self.core.departure != "leaving":
            seconds = min(seconds, self.core.config.takeover_ceiling_s)
            self.round_s += SMOOTHING * (seconds - self.round_s)

    def record_arrival(self, seconds: float) -> None:
        """Record that a commit came by itself so long after the first news of it."""
        self.arrival_s = max(seconds, ARRIVAL_KEPT * self.arrival_s)

    def waits(self) -> Waits:
        """Return how long to wait for what, as of now."""
        core, membership = self.core, self.core.membership
        times = Times(
            core.fastest_step_time_s(),
            membership.median_step_s(core.step_time_s()),
            membership.usual_round_trip_s,
            membership.slowest_round_trip_s,
            self.round_s,
            self.arrival_s,
        )
        return waits(core.config, times, is_any_leaving=core.participation.is_any_leaving())

    # -- who takes part ------------------------------------------------------------------------------------------------

    def participants(self, shard: ShardId) -> frozenset[PeerId]:
        """Return the participants, or names of the groups that have some: an owner is not connected to all of them."""
        participation, bits = self.core.participation, self.bits(shard)
        here = participation.participants(shard)
        if not bits:
            return here
        return frozenset(map(group_name, (*self._recent(shard), *(group_of(peer, bits) for peer in here))))

    def _recent(self, shard: ShardId) -> dict[int, set[int]]:
        """Return who of each group contributed lately and has not left, as fingerprints."""
        recent, left = self.core.chains[shard].recent_members(), self.core.membership.left
        return {group: rest for group, members in recent.items() if (rest := members.difference(left))}

    def peers_of(self, shard: ShardId, participants: frozenset[PeerId]) -> frozenset[PeerId]:
        """Return the peers that these are, or that are in these groups."""
        if not (bits := self.bits(shard)):
            return participants
        here = self.core.participation.participants(shard)
        return frozenset(peer for peer in here if group_name(group_of(peer, bits)) in participants)

    def ranked(self, shard: ShardId) -> tuple[PeerId, ...]:
        """Return the candidates for ownership."""
        return self.core.participation.ranked_owners(shard)

    def quorum(self, shard: ShardId, collection: Collection) -> int:
        """Return K, or the number of peers that can contribute if that is smaller.

        A single live learner can thus advance versions. At the end of a run, two learners that each have progress left
        for a different shard do not wait for each other.
        """
        participation = self.core.participation
        able = participation.participants(shard)
        here = set[PeerId]().union(*(one.givers for one in collection.given.values()))
        empty = (able if self.bits(shard) else collection.answered) - here  # a group does not say who has nothing
        gone = sum(map(participation.is_departing, able & empty))
        return max(1, min(self.core.config.min_quorum, len(able) - gone))

    def bits(self, shard: ShardId) -> int:
        """Return the base-2 logarithm of the number of groups that contribute to the shard's next version."""
        return self.core.chains[shard].group_bits

    def waits_for(self, shard: ShardId) -> Waits:
        """Return ``waits``; a group's merge comes after its contributions, and so later."""
        found = self.waits()
        later_s = min(2 * found.usual_s, LONGEST_WAIT * found.takeover_s)
        return found._replace(usual_s=later_s) if self.bits(shard) else found

    def waits_longer(self, shard: ShardId) -> bool:
        """Return whether a merge waits longer than the paper's grace window: always for other groups, as their merges
        come later than that of the own one."""
        return super().waits_longer(shard) or bool(self.bits(shard))

    def is_whole(self, contribution: Contribution) -> bool:
        """Return whether nearly all of a group that contributed lately and have not left are in its merges that are
        here."""
        if contribution.group is None:
            return True
        shard = contribution.shard
        given = (*self.collections[shard].given.values(), contribution)
        here = set(usual_prints(peer for one in given for peer in one.givers))
        group = self.core.participation.group(shard, contribution.giver)
        recent = self._recent(shard).get(group, set())
        return Support(len(here & recent), len(recent)).is_nearly_all

    def answers(self, shard: ShardId, missing: int = 0) -> Support:
        """Return how many participants have answered; ``missing`` more may be behind a cut."""
        if not self.bits(shard):
            return super().answers(shard, missing)
        here, usual = self.core.participation.participants(shard), self.core.chains[shard].counts.usual
        return Support(self.learners(self.collections[shard]), max(len(here) + missing, len(usual)))

    def may_merge(self, shard: ShardId) -> bool:
        """Return whether this peer commits on the shard's head now, apart from whose turn it is."""
        core, head = self.core, self.core.head(shard)
        if not super().may_merge(shard) or not core.membership.owners.may_own or self.own_commits.is_dropped(head):
            return False
        self.groups.merge_if_due(shard)
        if shard in self.groups.jobs:
            return False  # what it gives may be for this commit
        missing = len(core.membership.partition_detector.missing)
        if core.config.needs_majority and not self.answers(shard, missing).is_most:
            return False
        if core.now < (until := self.own_commits.not_before(shard)):
            core.alarms.set((self.alarm, shard), until)
            return False
        return True

    # -- commits of other owners ---------------------------------------------------------------------------------------

    def due(self, header: CommitHeader) -> CommitDue:
        """Return when to apply another owner's commit on the head, as far as is known here (own clock).

        An owner of rank 0 that waits for nearly all, and leaves more out than others do, is suspected. A peer that
        leaves has no time to suspect anybody, and takes what the others have.
        """
        core, collection, participation = self.core, self.collections[header.shard], self.core.participation
        if core.departure == "leaving":
            return CommitDue(core.now)
        rank, wait = participation.rank(header.owner, header.shard), self.waits()
        support = self.support(took_part(header), participation.entitled(header.shard), wait)
        is_small = not support.is_nearly_all and wait.nearly_all_s > 0.0
        is_unfair = is_small and not rank and self.small_commits.is_unfair(header.owner)
        return due(
            CommitView(
                now=core.now,
                began_at=collection.began_at,
                opened_at=collection.opened_at,
                rank=rank,
                took_part=support,
                is_suspect=is_unfair or is_crowd(core, header),
                waits=wait,
            )
        )

    def use_turn(self, shard: ShardId, *, is_unusual: bool) -> None:
        """Record whether the next commit uses up the time after which commits of few are applied."""
        self.collections[shard].is_unusual = is_unusual

    # -- after a start -------------------------------------------------------------------------------------------------

    def confirm_head(self, shard: ShardId) -> None:
        """Allow merges again: no peer has a later head, or this peer has caught up."""
        if self.own_commits.confirm_head(shard):
            self.merge_if_due(shard)

    # -- collect -------------------------------------------------------------------------------------------------------

    def collect(self, sender: PeerId, contribution: Contribution) -> None:
        """Accept, postpone or refuse a contribution."""
        shard, head = contribution.shard, self.core.head(contribution.shard)
        giver = contribution.giver
        if giver != sender and not self._is_passed_on(sender, contribution):
            self.refuse(sender, contribution, "its learner is another peer's")
            return
        if is_on_head(contribution, head):
            reason = self._problem(contribution)
            if reason is not None:
                self.refuse(sender, contribution, reason)
            elif contribution.group is not None:
                self._take_group(sender, contribution)
            else:
                (self.groups if self.bits(shard) else self).accept(giver, contribution)
        elif is_ahead(contribution, head):
            if self.wants(sender, contribution):
                self.early[shard][self._source(sender, contribution)] = contribution
            else:
                self.refuse(sender, contribution, "too many contributions already wait for later heads")
        else:
            if contribution.group is None:
                self.response_times.record_late(giver, shard, contribution.base.id, self.core.now)
            self.refuse(sender, contribution, "stale")

    def wants(self, sender: PeerId, contribution: Contribution) -> bool:
        """Return whether the payload may be downloaded. Of those for later heads, each peer may have one, and more as
        far as they fit into its share of ``early_bytes``."""
        head = self.core.chains[contribution.shard].head
        is_too_large = len(contribution.contributors) > most_members(self.core.config.together)
        is_foreign = contribution.giver != sender and not self._is_passed_on(sender, contribution)
        if is_too_large or is_foreign:
            return False
        if head is None or is_on_head(contribution, head) or not is_ahead(contribution, head):
            return True
        source = self._source(sender, contribution)
        others = (early.get(source) for shard, early in enumerate(self.early) if shard != contribution.shard)
        waiting = contribution.payload_bytes + sum(other.payload_bytes for other in others if other is not None)
        share = self.core.config.early_bytes // max(1, len(self.core.membership.peers))
        return waiting <= max(contribution.payload_bytes, share)

    def _problem(self, contribution: Contribution) -> str | None:
        c = contribution.contributor
        if c.tokens < 0 or c.steps < 0 or (c.tokens > 0) != (c.steps > 0):
            return "its range of tokens or steps is invalid"
        if c.tokens and not contribution.payload:
            return "it has no payload"
        chain, group, me = self.core.chains[contribution.shard], contribution.group, self.core.config.peer
        if group is None:
            is_here = group_of(contribution.giver, chain.group_bits) == group_of(me, chain.group_bits)
            return chain.range_problem(c) if is_here else "its peer is of another group"
        if self.core.membership.owners.is_excluded(group.collector):
            return "its collector has lied"
        if len(self.collections[chain.shard].given) == MAX_PARTS:
            return "it is one too many"
        problem = chain.contributors_problem(group.contributors, group.factors)
        return problem or chain.part_problem(group.collector, group.contributors)

    def _is_passed_on(self, sender: PeerId, contribution: Contribution) -> bool:
        """Return whether a peer of this one's group passes on another group's merge."""
        participation, shard = self.core.participation, contribution.shard
        is_other = contribution.group is not None and not participation.is_near(shard, contribution.giver)
        return is_other and participation.is_near(shard, sender)

    def _source(self, sender: PeerId, contribution: Contribution) -> PeerId:
        """Return from whom a contribution comes: its peer, or the group whose merge another peer passes on."""
        return sender if contribution.giver == sender else self._group_name(contribution)

    def _group_name(self, contribution: Contribution) -> PeerId:
        return group_name(group_of(contribution.giver, self.bits(contribution.shard)))

    def _take_group(self, sender: PeerId, contribution: Contribution) -> None:
        """Collect another group's merge, and pass it on to the peer of this group that owns before this one."""
        participation, shard = self.core.participation, contribution.shard
        first = participation.receivers(shard)[0]
        if not participation.is_near(shard, sender) and first != self.core.config.peer:
            self.core.send((first,), contribution)
        self._accept_group(contribution)

    def _accept_group(self, contribution: Contribution) -> None:
        """Collect a group's merge, unless others that have contributors in common with it hold as many."""
        collection, givers = self.collections[contribution.shard], contribution.givers
        rivals = [learner for learner, other in collection.given.items() if not givers.isdisjoint(other.givers)]
        held = sum(len(collection.given[rival].contributors) for rival in rivals)
        if held >= len(givers) or collection.is_closed:
            return
        for rival in rivals:
            del collection.given[rival]
        self.accept(self._group_name(contribution), contribution)

    # -- commit --------------------------------------------------------------------------------------------------------

    def commit(self, event: Merged) -> CommitHeader | None:
        """Return the commit for a finished merge, or None if the shard has moved on meanwhile."""
        core, chain, head = self.core, self.core.chains[event.shard], self.core.head(event.shard)
        job = self.finish(event.shard, event.base)
        if job is None:
            return None
        header = CommitHeader(
            shard=event.shard,
            version=head.version + 1,
            parent=head.id,
            step=min(self.collections[event.shard].step, chain.latest_step()),
            owner=core.config.peer,
            **merged_parts(job.contributions, event.factors),
            tokens=0,
            payload=event.payload,
            result=event.result,
            record=Digest(""),
            length=event.length,
        )
        tokens, counts = chain.count(header.contributors, header.counted_factors)
        header = replace(
            header,
            tokens=head.tokens + tokens,
            record=chain.record_after(header.version, header.contributors, event.length),
            counts=counts,
            longest=chain.stated_longest(header.contributors),
        )
        return self.own_commits.record(header)

    def on_commit_failed(self, header: CommitHeader) -> None:
        """Schedule another attempt for an own commit that cannot be applied here now."""
        if self.own_commits.is_own(header):
            at, is_alone = self.core.now + self.waits().takeover_s, not self.core.participation.peers(header.shard)
            self.own_commits.retry(header, at, is_alone=is_alone)

    def on_repaired(self, shard: ShardId) -> None:
        """Allow own commits again: the shard's state has been repaired."""
        self.own_commits.stop_retrying(shard)
        self.reopen(shard)

    def open(self, shard: ShardId, step: int) -> None:
        """Record that a round opened, here and for this peer's group."""
        super().open(shard, step)
        if self.bits(shard):
            self.groups.open(shard, step)

    def close(self, shard: ShardId) -> None:
        """Close the collection, and that of this peer's group."""
        super().close(shard)
        self.groups.close(shard)

    def drop_job(self, shard: ShardId) -> None:
        """Close both collections, and do without the merges that run."""
        super().drop_job(shard)
        self.groups.drop_job(shard)

    def reopen(self, shard: ShardId) -> None:
        """Open both collections again."""
        self.groups.reopen(shard)
        super().reopen(shard)

    def on_head_changed(self, change: HeadChange) -> None:
        """Start to collect for the shard's next version, beginning with contributions that arrived early."""
        core, shard = self.core, change.shard
        core.alarms.cancel((self.alarm, shard))
        self.groups.begin(shard)
        opened_at = self.collections[shard].opened_at
        if change.previous is not None and opened_at is not None:
            self.response_times.end_round(shard, change.previous.id, opened_at)
        last = self.collections[shard]
        began_at = min(core.now, last.began_at + self.waits().few_s) if last.is_unusual else core.now
        self.collections[shard] = Collection(began_at)
        if isinstance(change.taken, CommitHeader):
            header, here = change.taken, took_part(change.taken)
            support = self.support(here, core.participation.entitled(shard), self.waits())
            met_at = core.membership.met.get(header.owner, -math.inf)
            if last.began_at > met_at and not last.is_catching_up:
                self.small_commits.record(header.owner, is_small=not support.is_nearly_all)
            if support.is_most or not (self.small_commits.is_unfair(header.owner) or is_crowd(core, header)):
                core.membership.owners.forgive(header.owner)
        early, self.early[shard] = self.early[shard], {}
        for source in sorted(early):
            self.collect(early[source].giver, early[source])

    def forget(self, peer: PeerId) -> None:
        """Drop early contributions of a peer that has left, and wait no longer for it in its group's merges. The peer
        sends them again if it comes back."""
        self.response_times.forget(peer)
        for early in self.early:
            early.pop(peer, None)
        for collection in self.collections:
            merges = [one for one in collection.given.values() if one.group is not None]
            collection.answered.update(map(self._group_name, filter(self.is_whole, merges)))

    def payloads(self, shard: ShardId) -> set[Digest]:
        """Return the payloads that may still be merged here."""
        held = super().payloads(shard) | self.groups.payloads(shard) | self.own_commits.payloads(shard)
        return held | {c.payload for c in self.early[shard].values()}
