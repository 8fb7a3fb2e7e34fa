"""The learner's side of a round: snapshot, encode, offer to the owner, and to the next owner if that one fails.

Rules of this file:
1. A shard has at most one open round, and a fragment at most one snapshot that is being encoded. A round that is
   announced while the shard's previous round is open is put off until that one ends. Of several such rounds only the
   newest counts.
2. A shard's round ends when its head has moved. If the new commit belongs to an older round, the newest round opens at
   once.
3. A contribution covers all of the learner's tokens that the base's chain has not merged.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

from msgspec.structs import replace

from p2pdiloco.protocol.aggregation import Aggregation
from p2pdiloco.protocol.block_assignment import BlockAssignment
from p2pdiloco.protocol.chain import MARK_LIFE_LOGS, NO_MARK, HeadChange, SizeOf, is_heavier
from p2pdiloco.protocol.effects import AdoptStep, Encode, PauseLearner, Snapshot
from p2pdiloco.protocol.events import Encoded, Mark, ShardState, Snapshotted
from p2pdiloco.protocol.health import HealthWarnings
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, PeerId, ShardId, peer_of
from p2pdiloco.protocol.messages import CommitHeader, Contribution, Contributor, Head, Round
from p2pdiloco.protocol.state import Core, LearnerView

# -- Token budget ------------------------------------------------------------------------------------------------------
# Rules of this file:
# 1. The budget counts merged tokens, as the chains record them. It does not depend on which peer is fastest, on how
#    many peers join, or on lost steps. Shards are merged one after the other, so the run's progress is their mean.
# 2. When the budget ends, learners still hold the tokens trained since their last rounds: half a round's on average.
#    Merging will add these, so the learners stop that much earlier (C7a).


TOLD: Final = 500
"""Share of the budget (1 in 500) after which the learner is notified, because its learning rate follows the budget."""


class TokenBudget:
    """Token budget of one run. Without a limit it does nothing."""

    __slots__ = ("_core", "_merged", "_newest", "_paused", "_under_way", "announced")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._merged = [0] * len(core.chains)
        """By shard: tokens of its chain."""
        self._newest = [0] * len(core.chains)
        """By shard: tokens that its newest version added."""
        self._under_way = 0
        """Sum of ``_newest``."""
        self.announced = 0
        """Merged tokens that the learner was last told of."""
        self._paused: LearnerId | None = None
        """The learner that was asked to stop."""

    @property
    def merged(self) -> int:
        """Merged tokens of the run: the mean over its shards."""
        return sum(self._merged) // len(self._merged)

    @property
    def is_spent(self) -> bool:
        """True if the merged tokens, with those under way, use up the budget."""
        total = self._core.end.tokens
        return 0 < total <= self.merged + self._under_way // (2 * len(self._merged))

    @property
    def is_over(self) -> bool:
        """True if the run has reached its last step, or its budget is spent."""
        return self._core.step >= self._core.end.steps or self.is_spent

    @property
    def last_step(self) -> int:
        """Estimated global step at which the run ends."""
        core = self._core
        if not core.end.tokens:
            return core.end.steps
        if self.is_spent:
            return core.step
        rest = core.end.tokens / max(1, self.merged)
        return min(core.end.steps, max(core.step + 1, round(core.step * rest)))

    def on_head_changed(self, change: HeadChange) -> None:
        """Count the tokens of the shard's new head. Report them to the learner, and stop it if the budget is spent."""
        core, shard, tokens = self._core, change.shard, change.head.tokens
        if not core.end.tokens:
            return
        newest = max(0, tokens - self._merged[shard])
        self._under_way += newest - self._newest[shard]
        self._merged[shard], self._newest[shard] = tokens, newest
        merged = self.merged
        if core.learner is not None and abs(merged - self.announced) * TOLD >= core.end.tokens:
            self.announced = merged
            core.effects.append(AdoptStep(core.step, merged))
        self.stop_if_spent()

    def on_end_moved(self) -> None:
        """Forget that the learner was asked to stop at the earlier end."""
        self._paused = None

    def has_stopped(self, learner: LearnerId) -> bool:
        """Return whether the learner was asked to stop, because the budget is spent."""
        return self._paused == learner

    def stop_if_spent(self) -> None:
        """Stop the learner if the budget is spent."""
        core = self._core
        learner = core.learner
        if not core.is_current or core.departure == "leaving" or learner is None or learner.is_paused:
            return
        if learner.id == self._paused:
            return
        if self.is_spent:
            self._paused = learner.id
            core.effects.append(PauseLearner())


