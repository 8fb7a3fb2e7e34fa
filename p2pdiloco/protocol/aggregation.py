"""The owner's side of a turn: collect contributions, close by quorum and grace window, merge, commit.

Rules of this file:
1. A contribution is accepted only for the head of its shard, from its own learner's peer or from one that hears it,
   once per learner and version, and only with tokens that the chain has not merged.
2. A stale contribution is refused with the newest head attached; one that is ahead of us waits until we caught up.
3. Whoever holds contributions may merge them when its rank's time has come: there is no election.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from p2pdiloco.protocol.chain import HeadChange
from p2pdiloco.protocol.effects import Merge
from p2pdiloco.protocol.events import Merged
from p2pdiloco.protocol.forwarding import hand_on_contribution, is_handed_on
from p2pdiloco.protocol.ids import Digest, LearnerId, PeerId, ShardId, peer_of
from p2pdiloco.protocol.membership import smoothed
from p2pdiloco.protocol.messages import MAX_TEXT, CommitHeader, Contribution, Head, Refused, commit_id
from p2pdiloco.protocol.ownership import ranked_owners
from p2pdiloco.protocol.state import Core

# -- Own commits: one for each parent, in all lives of this peer -------------------------------------------------------
# Rules of this file:
# 1. An owner that comes to merge on a parent of which it has made a commit before makes the same commit again. Two
#    would be a proof against it (``Equivocations``).
# 2. What was made in earlier lives is told at the start: the driver keeps it before it is sent.
# 3. One that cannot be applied here is tried again later; only who is alone makes another, after OWN_TRIES.


def is_left(header: CommitHeader, head: Head) -> bool:
    """Whether ``head`` is as heavy as ``header``, and so heavier than its parent: whoever has it does not merge there
    again."""
    return head.tokens >= header.tokens


class OwnCommitLog:
    """Commits that this peer has made, by shard and parent. Those that a head has left behind are forgotten."""

    def __init__(self, shards: int) -> None:
        self._made: list[dict[Digest, CommitHeader]] = [{} for _ in range(shards)]

    def record(self, header: CommitHeader) -> CommitHeader:
        """``header``, or what was made on its parent before."""
        return self._made[header.shard].setdefault(header.parent, header)

    def restore(self, header: CommitHeader, head: Head | None) -> bool:
        """Whether ``header``, made in an earlier life, still matters to whoever is at ``head``."""
        if head is not None and is_left(header, head):
            return False
        return self.record(header) is header

    def is_own(self, header: CommitHeader) -> bool:
        """Whether it was made here."""
        return self._made[header.shard].get(header.parent) == header

    def forget(self, header: CommitHeader) -> None:
        """Forget a commit that nobody else has and that cannot be applied here."""
        self._made[header.shard].pop(header.parent, None)

    def on_head_changed(self, change: HeadChange) -> None:
        """Forget the commits that the head has left behind."""
        made = self._made[change.shard]
        for parent in [parent for parent, header in made.items() if is_left(header, change.head)]:
            del made[parent]

    def payloads(self, shard: ShardId) -> set[Digest]:
        """Return the payloads that are sent with a shard's own commits."""
        return {header.payload for header in self._made[shard].values()}

    def commits(self, shard: ShardId) -> set[Digest]:
        """Their ids."""
        return {commit_id(header) for header in self._made[shard].values()}


# -- Quorum and grace window -------------------------------------------------------------------------------------------
# Source: arXiv 2604.21428, "adaptive grace window". It publishes neither gamma nor the smoothing: ours are
# ``grace_share`` of the manifest and ``SMOOTHING``. Owners often wait longer:
# docs/adr/0035-owners-wait-for-usual-answers.md


class QuorumView(NamedTuple):
    """Input of ``decide``. Times are the owner's own clock, in seconds."""

    now: float
    opened_at: float
    quorum_at: float | None
    """When the K-th contribution with tokens came, if it has."""
    given: int
    """Contributions with tokens."""
    missing: int
    """Participating peers that have not answered."""
    min_quorum: int
    rank: int
    """This peer's rank among the owners: 0 merges at once, the next after the takeover time, and so on."""
    takeover_s: float
    grace_s: float


class Decision(NamedTuple):
    """Close now, or look again at ``look_again_at`` (None: when something changes)."""

    is_close: bool
    look_again_at: float | None
    reason: str


