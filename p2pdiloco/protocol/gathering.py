"""Gathers the contributions of a round and decides when they are merged: at an owner, and at a group's collector.

Rules of this file:
1. There is no election. Any peer that holds contributions may merge them once its rank's turn has come.
2. A shard has at most one merge in progress, so that a result can be matched to its merge.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Set
from typing import NamedTuple

from p2pdiloco.protocol.effects import Merge
from p2pdiloco.protocol.ids import Digest, LearnerId, PeerId, ShardId, peer_of
from p2pdiloco.protocol.messages import MAX_TEXT, Contribution, Refused
from p2pdiloco.protocol.response_times import ResponseTimes
from p2pdiloco.protocol.state import Core
from p2pdiloco.protocol.support import Support
from p2pdiloco.protocol.waiting import LONGEST_WAIT, QuorumView, Waits, decide, grace_window_s

SMOOTHING = 0.2
"""Weight of the newest duration in a running mean."""


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
        """When the round was announced here, or most had contributed (``Gatherer.accept``)."""
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


class Gatherer(ABC):
    """Gathers contributions to the next versions of all shards, and decides when to merge them.

    An owner has one for its commits (``Aggregation``), and each peer one for its group (``GroupMerges``).
    """

    alarm = "close"
    """Topic of the alarm at which a collection is looked at again."""

    def __init__(self, core: Core, response_times: ResponseTimes) -> None:
        self.core = core
        self.response_times = response_times
        self.collections = [Collection(core.now) for _ in core.chains]
        self.jobs: dict[ShardId, Job] = {}
        """Running merges."""
        self.sync_s = 0.0
        """Smoothed time from closing a collection to the end of the merge, in seconds."""

    # -- who takes part ------------------------------------------------------------------------------------------------

    @abstractmethod
    def participants(self, shard: ShardId) -> frozenset[PeerId]:
        """Return whose answers are waited for."""

    def peers_of(self, shard: ShardId, participants: frozenset[PeerId]) -> frozenset[PeerId]:
        """Return the peers that these ``participants`` are."""
        return participants

    @abstractmethod
    def ranked(self, shard: ShardId) -> tuple[PeerId, ...]:
        """Return the peers that may merge, in this order."""

    def rank(self, shard: ShardId) -> int:
        """Return this peer's place among them."""
        me, ranked = self.core.config.peer, self.ranked(shard)
        return ranked.index(me) if me in ranked else len(ranked)

    @abstractmethod
    def quorum(self, shard: ShardId, collection: Collection) -> int:
        """Return how many learners' contributions a merge needs."""

    @abstractmethod
    def waits(self) -> Waits:
        """Return how long to wait for what, as of now."""

    def waits_for(self, shard: ShardId) -> Waits:
        """Return how long to wait for answers to a round of the shard, and otherwise ``waits``."""
        return self.waits()

    def waits_longer(self, shard: ShardId) -> bool:
        """Return whether a merge of the shard waits longer than the paper's grace window."""
        return bool(self.core.config.grace_share)

    def learners(self, collection: Collection) -> int:
        """Return how many learners' contributions have come."""
        return sum(len(contribution.contributors) for contribution in collection.given.values())

    def is_whole(self, contribution: Contribution) -> bool:
        """Return whether nothing more is waited for from where this comes."""
        return True

    def may_merge(self, shard: ShardId) -> bool:
        """Return whether this peer merges on the shard's head now, apart from whose turn it is."""
        core = self.core
        return not core.membership.partition_detector.has_left and core.head(shard).id not in core.abandoned

    def start(self, shard: ShardId, contributions: tuple[Contribution, ...]) -> Merge:
        """Return the merge of these, sorted by learner."""
        longest = self.core.chains[shard].longest([c for one in contributions for c in one.contributors])
        return Merge(shard, self.core.head(shard), contributions, longest)

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
                self.core.alarms.set((self.alarm, shard), self.core.now)

    def accept(self, giver: PeerId, contribution: Contribution) -> None:
        """Collect a contribution. Alone it opens no round, because the others may not have been told of one.

        Their owner would not wait for them, and merge alone what comes first.
        """
        collection, c = self.collections[contribution.shard], contribution.contributor
        if collection.opened_at is not None and giver != self.core.config.peer:
            self.response_times.record(giver, self.core.now - collection.opened_at)
        if collection.is_closed:
            return
        if self.is_whole(contribution):
            collection.answered.add(giver)
        collection.step = max(collection.step, self.core.plausible(contribution.step))
        if collection.opened_at is None:
            collection.held_until = min(collection.held_until, self.core.now + self.waits().takeover_s)
            if self.answers(contribution.shard).is_most:
                self.open(contribution.shard, collection.step)
        if c.tokens:
            for learner in [x for x in collection.given if peer_of(x) == giver and x != c.learner]:
                del collection.given[learner]
            collection.given.setdefault(c.learner, contribution)
        self.merge_if_due(contribution.shard)

    def answers(self, shard: ShardId, missing: int = 0) -> Support:
        """Return how many participants have answered; ``missing`` more may be behind a cut."""
        able = len(self.participants(shard))
        return Support(len(self.collections[shard].answered), able + missing)

    def refuse(self, sender: PeerId, contribution: Contribution, reason: str) -> None:
        """Tell ``sender`` that its contribution is not merged, and this peer's head."""
        core, shard = self.core, contribution.shard
        head = core.head(shard)
        core.note("debug", "refusal", f"shard {shard} version {contribution.base.version} from {sender}: {reason}")
        if sender == core.config.peer:
            return
        core.send((sender,), Refused(shard, contribution.base.id, reason, head))

    def support(self, here: Set[PeerId], peers: Set[PeerId], wait: Waits) -> Support:
        """Return how many prompt ``peers`` there are, and how many of these are ``here``.

        A peer is prompt if it usually answers while an owner waits, is new, or is here. If fewer than most are, most
        count: an owner that the others pass over finds nobody prompt, and is not alone.
        """
        usual_s = self.response_times.usual_s(peers)
        prompt = {peer for peer, delay_s in usual_s.items() if delay_s <= wait.usual_s or peer in here}
        return Support(len(prompt & here), max(len(prompt), len(peers) and len(peers) // 2 + 1))

    # -- merge ---------------------------------------------------------------------------------------------------------

    def merge_if_due(self, shard: ShardId) -> None:
        """Start a merge of the collected contributions if the quorum and grace window allow it."""
        collection, core = self.collections[shard], self.core
        if collection.is_closed or shard in self.jobs or not collection.given:
            return
        if collection.opened_at is None and core.now >= collection.held_until:
            self.open(shard, collection.step)
        if collection.opened_at is None:
            core.alarms.set((self.alarm, shard), collection.held_until)
            return
        if not self.may_merge(shard):
            return
        head, quorum = core.head(shard), self.quorum(shard, collection)
        if self.learners(collection) < quorum:
            collection.quorum_at = None  # more peers can contribute now
        elif collection.quorum_at is None:
            collection.quorum_at = core.now
        decision = decide(self._view(shard, collection, quorum))
        if not decision.is_close:
            if decision.look_again_at is None:
                core.alarms.cancel((self.alarm, shard))
            else:
                core.alarms.set((self.alarm, shard), decision.look_again_at)
            return
        core.alarms.cancel((self.alarm, shard))
        core.note("debug", "close", f"shard {shard} version {head.version + 1}: {decision.reason}")
        collection.is_closed = True
        self.response_times.record_missing(decision.late, self.waits_for(shard).usual_s)
        contributions = tuple(collection.given[learner] for learner in sorted(collection.given))
        self.jobs[shard] = Job(head.id, contributions, core.now)
        core.effects.append(self.start(shard, contributions))

    def merge_all_due(self) -> None:
        """Check every collection again after a change of membership."""
        for shard, collection in enumerate(self.collections):
            if collection.given:
                self.merge_if_due(ShardId(shard))

    def _view(self, shard: ShardId, collection: Collection, quorum: int) -> QuorumView:
        core, config, participation = self.core, self.core.config, self.core.participation
        assert collection.opened_at is not None
        participants, wait = self.participants(shard), self.waits_for(shard)
        missing = participants - collection.answered
        quorum_s = 0.0 if collection.quorum_at is None else collection.quorum_at - collection.opened_at
        most_s = wait.takeover_s * (LONGEST_WAIT if core.chains[shard].group_bits else 1.0)
        others = self.peers_of(shard, missing) - {config.peer}
        is_any_departing = any(map(participation.is_departing, others))
        if core.chains[shard].group_bits and core.departure == "leaving":
            is_any_departing |= not others  # all whom it knew of a group have left, but some may stay
        return QuorumView(
            now=core.now,
            opened_at=collection.opened_at,
            quorum_at=collection.quorum_at,
            given=self.learners(collection),
            answers=self.support(collection.answered, participants, wait),
            missing=self.response_times.usual_s(missing),
            min_quorum=quorum,
            rank=self.rank(shard),
            grace_s=grace_window_s(
                grace_share=config.grace_share,
                overlap_steps=config.overlap,
                step_time_s=core.fastest_step_time_s(),
                quorum_s=quorum_s,
                sync_s=self.sync_s + core.membership.slowest_round_trip_s,
            ),
            waits=wait,
            is_extended=self.waits_longer(shard),
            departing_s=min(config.leave_s / 2, config.finish_s / 2, most_s) if is_any_departing else None,
        )

    def on_merge_failed(self, shard: ShardId, culprit: PeerId | None, reason: str) -> None:
        """Drop the contribution that made a merge fail (all of them if ``culprit`` is None), then check again."""
        collection = self.collections[shard]
        self.core.note("warning", "merge", f"shard {shard}: {reason}")
        job = self.jobs.pop(shard, None)
        if job is not None and job.base == self.core.head(shard).id:
            collection.is_closed = False
            for learner in [x for x in collection.given if culprit is None or peer_of(x) == culprit]:
                self.refuse(peer_of(learner), collection.given.pop(learner), reason[:MAX_TEXT])
            if self.learners(collection) < self.quorum(shard, collection):
                collection.quorum_at = None
        self.merge_if_due(shard)

    def finish(self, shard: ShardId, base: Digest) -> Job | None:
        """Return the shard's merge on ``base``, which has ended, or None if the shard has moved on meanwhile."""
        job = self.jobs.pop(shard, None)
        if job is None or not job.base == base == self.core.head(shard).id:
            self.core.note("info", "commit", f"shard {shard}: merge for {base[:8]} dropped, the head moved on")
            self.merge_if_due(shard)
            return None
        self.sync_s += SMOOTHING * (self.core.now - job.began_at - self.sync_s)
        return job

    def close(self, shard: ShardId) -> None:
        """Close the collection: the next head is being applied, so further contributions are too late."""
        self.collections[shard].is_closed = True
        self.core.alarms.cancel((self.alarm, shard))

    def drop_job(self, shard: ShardId) -> None:
        """Close the collection, and do without the merge that runs."""
        self.jobs.pop(shard, None)
        self.close(shard)

    def reopen(self, shard: ShardId) -> None:
        """Open the collection again after a commit could not be applied; its contributions are kept."""
        self.collections[shard].is_closed = shard in self.jobs
        self.merge_if_due(shard)

    def payloads(self, shard: ShardId) -> set[Digest]:
        """Return the payloads that may still be merged here."""
        held = {c.payload for c in self.collections[shard].given.values()}
        if (job := self.jobs.get(shard)) is not None:
            held.update(c.payload for c in job.contributions)
        return held