# -- Ledger of own contributions to one shard --------------------------------------------------------------------------
# A chain merges a prefix of a learner's tokens, so one number, the mark, says how far a chain has merged this learner.
# Each contribution that was sent is an edge from one mark to a later one. Moving to another head moves the mark
# forwards, or backwards after a fork. The walk along the edges says which contributions leave the learner's delta
# (settled) and which return to it (restored). This one rule covers carry, refusal, takeover, and forks.
#
# The delta loses what was *sent*, that is, the quantized values. So the quantization error stays in it and is sent with
# the next contribution: error feedback without a separate buffer.


class Edge(NamedTuple):
    """One contribution: the learner's tokens from ``start`` to ``stop``, and its payload."""

    start: int
    stop: int
    payload: Digest


class Walk(NamedTuple):
    """Payloads that leave the learner's delta (settled) and payloads that return to it (restored)."""

    settled: tuple[Digest, ...]
    restored: tuple[Digest, ...]


STAY = Walk((), ())


class Ledger:
    """The last ``depth`` contributions of the current learner to one shard."""

    __slots__ = ("edges",)

    def __init__(self, depth: int) -> None:
        self.edges: deque[Edge] = deque(maxlen=depth)

    def record(self, start: int, stop: int, payload: Digest) -> None:
        """Add a contribution. If a range was sent twice, on different bases, walks use the newer one."""
        self.edges.append(Edge(start, stop, payload))

    @property
    def last(self) -> int:
        """Furthest mark that a contribution may have led to; -1 if there was none."""
        return max((edge.stop for edge in self.edges), default=-1)

    def walk(self, old: int, new: int) -> Walk | None:
        """Return the shortest path along contributions from mark ``old`` to ``new``, or None if there is none."""
        if old == new:
            return STAY
        came: dict[int, tuple[int, Edge, bool]] = {old: (old, Edge(0, 0, Digest("")), True)}
        queue = deque([old])
        while queue and new not in came:
            at = queue.popleft()
            for edge in reversed(self.edges):
                if edge.start == at and edge.stop not in came:
                    came[edge.stop] = (at, edge, True)
                    queue.append(edge.stop)
                elif edge.stop == at and edge.start not in came:
                    came[edge.start] = (at, edge, False)
                    queue.append(edge.start)
        if new not in came:
            return None
        settled: list[Digest] = []
        restored: list[Digest] = []
        at = new
        while at != old:
            at, edge, is_forward = came[at]
            (settled if is_forward else restored).append(edge.payload)
        return Walk(tuple(reversed(settled)), tuple(reversed(restored)))


# -- Contributions -----------------------------------------------------------------------------------------------------


LONE_ROUNDS: Final = 8
"""Maximum length of a round of a peer alone, in rounds of H steps."""
LONE_S: Final = 10.0
"""The same in seconds (but at least H steps): a power failure costs no more training."""


class FragmentRound:
    """State of one fragment's rounds."""

    __slots__ = ("asked_at", "began_at", "encoding", "is_snapshotting", "missed", "open", "step", "steps", "tokens")

    def __init__(self) -> None:
        self.step = 0
        """Global step of the newest round."""
        self.began_at = -math.inf
        """Time at which it began."""
        self.open: dict[ShardId, tuple[Digest, float]] = {}
        """Shards with an open round: the head at its opening, and the time of its opening."""
        self.is_snapshotting = False
        self.asked_at = 0.0
        """Time at which the snapshot was asked for, or at which the learner last answered."""
        self.encoding: dict[ShardId, tuple[Digest, Contributor]] = {}
        """Shards that are being encoded: the head that the outer gradient is relative to, and its range."""
        self.missed: dict[ShardId, float] = {}
        """Shards that were merged before this learner's answer was ready: the time at which their round opened."""
        self.steps = 0
        """The learner's steps at the last snapshot."""
        self.tokens = 0
        """The learner's tokens at the last snapshot."""