def grace_window_s(
    *, grace_share: float, overlap_steps: int, step_time_s: float, quorum_s: float, sync_s: float
) -> float:
    """gamma * (tau * step time - (quorum time + sync time)), never below 0."""
    return max(0.0, grace_share * (overlap_steps * step_time_s - (quorum_s + sync_s)))


def decide(view: QuorumView) -> Decision:
    """Whether to merge what is in."""
    if view.given < view.min_quorum:
        return Decision(False, None, f"quorum not reached: {view.given} of {view.min_quorum}")
    turn_of_rank = view.opened_at + view.rank * view.takeover_s
    if view.now < turn_of_rank:
        return Decision(False, turn_of_rank, f"rank {view.rank} waits for the owners before it")
    if view.missing == 0:
        return Decision(True, None, f"all participants answered, {view.given} give tokens")
    assert view.quorum_at is not None
    window_ends = view.quorum_at + view.grace_s
    if view.now >= window_ends:
        return Decision(True, None, f"grace window of {view.grace_s:.3f} s is over, {view.missing} missing")
    return Decision(False, window_ends, f"grace window: {view.missing} may still answer")


# -- Response times of participants ------------------------------------------------------------------------------------
# The paper's grace window is a share of tau steps. On a long or slow path answers take longer than that, turn after
# turn: a version would hold one learner's progress, and what the others had sent would be refused and sent again.
#
# Rules of this file:
# 1. Late answers count, too: a peer that was not waited for must not look as if it never answered.
# 2. Nobody is waited for who usually takes longer than the limit: it gives what it has at its next turn.


VARIATIONS = 2
"""Beyond the mean; few answers take longer than that."""


class ResponseTimes:
    """How long each peer takes to answer a turn, from its opening at this owner."""

    def __init__(self, shards: int) -> None:
        self._delays: dict[PeerId, tuple[float, float]] = {}
        """Smoothed, with their variation."""
        self._merged: list[tuple[Digest, float] | None] = [None] * shards
        """The base of each shard's last version, and when its turn had opened: for answers that come too late."""

    def record(self, peer: PeerId, delay_s: float) -> None:
        """An answer, so long after the opening."""
        self._delays[peer] = smoothed(*self._delays.get(peer, (0.0, 0.0)), delay_s)

    def end_turn(self, shard: ShardId, base: Digest, opened_at: float) -> None:
        """Remember when the turn after ``base`` had opened, now that its version is here: later answers are late."""
        self._merged[shard] = base, opened_at

    def record_late(self, peer: PeerId, shard: ShardId, base: Digest, now: float) -> None:
        """An answer to a version that is there already."""
        merged = self._merged[shard]
        if merged is not None and merged[0] == base:
            self.record(peer, now - merged[1])

    def wait_s(self, absent: Iterable[PeerId], limit_s: float) -> float:
        """How long after the opening all of ``absent`` will usually have answered who do so within ``limit_s``."""
        known = (self._delays[peer] for peer in absent if peer in self._delays)
        usual = (mean_s + VARIATIONS * variation_s for mean_s, variation_s in known)
        return max((delay_s for delay_s in usual if delay_s <= limit_s), default=0.0)

    def forget(self, peer: PeerId) -> None:
        """The peer is gone."""
        self._delays.pop(peer, None)


# -- Aggregation -------------------------------------------------------------------------------------------------------


SMOOTHING = 0.2
OWN_TRIES = 8
"""Of an own commit that cannot be applied, before who is alone makes another."""


def is_on_head(contribution: Contribution, head: Head) -> bool:
    """Whether the outer gradient is relative to this head; else it is stale, or ahead of us."""
    return contribution.base.id == head.id


def is_ahead(contribution: Contribution, head: Head) -> bool:
    """Whether it may be relative to a head that this peer will reach."""
    return contribution.base.version > head.version or contribution.base.tokens > head.tokens


class Collection:
    """Contributions to one shard's next version."""

    __slots__ = ("answered", "given", "is_closed", "opened_at", "quorum_at", "step")

    def __init__(self) -> None:
        self.given: dict[LearnerId, Contribution] = {}
        """Those with tokens."""
        self.answered: set[PeerId] = set()
        self.opened_at: float | None = None
        self.quorum_at: float | None = None
        self.is_closed = False
        """Being merged, or another head is being applied: contributions come too late."""
        self.step = 0


class Job(NamedTuple):
    """A merge under way."""

    base: Digest
    contributions: tuple[Contribution, ...]
    """Sorted by learner."""
    began_at: float


