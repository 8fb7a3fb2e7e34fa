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
from collections.abc import Set
from typing import NamedTuple

from p2pdiloco.protocol.chain import HeadChange
from p2pdiloco.protocol.effects import Merge
from p2pdiloco.protocol.events import Merged
from p2pdiloco.protocol.ids import Digest, LearnerId, PeerId, ShardId, peer_of
from p2pdiloco.protocol.messages import MAX_TEXT, CommitHeader, Contribution, Head, Refused
from p2pdiloco.protocol.own_commits import OwnCommitLog
from p2pdiloco.protocol.response_times import ResponseTimes
from p2pdiloco.protocol.state import Core
from p2pdiloco.protocol.support import ALL, Support
from p2pdiloco.protocol.suspicion import SmallCommits, is_crowd, took_part
from p2pdiloco.protocol.waiting import (
    CommitDue,
    CommitView,
    QuorumView,
    Times,
    Waits,
    decide,
    due,
    grace_window_s,
    waits,
)

SMOOTHING = 0.2
ARRIVAL_KEPT = 0.95
"""Share of the longest arrival of a commit that is left after the next one."""


def is_on_head(contribution: Contribution, head: Head) -> bool:
    """Return whether the outer gradient is relative to this head; if not, it is stale or ahead of this peer."""
    return contribution.base.id == head.id


def is_ahead(contribution: Contribution, head: Head) -> bool:
    """Return whether the contribution may be relative to a head that this peer has yet to reach."""
    return contribution.base.version > head.version or contribution.base.tokens > head.tokens


class Collection:
    """Contributions to the next version of one shard."""

    __slots__ = (
        "answered",
        "began_at",
        "given",
        "held_until",
        "is_catching_up",
        "is_closed",
        "is_unusual",
        "opened_at",
        "quorum_at",
        "step",
    )

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        """When the head came that these contributions are relative to, or earlier (``Aggregation.on_head_changed``)."""
        self.given: dict[LearnerId, Contribution] = {}
        """Contributions with tokens."""
        self.answered: set[PeerId] = set()
        self.opened_at: float | None = None
        """When the round was announced here, or most had contributed (``Aggregation._accept``)."""
        self.held_until = math.inf
        """When the round opens without an announcement."""
        self.quorum_at: float | None = None
        self.is_catching_up = False
        """Whether the next commit was here before the head was: this peer cannot have taken part in it."""
        self.is_unusual = False
        """Whether a small commit was found due although its owner's turn had not come."""
        self.is_closed = False
        """A merge is running or another head is being applied: further contributions are too late."""
        self.step = 0


class Job(NamedTuple):
    """A running merge."""

    base: Digest
    contributions: tuple[Contribution, ...]
    """Sorted by learner."""
    began_at: float