class Pending:
    """A contribution that is neither merged nor superseded."""

    __slots__ = ("asked", "beyond", "contribution", "has_answered", "is_leaving", "rank", "target")

    def __init__(self, contribution: Contribution) -> None:
        self.contribution = contribution
        self.rank = 0
        """Number of owners that have missed their takeover time."""
        self.asked: set[PeerId] = set()
        """Owners that were offered it during the current pass over the ranking."""
        self.beyond: set[PeerId] = set()
        """Owners that refused it because their head wins over its base, so that they can no longer merge it."""
        self.target = PeerId("")
        self.has_answered = False
        """Whether the target has refused it because its head wins over the base."""
        self.is_leaving = False
        """Whether the target was known to leave when it was asked."""


class Contributions:
    """Manages the rounds of all fragments and this learner's contributions."""

    def __init__(self, core: Core, aggregation: Aggregation, block_assignment: BlockAssignment) -> None:
        self.core = core
        self.aggregation = aggregation
        self.block_assignment = block_assignment
        self.rounds = [FragmentRound() for _ in core.config.fragments]
        self.ledgers = [Ledger(core.config.log_length) for _ in core.chains]
        self.pending: dict[ShardId, Pending] = {}
        self.health = HealthWarnings(core)
        self.budget = TokenBudget(core)

    def on_learner_changed(self) -> None:
        """Drop the unfinished work of the previous learner."""
        self.pending.clear()
        self.health.on_learner_changed()
        for ledger in self.ledgers:
            ledger.edges.clear()
        for fragment, sync_round in enumerate(self.rounds):
            sync_round.is_snapshotting = False
            sync_round.encoding.clear()
            sync_round.missed.clear()
            if sync_round.open:
                self._ask_for_snapshot(FragmentId(fragment))

    # -- rounds --------------------------------------------------------------------------------------------------------

    def on_steps(self, learner: LearnerView, steps: int) -> None:
        """Handle ``steps`` more inner steps of the learner: announce the rounds that became due.

        The steps are added to the step that the learner had reached, not to the swarm's. A step that took place while
        other peers advanced does not count twice.
        """
        config = self.core.config
        first = self.core.step + 1
        self.core.step = learner.reached = max(self.core.step, learner.reached + steps)
        if not self.core.is_current:
            return
        for fragment in range(len(self.rounds)):
            since = (self.core.step - config.offset(FragmentId(fragment))) % config.sync_every
            due = self.core.step - since
            if due >= first and due > 0 and not self._can_wait(FragmentId(fragment), due):
                self.open(FragmentId(fragment), due, is_mine=True)

    def _can_wait(self, fragment: FragmentId, step: int) -> bool:
        """Return whether a round at ``step`` can wait, since it would serve nobody (rule T1d).

        Nobody is there, and nobody else's work is in the chains, so there is no fork that a chain of rarer versions,
        which counts fewer tokens, could lose to.
        """
        core, sync_round = self.core, self.rounds[fragment]
        if not core.config.takes_mean or core.membership.peers or core.departure or core.end.tokens:
            return False
        if step - sync_round.step >= LONE_ROUNDS * core.config.sync_every or core.now - sync_round.began_at >= LONE_S:
            return False
        marks = (core.chains[shard].marks for shard in core.config.fragments[fragment])
        return all(peer_of(learner) == core.config.peer for mark in marks for learner in mark)

    def adopt_step(self, claim: int) -> int:
        """Advance to the step ``claim`` that another peer reports, as far as it is plausible; return that step."""
        core = self.core
        step = core.plausible(claim)
        if step > core.step:
            core.pace.use(step - core.step, core.now)
            core.step = step
            if core.learner is not None:
                core.effects.append(AdoptStep(step, self.budget.announced))
        return step

    def on_current(self) -> None:
        """Start from the states that have arrived: take the median step of the shards and ignore earlier rounds."""
        core = self.core
        self._take_step_of_chains()
        for fragment, sync_round in zip(core.config.fragments, self.rounds, strict=True):
            sync_round.step = max(sync_round.step, *(min(core.chains[shard].step, core.step) for shard in fragment))

    def on_end_moved(self) -> None:
        """Count the steps that the chains have made beyond the earlier end."""
        self.budget.on_end_moved()
        if self.core.is_current:
            self._take_step_of_chains()

    def _take_step_of_chains(self) -> None:
        core = self.core
        steps = sorted(chain.step for chain in core.chains)
        core.step = max(core.step, min(steps[len(steps) // 2], core.end.steps))

    def on_round(self, peer: PeerId, message: Round) -> None:
        """Open a round that another peer announces. This peer's group is told of what comes from another one."""
        participation, shard = self.core.participation, self.core.config.fragments[message.fragment][0]
        is_news = self.open(message.fragment, self.adopt_step(message.step), is_mine=False)
        if is_news and not participation.is_near(shard, peer):
            self.core.send(participation.near(shard), self.announcement(message.fragment))

    def open(self, fragment: FragmentId, step: int, *, is_mine: bool) -> bool:
        """Open a round for those shards of the fragment whose last round is over. Return whether the round is news.

        From the last plausible step on, rounds cannot be told apart. There, a round is news as long as one of the
        shards has none open.
        """
        sync_round, core = self.rounds[fragment], self.core
        shards = core.config.fragments[fragment]
        if step <= sync_round.step and (step < core.latest_step or sync_round.open.keys() >= set(shards)):
            return False
        sync_round.step, sync_round.began_at = max(sync_round.step, step), core.now
        if is_mine:
            bridges = core.participation.bridges(shards[0], f"{core.config.peer}/{step}").values()
            core.send((*core.participation.near(shards[0]), *bridges), self.announcement(fragment))
        for shard in shards:
            if shard in sync_round.open:
                core.note("debug", "round", f"shard {shard} step {step} put off: its last round is still open")
            else:
                self._open_shard(sync_round, shard)
        self._ask_for_snapshot(fragment)
        return True

    def _open_shard(self, sync_round: FragmentRound, shard: ShardId) -> None:
        sync_round.open[shard] = (self.core.head(shard).id, self.core.now)
        self.aggregation.open(shard, sync_round.step)

    def announcement(self, fragment: FragmentId) -> Round:
        """Return the message that announces the newest round to other peers."""
        heads = tuple(self.core.head(shard) for shard in self.core.config.fragments[fragment])
        return Round(fragment, self.rounds[fragment].step, heads)

    def on_head_changed(self, change: HeadChange) -> None:
        """End the shard's round: a pending contribution is merged or stale. Open the newest round that was put off."""
        core, shard = self.core, change.shard
        has_answered = self.pending.pop(shard, None) is not None
        core.alarms.cancel(("takeover", shard))
        fragment = core.fragment_of[shard]
        sync_round, step = self.rounds[fragment], min(core.chains[shard].step, core.step)
        opened = sync_round.open.pop(shard, None)
        if opened is not None:
            self.aggregation.record_round(core.now - opened[1])
            if not has_answered and (sync_round.is_snapshotting or shard in sync_round.encoding):
                sync_round.missed[shard] = opened[1]
        if sync_round.step > step and core.is_current:
            self._open_shard(sync_round, shard)
            self._ask_for_snapshot(fragment)
        sync_round.step = max(sync_round.step, step)

    # -- snapshot and encode -------------------------------------------------------------------------------------------

    def _ask_for_snapshot(self, fragment: FragmentId) -> None:
        """Ask the learner for a snapshot, unless one is under way or all open shards have a contribution."""
        sync_round = self.rounds[fragment]
        if self.core.learner is None or sync_round.is_snapshotting or sync_round.encoding:
            return
        if not all(map(self.has_given, sync_round.open)):
            sync_round.is_snapshotting, sync_round.asked_at = True, self.core.now
            self.core.effects.append(Snapshot(fragment, sync_round.step))

    def on_snapshot(self, event: Snapshotted) -> None:
        """Encode the shards of a fragment that the learner has copied, or report that there is nothing to give."""
        sync_round, core = self.rounds[event.fragment], self.core
        if core.learner is None or not sync_round.is_snapshotting:
            return
        sync_round.is_snapshotting = False
        self.health.on_snapshot()
        for other in self.rounds:
            other.asked_at = core.now  # the learner copies fragments one after the other, so none of them is overdue
        sync_round.steps, sync_round.tokens = event.steps, event.tokens
        for shard in sync_round.missed.keys() - sync_round.encoding.keys():
            self._record_answer(sync_round.missed.pop(shard))
        for shard in sync_round.open:
            if self.has_given(shard) or self.aggregation.collections[shard].is_closed:
                continue
            if sync_round.tokens > core.learner.marks[shard].tokens:
                head, contributor = core.head(shard), self._range(core.learner, shard, sync_round)
                sync_round.encoding[shard] = (head.id, contributor)
                core.effects.append(Encode(shard, head, contributor))
            else:
                self._give_nothing(shard)

    def check_health(self) -> None:
        """Update the health warnings. Called at each heartbeat."""
        asked = [sync_round.asked_at for sync_round in self.rounds if sync_round.is_snapshotting]
        if asked:
            self.health.on_silence(self.core.now - min(asked))
        self.health.check_progress()

    def has_given(self, shard: ShardId) -> bool:
        """Return whether this learner has tokens on offer for the shard's next version."""
        pending = self.pending.get(shard)
        return pending is not None and pending.contribution.contributor.tokens > 0

    def on_encoded(self, event: Encoded) -> None:
        """Offer a shard's encoded outer gradient, unless its base is no longer the head."""
        shard, given = event.shard, event.contributor
        sync_round = self.rounds[self.core.fragment_of[shard]]
        if sync_round.encoding.get(shard) == (event.base, replace(given, payload=b"", signature=b"")):
            self.health.on_encoded(shard)
            if shard in sync_round.open and event.base == self.core.head(shard).id:
                self.ledgers[shard].record(self._mark(shard).tokens, given.tokens_to, Digest(given.payload.hex()))
                self._contribute(shard, given, event.payload_bytes)
            self._finished_encoding(sync_round, shard)

    def on_encode_failed(self, shard: ShardId, reason: str) -> None:
        """Send an empty contribution after a failed encoding, so that no owner waits for it."""
        sync_round = self.rounds[self.core.fragment_of[shard]]
        if shard in sync_round.encoding:
            self.core.note("debug", "contribution", f"shard {shard} not encoded: {reason}")
            if shard in sync_round.open and sync_round.encoding[shard][0] == self.core.head(shard).id:
                self._give_nothing(shard)
                self.health.on_encode_failed(shard, reason)
            self._finished_encoding(sync_round, shard)

    def _finished_encoding(self, sync_round: FragmentRound, shard: ShardId) -> None:
        sync_round.encoding.pop(shard)
        if shard in sync_round.missed:
            self._record_answer(sync_round.missed.pop(shard))
        if not sync_round.encoding and any(s not in self.pending for s in sync_round.open):
            self._ask_for_snapshot(self.core.fragment_of[shard])

    # -- offer ---------------------------------------------------------------------------------------------------------

    def _mark(self, shard: ShardId) -> Mark:
        assert self.core.learner is not None
        return self.core.learner.marks[shard]

    def _give_nothing(self, shard: ShardId) -> None:
        assert self.core.learner is not None
        mark = self._mark(shard)
        self._contribute(shard, Contributor(self.core.learner.id, mark.tokens, mark.tokens, mark.steps, mark.steps), 0)

    def _contribute(self, shard: ShardId, contributor: Contributor, payload_bytes: int) -> None:
        sync_round = self.rounds[self.core.fragment_of[shard]]
        base = self.core.head(shard)
        self._record_answer(sync_round.open[shard][1])
        self.pending[shard] = Pending(Contribution(shard, base, sync_round.step, contributor, payload_bytes))
        self._offer(shard)

    def _record_answer(self, opened_at: float) -> None:
        """Record how long the learner took to answer a round: as an owner, this peer waits for it as for others."""
        self.aggregation.response_times.record(self.core.config.peer, self.core.now - opened_at)

    def _range(self, learner: LearnerView, shard: ShardId, sync_round: FragmentRound) -> Contributor:
        """Return the range that the chain has not merged; if it exceeds the limits, its last part."""
        limits, mark = self.core.chains[shard].limits, learner.marks[shard]
        all_steps, all_tokens = max(1, sync_round.steps - mark.steps), sync_round.tokens - mark.tokens
        steps = min(all_steps, limits.range_steps)
        tokens = min(all_tokens * steps // all_steps, limits.most_tokens(steps))
        blocks = self.block_assignment.blocks_between(shard, sync_round.tokens - tokens, sync_round.tokens)[
            -limits.most_blocks(tokens) :
        ]
        return Contributor(
            learner.id,
            sync_round.tokens - tokens,
            sync_round.tokens,
            sync_round.steps - steps,
            sync_round.steps,
            blocks,
        )

    def _offer(self, shard: ShardId) -> None:
        """Send the pending contribution to the next owner in rank, if one is left that can merge it."""
        core, pending = self.core, self.pending[shard]
        ranked = core.participation.receivers(shard)
        if pending.contribution.contributor.tokens:
            laps = 1 + pending.rank // len(ranked)
            share = 0.5 if core.departure == "leaving" else 1.0  # another owner may be waiting for it (M4c)
            core.alarms.set(("takeover", shard), core.now + share * laps * self.aggregation.waits().takeover_s)
        if pending.beyond.issuperset(ranked):
            return
        if pending.asked.union(pending.beyond).issuperset(ranked):
            pending.asked.clear()
        pending.target = next(peer for peer in ranked if peer not in pending.asked and peer not in pending.beyond)
        pending.asked.add(pending.target)
        pending.has_answered, pending.is_leaving = False, pending.target in core.participation.leaving()
        if pending.target == core.config.peer:
            self.aggregation.collect(pending.target, pending.contribution)
        else:
            core.send((pending.target,), pending.contribution)

    def on_takeover_due(self, shard: ShardId) -> None:
        """Offer the contribution to the next owner, since the current one has not committed in time."""
        pending = self.pending.get(shard)
        if pending is not None:
            pending.rank += 1
            is_own_doing = pending.has_answered or self.core.departure == "leaving"  # half the time is no miss
            if not is_own_doing and not self.aggregation.bits(shard):
                self.core.membership.on_takeover_missed(
                    pending.target, self.core.now, self.aggregation.waits().takeover_s
                )
            self.core.note(
                "info",
                "takeover",
                f"shard {shard}: no commit from {pending.target} in time, offering to rank {pending.rank}",
            )
            self._offer(shard)

    def payloads(self, shard: ShardId, size_of: SizeOf, most_bytes: float) -> set[Digest]:
        """Return the payloads of a shard's contributions that are on offer, and the newest that fit ``most_bytes``.

        The learner may have to take them out of its delta, or put them back.
        """
        pending = self.pending.get(shard)
        found, total = {pending.contribution.payload} if pending is not None else set[Digest](), 0
        for edge in reversed(self.ledgers[shard].edges):
            total += size_of(edge.payload)
            if total > most_bytes:
                break
            found.add(edge.payload)
        return found

    def on_candidates_changed(self) -> None:
        """Offer contributions again whose owner has left or is leaving, and to a leaving one that all now rank first.

        If the owner has refused one for a newer head, that commit is on its way here, but control messages overtake
        payloads. So the contribution waits until the owner's connection ends.
        """
        self.aggregation.groups.on_candidates_changed()
        if not self.pending:
            return
        leaving, me = self.core.participation.leaving(), self.core.config.peer
        all_leaving = leaving | {me} if self.core.departure == "leaving" else leaving
        for shard, pending in list(self.pending.items()):
            able = self.core.participation.receivers(shard)
            pending.beyond.intersection_update(able)  # a peer that comes back may have an older head
            is_able = pending.target in able and (pending.is_leaving or pending.target not in leaving)
            knows_first = able[0] not in all_leaving or able[0] in pending.asked | pending.beyond
            if (is_able and knows_first) or pending.has_answered:
                continue
            how = "no longer first" if is_able else "gone"
            self.core.note("info", "takeover", f"shard {shard}: owner {pending.target} is {how}, offering again")
            self._offer(shard)

    def on_disconnected(self, peer: PeerId) -> None:
        """Wait no longer for the commits of a peer: what it sent has arrived, or is lost."""
        for pending in self.pending.values():
            pending.has_answered &= pending.target != peer
        self.on_candidates_changed()

    def on_payload_lost(self, shard: ShardId) -> None:
        """Contribute again after a payload on offer was lost here.

        The learner still has all of the data. Without this, the lost payload would be offered until another version
        arrives, and that version may need this contribution.
        """
        if self.has_given(shard):
            del self.pending[shard]
            self.core.alarms.cancel(("takeover", shard))
            self._ask_for_snapshot(self.core.fragment_of[shard])

    def on_refused(self, peer: PeerId, shard: ShardId, base: Digest, head: Head, reason: str) -> None:
        """Handle a refusal: the learner keeps its progress and contributes it on the next round."""
        pending = self.pending.get(shard)
        if pending is not None and pending.contribution.base.id == base:
            if is_heavier(head, pending.contribution.base):
                pending.beyond.add(peer)
                pending.has_answered |= peer == pending.target
            self.core.note(
                "debug", "contribution", f"shard {shard} refused ({reason}), their version is {head.version}"
            )


# -- Reconciliation: contributions that leave the learner's delta, and contributions that return to it -----------------
# Rules of this file:
# 1. The learner's own marks decide, along the edges of its ledger.
# 2. No other peer can speak for a learner. A chain that holds tokens which this learner never contributed is rejected.


class DeltaReconciliation:
    """Determines the payloads that leave the learner's delta, or return to it, when a chain changes."""

    def __init__(self, core: Core, contributions: Contributions) -> None:
        self.core = core
        self.contributions = contributions

    def problem(self, target: CommitHeader | ShardState) -> str | None:
        """Return why a commit or state is wrong about this peer's learner, or None."""
        learner = self.core.learner
        if learner is None:
            return None
        if isinstance(target, ShardState):
            shard, to_tokens = target.head.shard, self.mark_in(learner, target).tokens
        else:
            shard = target.shard
            to_tokens = max((c.tokens_to for c in target.contributors if c.learner == learner.id), default=0)
        if to_tokens <= max(learner.marks[shard].tokens, self.contributions.ledgers[shard].last):
            return None
        return f"it contains tokens that this peer's learner has not contributed (up to {to_tokens})"

    def moves(
        self, shard: ShardId, to_tokens: int | None
    ) -> tuple[LearnerId | None, tuple[Digest, ...], tuple[Digest, ...], bool]:
        """Return the learner's part of ``Apply`` and ``Install``: learner, settled, restored, ``is_reset``.

        ``to_tokens`` is the number of its tokens that the shard's chain will have merged (None: as before).
        """
        core, learner = self.core, self.core.learner
        walk: Walk | None = STAY
        if learner is not None and to_tokens is not None and not core.config.is_overwrite:
            walk = self.walk(shard, max(to_tokens, learner.floors[shard].tokens))
        learner_id = None if learner is None else learner.id
        if walk is None:
            return learner_id, (), (), True
        return learner_id, walk.settled, walk.restored, core.config.is_overwrite

    def walk(self, shard: ShardId, to_tokens: int) -> Walk | None:
        """Return the walk for a chain that comes to count ``to_tokens`` of the learner's tokens.

        Return None if no walk along the ledger leads there.
        """
        learner = self.core.learner
        assert learner is not None
        ledger = self.contributions.ledgers[shard]
        walk = ledger.walk(learner.marks[shard].tokens, to_tokens)
        if walk is None:
            self.core.note(
                "warning",
                "carry",
                f"shard {shard}: contributions between own tokens {learner.marks[shard].tokens} and {to_tokens} are "
                "no longer known, so the learner takes the global parameters and loses its unmerged progress",
            )
        return walk

    def on_head_changed(self, change: HeadChange) -> None:
        """Set the learner's mark to what the shard's chain has merged of it."""
        learner, shard = self.core.learner, change.shard
        if learner is None:
            return
        mark = self.core.chains[shard].marks.get(learner.id)
        if isinstance(change.taken, ShardState):
            own = self.mark_in(learner, change.taken)
        else:
            own = learner.marks[shard] if mark is None else mark
        learner.marks[shard] = own
        is_back = change.previous is not None and change.previous.id in self.core.abandoned
        if is_back:
            learner.floors[shard] = Mark(learner.tokens, learner.steps, own.version)
        learner.marks[shard] = max(own, learner.floors[shard], key=lambda mark: mark.tokens)
        if self.core.config.is_overwrite:
            learner.discard_unmerged(shard)

    def mark_in(self, learner: LearnerView, state: ShardState) -> Mark:
        """Return the learner's mark in a state's chain. A mark that the chain dropped for its age still counts."""
        own = learner.marks[state.head.shard]
        is_forgotten = state.head.version - own.version > MARK_LIFE_LOGS * self.core.config.log_length
        mark = dict(state.marks).get(learner.id, own if is_forgotten else NO_MARK)
        return max(mark, learner.floors[state.head.shard], key=lambda mark: mark.tokens)