class Retry(NamedTuple):
    """An own commit that could not be applied."""

    tries: int
    at: float
    """When it is tried again."""


class Aggregation:
    """Collects contributions for all shards, and decides when to merge them."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.collections = [Collection() for _ in core.chains]
        self.early: list[dict[PeerId, Contribution]] = [{} for _ in core.chains]
        """Contributions to versions that this peer has not reached, one per peer."""
        self.guests: set[PeerId] = set()
        """Peers whose contributions others hand on."""
        self.response_times = ResponseTimes(len(core.chains))
        self.turn_s = core.config.takeover_floor_s
        """Smoothed time from a turn to its commits."""
        self.sync_s = 0.0
        """Smoothed time from closing to the commit."""
        self.jobs: dict[ShardId, Job] = {}
        """Merges under way: one for a shard, so that it is clear which one has ended."""
        self.own_commits = OwnCommitLog(len(core.chains))
        self._retries: dict[ShardId, Retry] = {}
        """Own commits that could not be applied."""
        self._unsure_until: dict[ShardId, float] = {}
        """Shards that this peer has from its disk, of whose heads nobody has told, and until when it waits."""

    # -- measured times ------------------------------------------------------------------------------------------------

    def record_turn(self, seconds: float) -> None:
        """Take a turn's time into the mean, from its announcement to its last commit."""
        seconds = min(seconds, self.core.config.takeover_ceiling_s)
        self.turn_s += SMOOTHING * (seconds - self.turn_s)

    def takeover_s(self) -> float:
        """How long an owner may take before the next in rank is asked: the overlap, three turns, a few round trips."""
        config, membership = self.core.config, self.core.membership
        overlap = config.overlap * self.core.fastest_step_time_s()
        wanted = overlap + 3 * self.turn_s + 4 * membership.slowest_round_trip_s
        return min(max(wanted, config.takeover_floor_s), config.takeover_ceiling_s)

    def commit_patience_s(self) -> float:
        """How long a commit that others have may be on its way: a turn (at most a heartbeat) and two round trips."""
        config, membership = self.core.config, self.core.membership
        return min(self.turn_s, config.heartbeat_s) + 2 * membership.slowest_round_trip_s

    # -- after a start -------------------------------------------------------------------------------------------------

    def wait_for_heads(self, shard: ShardId) -> None:
        """From the disk, which may be older than what this peer has made: it may have made the next commit before."""
        self._unsure_until[shard] = self.core.now + self.core.config.request_s

    def confirm_head(self, shard: ShardId) -> None:
        """Merge again: nobody has a later head, or this peer has caught up."""
        if self._unsure_until.pop(shard, None) is not None:
            self.merge_if_due(shard)

    # -- collect -------------------------------------------------------------------------------------------------------

    def open(self, shard: ShardId, step: int) -> None:
        """Note that a turn opened: from now on this peer's rank counts."""
        collection = self.collections[shard]
        if collection.opened_at is None:
            collection.opened_at = self.core.now
        collection.step = max(collection.step, step)

    def collect(self, sender: PeerId, contribution: Contribution) -> None:
        """Take, keep for later, or refuse a contribution."""
        shard, head = contribution.shard, self.core.head(contribution.shard)
        giver = peer_of(contribution.contributor.learner)
        if giver == sender:
            self.guests.discard(giver)
        elif is_handed_on(self.core, sender, contribution):
            self.guests.add(giver)
        else:
            self._refuse(sender, contribution, "the learner is not the sender's, nor of a peer that it hears")
            return
        if is_on_head(contribution, head):
            reason = self._problem(contribution)
            if reason is None:
                self._accept(giver, contribution)
                hand_on_contribution(self.core, sender, contribution)
            else:
                self._refuse(sender, contribution, reason)
        elif is_ahead(contribution, head):
            if giver == sender and self.wants(sender, contribution):
                self.early[shard][sender] = contribution
            else:
                self._refuse(sender, contribution, "too much waits already for heads that are not here")
        else:
            self.response_times.record_late(giver, shard, contribution.base.id, self.core.now)
            self._refuse(sender, contribution, "stale")

    def wants(self, sender: PeerId, contribution: Contribution) -> bool:
        """Whether the payload may come: not in another's name, and within its peer's share of what may wait for a head
        that is not here."""
        head = self.core.chains[contribution.shard].head
        if peer_of(contribution.contributor.learner) != sender:
            is_usable = head is not None and is_on_head(contribution, head)
            return is_usable and is_handed_on(self.core, sender, contribution)
        if head is None or is_on_head(contribution, head) or not is_ahead(contribution, head):
            return True
        others = (early.get(sender) for shard, early in enumerate(self.early) if shard != contribution.shard)
        waiting = contribution.payload_bytes + sum(other.payload_bytes for other in others if other is not None)
        return waiting <= self.core.config.early_bytes // max(1, len(self.core.membership.peers))

    def _problem(self, contribution: Contribution) -> str | None:
        c = contribution.contributor
        if c.tokens < 0 or c.steps < 0 or (c.tokens > 0) != (c.steps > 0):
            return "its range is not a range"
        if c.tokens and not contribution.payload:
            return "it has no payload"
        return self.core.chains[contribution.shard].range_problem(c)

    def _accept(self, giver: PeerId, contribution: Contribution) -> None:
        collection, c = self.collections[contribution.shard], contribution.contributor
        if not collection.is_closed:
            self.open(contribution.shard, self.core.plausible(contribution.step))
        if collection.opened_at is not None:
            self.response_times.record(giver, self.core.now - collection.opened_at)
        if collection.is_closed:
            return
        collection.answered.add(giver)
        if c.tokens:
            for learner in [x for x in collection.given if peer_of(x) == giver and x != c.learner]:
                del collection.given[learner]
            collection.given.setdefault(c.learner, contribution)
        self.merge_if_due(contribution.shard)

    def _refuse(self, sender: PeerId, contribution: Contribution, reason: str) -> None:
        core, shard = self.core, contribution.shard
        head = core.head(shard)
        core.note("debug", "refusal", f"shard {shard} version {contribution.base.version} from {sender}: {reason}")
        if sender == core.config.peer:
            return
        core.send((sender,), Refused(shard, contribution.base.id, reason, head))

    # -- close ---------------------------------------------------------------------------------------------------------

    def merge_if_due(self, shard: ShardId) -> None:
        """Merge what is in, if it is time."""
        collection, core = self.collections[shard], self.core
        if collection.is_closed or shard in self.jobs or not collection.given or collection.opened_at is None:
            return
        if not core.membership.owners.may_own:
            return
        if core.config.needs_majority and not self._is_majority(collection.answered):
            return
        if (again := self._retries.get(shard)) is not None and core.now < again.at:
            core.alarms.set(("close", shard), again.at)
            return
        if core.now < (until := self._unsure_until.get(shard, 0.0)):
            core.alarms.set(("close", shard), until)
            return
        head, quorum = core.head(shard), self.quorum(collection)
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
        contributions = tuple(collection.given[learner] for learner in sorted(collection.given))
        self.jobs[shard] = Job(head.id, contributions, core.now)
        longest = core.chains[shard].longest(c.contributor for c in contributions)
        core.effects.append(Merge(shard, head, contributions, longest))

    def _is_majority(self, answered: set[PeerId]) -> bool:
        """Whether more than half have answered of all who could, those included who are missing."""
        core, membership = self.core, self.core.membership
        able = (
            len(membership.participating | self.guests)
            + core.is_participating()
            + len(membership.partition_detector.missing)
        )
        return 2 * len(answered) > able

    def merge_all_due(self) -> None:
        """Membership changed: every collection may close now, or no longer."""
        for shard, collection in enumerate(self.collections):
            if collection.given:
                self.merge_if_due(ShardId(shard))

    def _view(self, shard: ShardId, collection: Collection, quorum: int) -> QuorumView:
        core = self.core
        config, membership = core.config, core.membership
        assert collection.opened_at is not None
        ranked = ranked_owners(config.run, shard, core.head(shard).version + 1, membership.owners.candidates)
        rank = ranked.index(config.peer) if config.peer in ranked else len(ranked)
        guests = filter(membership.connectivity.is_afar, self.guests)
        absent = membership.participating.union(guests) - collection.answered
        is_waiting_for_me = core.is_participating() and config.peer not in collection.answered
        quorum_s = 0.0 if collection.quorum_at is None else collection.quorum_at - collection.opened_at
        grace_s = grace_window_s(
            grace_share=config.grace_share,
            overlap_steps=config.overlap,
            step_time_s=self.core.fastest_step_time_s(),
            quorum_s=quorum_s,
            sync_s=self.sync_s + membership.slowest_round_trip_s,
        )
        if config.grace_share:
            limit_s = config.sync_every * self.core.fastest_step_time_s() / 2
            waited_for = {*absent, config.peer} if is_waiting_for_me else absent
            grace_s = max(grace_s, self.response_times.wait_s(waited_for, limit_s) - quorum_s)
        takeover_s = self.takeover_s()
        if membership.is_any_departing(absent):
            grace_s = takeover_s  # it has no later turn
        grace_s = min(grace_s, takeover_s)
        return QuorumView(
            now=core.now,
            opened_at=collection.opened_at,
            quorum_at=collection.quorum_at,
            given=len(collection.given),
            missing=len(absent) + is_waiting_for_me,
            min_quorum=quorum,
            rank=rank,
            takeover_s=takeover_s,
            grace_s=grace_s,
        )

    def quorum(self, collection: Collection) -> int:
        """K, or all who can give if they are fewer: with one live learner versions advance, and at the run's end two
        learners of which each has progress left for another shard do not wait for each other."""
        core, departing = self.core, self.core.membership.is_departing
        empty = collection.answered.difference(map(peer_of, collection.given))
        gone = sum(peer in empty and departing(peer) for peer in core.membership.participating)
        is_able = core.is_participating() and not (core.config.peer in empty and bool(core.departure))
        return max(1, min(core.config.min_quorum, len(core.membership.participating) - gone + is_able))

    # -- commit --------------------------------------------------------------------------------------------------------

    def commit(self, event: Merged) -> CommitHeader | None:
        """The merge is done: the commit to make, or None if the shard has moved on meanwhile."""
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
        )
        return self.own_commits.record(header)

    def on_merge_failed(self, shard: ShardId, culprit: PeerId | None, reason: str) -> None:
        """A merge did not work: drop the contribution to blame (all of them if nobody is named) and look again."""
        collection = self.collections[shard]
        self.core.note("warning", "merge", f"shard {shard}: {reason}")
        job = self.jobs.pop(shard, None)
        if job is not None and job.base == self.core.head(shard).id:
            collection.is_closed = False
            for learner in [x for x in collection.given if culprit is None or peer_of(x) == culprit]:
                self._refuse(peer_of(learner), collection.given.pop(learner), reason[:MAX_TEXT])
            if len(collection.given) < self.quorum(collection):
                collection.quorum_at = None
        self.merge_if_due(shard)

    def close(self, shard: ShardId) -> None:
        """The next head is being applied: what comes now comes too late."""
        self.collections[shard].is_closed = True
        self.core.alarms.cancel(("close", shard))

    def on_commit_failed(self, header: CommitHeader) -> None:
        """What was made here cannot be applied here, now: others may have it, so it is tried again. Who is alone gives
        up at last."""
        if not self.own_commits.is_own(header):
            return
        again = self._retries.get(header.shard)
        tries = 1 if again is None else again.tries + 1
        if tries >= OWN_TRIES and not self.core.membership.live:
            self.own_commits.forget(header)
        self._retries[header.shard] = Retry(tries, self.core.now + self.takeover_s())

    def on_repaired(self, shard: ShardId) -> None:
        """The shard's state is what it should be: what was made on it can be applied."""
        self._retries.pop(shard, None)
        self.reopen(shard)

    def reopen(self, shard: ShardId) -> None:
        """The commit could not be applied: the contributions are still there."""
        self.collections[shard].is_closed = shard in self.jobs
        self.merge_if_due(shard)

    def on_head_changed(self, change: HeadChange) -> None:
        """Collect for the shard's next version, first what came early for it."""
        core, shard = self.core, change.shard
        core.alarms.cancel(("close", shard))
        opened_at = self.collections[shard].opened_at
        if change.previous is not None and opened_at is not None:
            self.response_times.end_turn(shard, change.previous.id, opened_at)
        self.collections[shard] = Collection()
        self.guests = set(filter(core.membership.connectivity.is_afar, self.guests))
        self._retries.pop(shard, None)
        early, self.early[shard] = self.early[shard], {}
        for sender in sorted(early):
            self.collect(sender, early[sender])

    def forget(self, peer: PeerId) -> None:
        """The peer is gone: what it sent ahead of us will come again, or never."""
        self.response_times.forget(peer)
        for early in self.early:
            early.pop(peer, None)

    def payloads(self, shard: ShardId) -> set[Digest]:
        """Payloads that may still be merged here."""
        held = {c.payload for c in self.collections[shard].given.values()}
        if (job := self.jobs.get(shard)) is not None:
            held.update(c.payload for c in job.contributions)
        return held | self.own_commits.payloads(shard) | {c.payload for c in self.early[shard].values()}
