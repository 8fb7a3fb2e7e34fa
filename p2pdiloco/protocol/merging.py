"""The owner's side of a turn: collect contributions, close by quorum and grace window, merge, commit.

Rules of this file:
1. A contribution is accepted only for the head of its shard, from its own learner's peer, once per learner and version,
   and only where the chain has merged its learner to.
2. A stale contribution is refused with the newest commit attached; one that is ahead of us waits until we caught up.
3. Whoever holds contributions may merge them when its rank's time has come: there is no election.
"""

from __future__ import annotations

from p2pdiloco.protocol.chain import NO_MARK
from p2pdiloco.protocol.core import Core
from p2pdiloco.protocol.effects import Merge
from p2pdiloco.protocol.events import Merged
from p2pdiloco.protocol.identifiers import Digest, LearnerId, PeerId, ShardId, peer_of
from p2pdiloco.protocol.messages import Commit, CommitHeader, Contribution, Refused
from p2pdiloco.protocol.ownership import ranked_owners
from p2pdiloco.protocol.quorum import QuorumView, decide, grace_window_s

SMOOTHING = 0.2


class Collection:
    """Contributions to one shard's next version."""

    __slots__ = ("answered", "given", "is_merging", "opened_at", "quorum_at", "step")

    def __init__(self) -> None:
        self.given: dict[LearnerId, Contribution] = {}
        """Those with tokens."""
        self.answered: set[PeerId] = set()
        self.opened_at: float | None = None
        self.quorum_at: float | None = None
        self.is_merging = False
        self.step = 0