class Aggregation:
    """Collects contributions for all shards and decides when to merge them."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.collections = [Collection(core.now) for _ in core.chains]
        self.early: list[dict[PeerId, Contribution]] = [{} for _ in core.chains]
        """By shard: contributions to versions that this peer has not reached, one per peer."""
        self.response_times = ResponseTimes(len(core.chains))
        self.small_commits = SmallCommits()
        self.round_s = core.config.takeover_floor_s
        """Smoothed time from the announcement of a round to its last commit, in seconds."""
        self.arrival_s = 0.0
        """Longest of the latest times from the first news of a head to its commit, in seconds, decaying."""
        self.sync_s = 0.0
        """Smoothed time from closing a collection to the commit, in seconds."""
        self.jobs: dict[ShardId, Job] = {}
        """Running merges. A shard has at most one, so that a result can be matched to its merge."""
        self.own_commits = OwnCommitLog(len(core.chains), core.config.log_length)

    # -- measured times ------------------------------------------------------------------------------------------------

    def record_round(self, seconds: float) -> None:
        """Add the duration of a round, from its announcement to its last commit, to the mean."""
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
        is_leaving = core.departure == "leaving"
        return waits(core.config, times, is_any_leaving=core.participation.is_any_leaving(), is_leaving=is_leaving)

    # -- commits of other owners ---------------------------------------------------------------------------------------

    def due(self, header: CommitHeader) -> CommitDue:
        """Return when to apply another owner's commit on the head, as far as is known here (own clock).

        An owner of rank 0 that waits for nearly all, and leaves more out than others do, is suspected.
        """
        core, collection, participation = self.core, self.collections[header.shard], self.core.participation
        rank, wait = participation.rank(header.owner, header.shard), self.waits()
        support = self._support(took_part(header), participation.entitled(header.shard), wait)
        is_small = not support.is_nearly_all and wait.nearly_all_s > 0.0
        is_unfair = is_small and not rank and self.small_commits.is_unfair(header.owner)
        return due(
            CommitView(
                now=core.now,
                began_at=collection.began_at,
                opened_at=collection.opened_at,
                rank=rank,
                took_part=ALL if core.departure == "leaving" else support,
                is_suspect=is_unfair or is_crowd(core, header),
                waits=wait,
            )
        )

    def _support(self, here: Set[PeerId], peers: Set[PeerId], wait: Waits) -> Support:
        """Return how many prompt ``peers`` there are, and how many of these are ``here``.

        A peer is prompt if it usually answers while an owner waits, is new, or is here. If fewer than most are, most
        count: an owner that the others pass over finds nobody prompt, and is not alone.
        """
        usual_s = self.response_times.usual_s(peers)
        prompt = {peer for peer, delay_s in usual_s.items() if delay_s <= wait.usual_s or peer in here}
        return Support(len(prompt & here), max(len(prompt), len(peers) and len(peers) // 2 + 1))

    def use_turn(self, shard: ShardId, *, is_unusual: bool) -> None:
        """Record whether the next commit uses up the time after which commits of few are applied."""
        self.collections[shard].is_unusual = is_unusual

    # -- after a start -------------------------------------------------------------------------------------------------

    def confirm_head(self, shard: ShardId) -> None:
        """Allow merges again: no peer has a later head, or this peer has caught up."""
        if self.own_commits.confirm_head(shard):
            self.merge_if_due(shard)

    # -- collect -------------------------------------------------------------------------------------------------------

    def open(self, shard: ShardId, step: int) -> None:
        """Record that a round opened: this peer's rank is timed from now on."""
        collection = self.collections[shard]
        collection.step = max(collection.step, step)
        if collection.opened_at is None:
            collection.opened_at = self.core.now
            if ("turn", shard) in self.core.alarms:
                self.core.alarms.set(("turn", shard), self.core.now)
            if collection.given:
                self.core.alarms.set(("close", shard), self.core.now)

    def collect(self, sender: PeerId, contribution: Contribution) -> None:
        """Accept, postpone or refuse a contribution."""
        shard, head = contribution.shard, self.core.head(contribution.shard)
        giver = peer_of(contribution.contributor.learner)
        if giver != sender:
            self._refuse(sender, contribution, "its learner is another peer's")
            return
        if is_on_head(contribution, head):
            reason = self._problem(contribution)
            if reason is None:
                self._accept(giver, contribution)
            else:
                self._refuse(sender, contribution, reason)
        elif is_ahead(contribution, head):
            if self.wants(sender, contribution):
                self.early[shard][sender] = contribution
            else:
                self._refuse(sender, contribution, "too many contributions already wait for later heads")
        else:
            self.response_times.record_late(giver, shard, contribution.base.id, self.core.now)
            self._refuse(sender, contribution, "stale")

    def wants(self, sender: PeerId, contribution: Contribution) -> bool:
        """Return whether the payload may be downloaded. Of those for later heads, each peer may have one, and more as
        far as they fit into its share of ``early_bytes``."""
        head = self.core.chains[contribution.shard].head
        if peer_of(contribution.contributor.learner) != sender:
            return False
        if head is None or is_on_head(contribution, head) or not is_ahead(contribution, head):
            return True
        others = (early.get(sender) for shard, early in enumerate(self.early) if shard != contribution.shard)
        waiting = contribution.payload_bytes + sum(other.payload_bytes for other in others if other is not None)
        share = self.core.config.early_bytes // max(1, len(self.core.membership.peers))
        return waiting <= max(contribution.payload_bytes, share)

    def _problem(self, contribution: Contribution) -> str | None:
        c = contribution.contributor
        if c.tokens < 0 or c.steps < 0 or (c.tokens > 0) != (c.steps > 0):
            return "its range of tokens or steps is invalid"
        if c.tokens and not contribution.payload:
            return "it has no payload"
        return self.core.chains[contribution.shard].range_problem(c)

    def _accept(self, giver: PeerId, contribution: Contribution) -> None:
        """Collect a contribution. Alone it opens no round, because the others may not have been told of one.

        Their owner would not wait for them, and merge alone what comes first.
        """
        collection, c = self.collections[contribution.shard], contribution.contributor
        if collection.opened_at is not None and giver != self.core.config.peer:
            self.response_times.record(giver, self.core.now - collection.opened_at)
        if collection.is_closed:
            return
        collection.answered.add(giver)
        collection.step = max(collection.step, self.core.plausible(contribution.step))
        if collection.opened_at is None:
            collection.held_until = min(collection.held_until, self.core.now + self.waits().takeover_s)
            if self._answers(contribution.shard).is_most:
                self.open(contribution.shard, collection.step)
        if c.tokens:
            for learner in [x for x in collection.given if peer_of(x) == giver and x != c.learner]:
                del collection.given[learner]
            collection.given.setdefault(c.learner, contribution)
        self.merge_if_due(contribution.shard)

    def _answers(self, shard: ShardId, missing: int = 0) -> Support:
        """Return how many participants have answered; ``missing`` more may be behind a cut."""
        able = len(self.core.participation.participants(shard))
        return Support(len(self.collections[shard].answered), able + missing)

    def _refuse(self, sender: PeerId, contribution: Contribution, reason: str) -> None:
        core, shard = self.core, contribution.shard
        head = core.head(shard)
        core.note("debug", "refusal", f"shard {shard} version {contribution.base.version} from {sender}: {reason}")
        if sender == core.config.peer:
            return
        core.send((sender,), Refused(shard, contribution.base.id, reason, head))

    # -- close ---------------------------------------------------------------------------------------------------------

    def merge_if_due(self, shard: ShardId) -> None:
        """Start a merge of the collected contributions if the quorum and grace window allow it."""
        collection, core = self.collections[shard], self.core
        if collection.is_closed or shard in self.jobs or not collection.given:
            return
        if collection.opened_at is None and core.now >= collection.held_until:
            self.open(shard, collection.step)
        if collection.opened_at is None:
            core.alarms.set(("close", shard), collection.held_until)
            return
        if core.head(shard).id in core.abandoned:
            return
        if not core.membership.owners.may_own or self.own_commits.is_dropped(core.head(shard)):
            return
        missing = len(core.membership.partition_detector.missing)
        if core.config.needs_majority and not self._answers(shard, missing).is_most:
            return
        if core.now < (until := self.own_commits.not_before(shard)):
            core.alarms.set(("close", shard), until)
            return
        head, quorum = core.head(shard), self.quorum(shard, collection)
        if collection.quorum_at is None and len(collection.given) >= quorum:
            collection.quorum_at = core.now
        decision = decide(self._view(shard, collection, quorum))
        if not decision.is_close:
            if decision.look_again_at is None:
                core.alarms.cancel(("close", shard))
            else:
                core.alarms.set(("close", shard), decision.look_again_at)
            return
        core.alarms.cancel(("close", shard))
        core.note("debug", "close", f"shard {shard} version {head.version + 1}: {decision.reason}")
        collection.is_closed = True
        self.response_times.record_missing(decision.late, self.waits().usual_s)
        contributions = tuple(collection.given[learner] for learner in sorted(collection.given))
        self.jobs[shard] = Job(head.id, contributions, core.now)
        longest = core.chains[shard].longest([c.contributor for c in contributions])
        core.effects.append(Merge(shard, head, contributions, longest))

    def merge_all_due(self) -> None:
        """Check every collection again after a change of membership."""
        for shard, collection in enumerate(self.collections):
            if collection.given:
                self.merge_if_due(ShardId(shard))

    def _view(self, shard: ShardId, collection: Collection, quorum: int) -> QuorumView:
        core, config, participation = self.core, self.core.config, self.core.participation
        assert collection.opened_at is not None
        ranked = participation.ranked_owners(shard)
        participants, wait = participation.participants(shard), self.waits()
        missing = participants - collection.answered
        quorum_s = 0.0 if collection.quorum_at is None else collection.quorum_at - collection.opened_at
        is_any_departing = any(map(participation.is_departing, missing - {config.peer}))
        return QuorumView(
            now=core.now,
            opened_at=collection.opened_at,
            quorum_at=collection.quorum_at,
            given=len(collection.given),
            answers=self._support(collection.answered, participants, wait),
            missing=self.response_times.usual_s(missing),
            min_quorum=quorum,
            rank=ranked.index(config.peer) if config.peer in ranked else len(ranked),
            grace_s=grace_window_s(
                grace_share=config.grace_share,
                overlap_steps=config.overlap,
                step_time_s=core.fastest_step_time_s(),
                quorum_s=quorum_s,
                sync_s=self.sync_s + core.membership.slowest_round_trip_s,
            ),
            waits=wait,
            is_extended=bool(config.grace_share),
            departing_s=min(config.leave_s, config.finish_s) / 2 if is_any_departing else None,
        )

    def quorum(self, shard: ShardId, collection: Collection) -> int:
        """Return K, or the number of peers that can contribute if that is smaller.

        A single live learner can thus advance versions. At the end of a run, two learners that each have progress left
        for a different shard do not wait for each other.
        """
        participation = self.core.participation
        able, empty = participation.participants(shard), collection.answered.difference(map(peer_of, collection.given))
        gone = sum(map(participation.is_departing, able & empty))
        return max(1, min(self.core.config.min_quorum, len(able) - gone))

    # -- commit --------------------------------------------------------------------------------------------------------

    def commit(self, event: Merged) -> CommitHeader | None:
        """Return the commit for a finished merge, or None if the shard has moved on meanwhile."""
        core, collection = self.core, self.collections[event.shard]
        head = core.head(event.shard)
        job = self.jobs.pop(event.shard, None)
        if job is None or not job.base == event.base == head.id:
            core.note("info", "commit", f"shard {event.shard}: merge for {event.base[:8]} dropped, the head moved on")
            self.merge_if_due(event.shard)
            return None
        self.sync_s += SMOOTHING * (core.now - job.began_at - self.sync_s)
        contributors = tuple(contribution.contributor for contribution in job.contributions)
        tokens, counts = core.chains[event.shard].count(contributors, event.factors)
        header = CommitHeader(
            shard=event.shard,
            version=head.version + 1,
            parent=head.id,
            step=min(collection.step, core.chains[event.shard].latest_step()),
            owner=core.config.peer,
            contributors=contributors,
            tokens=head.tokens + tokens,
            payload=event.payload,
            result=event.result,
            record=core.chains[event.shard].record_after(head.version + 1, contributors, event.length),
            length=event.length,
            counts=counts,
            factors=event.factors,
            longest=core.chains[event.shard].stated_longest(contributors),
        )
        return self.own_commits.record(header)

    def on_merge_failed(self, shard: ShardId, culprit: PeerId | None, reason: str) -> None:
        """Drop the contribution that made a merge fail (all of them if ``culprit`` is None), then check again."""
        collection = self.collections[shard]
        self.core.note("warning", "merge", f"shard {shard}: {reason}")
        job = self.jobs.pop(shard, None)
        if job is not None and job.base == self.core.head(shard).id:
            collection.is_closed = False
            for learner in [x for x in collection.given if culprit is None or peer_of(x) == culprit]:
                self._refuse(peer_of(learner), collection.given.pop(learner), reason[:MAX_TEXT])
            if len(collection.given) < self.quorum(shard, collection):
                collection.quorum_at = None
        self.merge_if_due(shard)

    def close(self, shard: ShardId) -> None:
        """Close the collection: the next head is being applied, so further contributions are too late."""
        self.collections[shard].is_closed = True
        self.core.alarms.cancel(("close", shard))

    def on_commit_failed(self, header: CommitHeader) -> None:
        """Schedule another attempt for an own commit that cannot be applied here now."""
        if self.own_commits.is_own(header):
            at, is_alone = self.core.now + self.waits().takeover_s, not self.core.participation.peers(header.shard)
            self.own_commits.retry(header, at, is_alone=is_alone)

    def on_repaired(self, shard: ShardId) -> None:
        """Allow own commits again: the shard's state has been repaired."""
        self.own_commits.stop_retrying(shard)
        self.reopen(shard)

    def reopen(self, shard: ShardId) -> None:
        """Open the collection again after a commit could not be applied; its contributions are kept."""
        self.collections[shard].is_closed = shard in self.jobs
        self.merge_if_due(shard)

    def on_head_changed(self, change: HeadChange) -> None:
        """Start to collect for the shard's next version, beginning with contributions that arrived early."""
        core, shard = self.core, change.shard
        core.alarms.cancel(("close", shard))
        opened_at = self.collections[shard].opened_at
        if change.previous is not None and opened_at is not None:
            self.response_times.end_round(shard, change.previous.id, opened_at)
        last = self.collections[shard]
        began_at = min(core.now, last.began_at + self.waits().few_s) if last.is_unusual else core.now
        self.collections[shard] = Collection(began_at)
        if isinstance(change.taken, CommitHeader):
            header, here = change.taken, took_part(change.taken)
            support = self._support(here, core.participation.entitled(shard), self.waits())
            met_at = core.membership.met.get(header.owner, -math.inf)
            if last.began_at > met_at and not last.is_catching_up:
                self.small_commits.record(header.owner, is_small=not support.is_nearly_all)
            if support.is_most or not (self.small_commits.is_unfair(header.owner) or is_crowd(core, header)):
                core.membership.owners.forgive(header.owner)
        early, self.early[shard] = self.early[shard], {}
        for sender in sorted(early):
            self.collect(sender, early[sender])

    def forget(self, peer: PeerId) -> None:
        """Drop early contributions of a peer that has left. The peer sends them again if it comes back."""
        self.response_times.forget(peer)
        for early in self.early:
            early.pop(peer, None)

    def payloads(self, shard: ShardId) -> set[Digest]:
        """Return the payloads that may still be merged here."""
        held = {c.payload for c in self.collections[shard].given.values()}
        if (job := self.jobs.get(shard)) is not None:
            held.update(c.payload for c in job.contributions)
        return held | self.own_commits.payloads(shard) | {c.payload for c in self.early[shard].values()}