class Merging:
    """What this peer collects, for all shards."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.collections = [Collection() for _ in core.chains]
        self.early: list[dict[PeerId, Contribution]] = [{} for _ in core.chains]
        """Contributions to versions that this peer has not reached, one per peer."""
        self.turn_s = core.config.takeover_floor_s
        """Smoothed time from a turn to its commits."""
        self.sync_s = 0.0
        """Smoothed time from closing to the own commit being applied."""
        self.merge_began: dict[ShardId, float] = {}

    # -- measured times ------------------------------------------------------------------------------------------------

    def measured_turn(self, seconds: float) -> None:
        """A turn took this long, from announcement to the last commit."""
        seconds = min(seconds, self.core.config.takeover_ceiling_s)
        self.turn_s += SMOOTHING * (seconds - self.turn_s)

    def takeover_s(self) -> float:
        """How long an owner may take before the next in rank is asked: the overlap, three turns, a few round trips."""
        config, membership = self.core.config, self.core.membership
        overlap = config.overlap * self._step_time_s()
        wanted = overlap + 3 * self.turn_s + 4 * membership.slowest_round_trip_s()
        return min(max(wanted, config.takeover_floor_s), config.takeover_ceiling_s)

    def _step_time_s(self) -> float:
        learner = self.core.learner
        own = learner.step_time_s if learner is not None and not learner.is_paused else 0.0
        others = self.core.membership.fastest_step_s()
        return min(own, others) if own and others else own or others

    # -- collect -------------------------------------------------------------------------------------------------------

    def open(self, shard: ShardId, step: int) -> None:
        """A turn opened: from now on this peer's rank counts."""
        collection = self.collections[shard]
        if collection.opened_at is None:
            collection.opened_at = self.core.now
        collection.step = max(collection.step, step)

    def collect(self, sender: PeerId, contribution: Contribution) -> None:
        """Take, keep for later, or refuse a contribution."""
        shard, head = contribution.shard, self.core.head(contribution.shard)
        if peer_of(contribution.contributor.learner) != sender:
            self._refuse(sender, contribution, "the learner is not the sender's")
        elif contribution.base.id == head.id:
            reason = self._problem(contribution)
            if reason is None:
                self._accept(sender, contribution)
            else:
                self._refuse(sender, contribution, reason)
        elif contribution.base.version > head.version or contribution.base.tokens > head.tokens:
            self.early[shard][sender] = contribution
        else:
            self._refuse(sender, contribution, "stale")

    def _problem(self, contribution: Contribution) -> str | None:
        c = contribution.contributor
        if c.tokens < 0 or c.steps < 0 or (c.tokens > 0) != (c.steps > 0):
            return "its range is not a range"
        if c.tokens_from < self.core.chains[contribution.shard].marks.get(c.learner, NO_MARK).tokens:
            return "its tokens are merged already"
        if c.tokens and not contribution.payload:
            return "it has no payload"
        return None

    def _accept(self, sender: PeerId, contribution: Contribution) -> None:
        collection, c = self.collections[contribution.shard], contribution.contributor
        if collection.is_merging:
            return
        self.open(contribution.shard, contribution.step)
        collection.answered.add(sender)
        if c.tokens:
            for learner in [x for x in collection.given if peer_of(x) == sender and x != c.learner]:
                del collection.given[learner]
            collection.given.setdefault(c.learner, contribution)
            if collection.quorum_at is None and len(collection.given) >= self.core.config.min_quorum:
                collection.quorum_at = self.core.now
        self.consider(contribution.shard)

    def _refuse(self, sender: PeerId, contribution: Contribution, reason: str) -> None:
        core, shard = self.core, contribution.shard
        head = core.head(shard)
        core.note("debug", "refusal", f"shard {shard} version {contribution.base.version} from {sender}: {reason}")
        if sender == core.config.peer:
            return
        core.send((sender,), Refused(shard, contribution.base.id, reason, head))
        log = core.chains[shard].log
        if log and log[-1].parent == contribution.base.id:
            core.send((sender,), Commit(log[-1]))

    # -- close ---------------------------------------------------------------------------------------------------------

    def consider(self, shard: ShardId) -> None:
        """Merge what is in, if it is time."""
        collection, core = self.collections[shard], self.core
        if collection.is_merging or not collection.given or collection.opened_at is None:
            return
        head = core.head(shard)
        decision = decide(self._view(shard, collection))
        if not decision.is_close:
            if decision.look_again_at is None:
                core.alarms.cancel(("close", shard))
            else:
                core.alarms.set(("close", shard), decision.look_again_at)
            return
        core.alarms.cancel(("close", shard))
        core.note("debug", "close", f"shard {shard} version {head.version + 1}: {decision.reason}")
        collection.is_merging = True
        self.merge_began[shard] = core.now
        given = collection.given
        core.effects.append(Merge(shard, head, tuple(given[learner] for learner in sorted(given))))

    def consider_all(self) -> None:
        """Membership changed: every collection may close now, or no longer."""
        for shard, collection in enumerate(self.collections):
            if collection.given:
                self.consider(ShardId(shard))

    def _view(self, shard: ShardId, collection: Collection) -> QuorumView:
        core = self.core
        config, membership = core.config, core.membership
        assert collection.opened_at is not None
        ranked = ranked_owners(config.run, shard, core.head(shard).version + 1, membership.candidates)
        rank = ranked.index(config.peer) if config.peer in ranked else len(ranked)
        missing = len(membership.participating - collection.answered)
        if config.peer not in collection.answered and core.is_participating():
            missing += 1
        quorum_s = 0.0 if collection.quorum_at is None else collection.quorum_at - collection.opened_at
        grace_s = grace_window_s(
            grace_share=config.grace_share,
            overlap_steps=config.overlap,
            step_time_s=self._step_time_s(),
            quorum_s=quorum_s,
            sync_s=self.sync_s + membership.slowest_round_trip_s(),
        )
        return QuorumView(
            now=core.now,
            opened_at=collection.opened_at,
            quorum_at=collection.quorum_at,
            given=len(collection.given),
            missing=missing,
            min_quorum=config.min_quorum,
            rank=rank,
            takeover_s=self.takeover_s(),
            grace_s=grace_s,
        )

    # -- commit --------------------------------------------------------------------------------------------------------

    def commit(self, event: Merged) -> CommitHeader | None:
        """The merge is done: the commit to make, or None if the shard has moved on meanwhile."""
        core, collection = self.core, self.collections[event.shard]
        head = core.head(event.shard)
        if not collection.is_merging or head.id != event.base:
            core.note("info", "commit", f"shard {event.shard}: merge for {event.base[:8]} dropped, the head moved on")
            return None
        contributors = tuple(collection.given[learner].contributor for learner in sorted(collection.given))
        return CommitHeader(
            shard=event.shard,
            version=head.version + 1,
            parent=head.id,
            step=collection.step,
            owner=core.config.peer,
            contributors=contributors,
            tokens=head.tokens + sum(c.tokens for c in contributors),
            payload=event.payload,
            result=event.result,
        )

    def merge_failed(self, shard: ShardId, culprit: PeerId | None, reason: str) -> None:
        """A merge did not work: drop the contribution to blame (all of them if nobody is named) and look again."""
        collection = self.collections[shard]
        self.core.note("warning", "merge", f"shard {shard}: {reason}")
        collection.is_merging = False
        for learner in [x for x in collection.given if culprit is None or peer_of(x) == culprit]:
            del collection.given[learner]
        self.consider(shard)

    def moved(self, shard: ShardId, parent: Digest | None) -> None:
        """The shard has a new head (``parent`` is what it extends): collect for the next version."""
        core = self.core
        began = self.merge_began.pop(shard, None)
        if began is not None and parent is not None:
            self.sync_s += SMOOTHING * (core.now - began - self.sync_s)
        core.alarms.cancel(("close", shard))
        self.collections[shard] = Collection()
        early, self.early[shard] = self.early[shard], {}
        for sender in sorted(early):
            self.collect(sender, early[sender])

    def payloads(self) -> set[Digest]:
        """Payloads that may still be merged here."""
        held = {c.payload for collection in self.collections for c in collection.given.values()}
        return held | {c.payload for waiting in self.early for c in waiting.values()}
