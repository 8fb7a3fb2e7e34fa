"""The learner's side of a turn: snapshot, encode, offer to the owner, and to the next owner if that one fails.

Rules of this file:
1. A shard has at most one open turn, and a fragment at most one snapshot being encoded. A turn that is announced while
   the shard's last one is open is put off until that one is over; of several put off only the newest counts.
2. A shard's turn is over when its head has moved. If that commit is an older turn's, the newest is opened at once.
3. A contribution covers all of the learner's tokens that the base's chain has not merged.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from msgspec.structs import replace

from p2pdiloco.protocol.aggregation import Aggregation
from p2pdiloco.protocol.block_assignment import BlockAssignment
from p2pdiloco.protocol.chain import MARK_LIFE_LOGS, NO_MARK, SizeOf, is_heavier
from p2pdiloco.protocol.effects import AdoptStep, Encode, PauseLearner, Snapshot
from p2pdiloco.protocol.events import Encoded, Mark, ShardState, Snapshotted
from p2pdiloco.protocol.forwarding import hand_on_turn
from p2pdiloco.protocol.health import Trouble
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, PeerId, ShardId
from p2pdiloco.protocol.messages import CommitHeader, Contribution, Contributor, Head, Turn
from p2pdiloco.protocol.ownership import ranked_owners
from p2pdiloco.protocol.state import Core, LearnerView

# -- Token budget ------------------------------------------------------------------------------------------------------
# Rules of this file:
# 1. What counts is what is merged, as the chains say: it does not depend on who is fastest, on how many came, or on
#    steps that were lost. Shards are merged one after the other; of the run's progress their mean is taken.
# 2. When a budget ends, learners hold what they made since the last turns. That is half a turn's tokens in the mean,
#    which merging will add: the learners stop so much earlier (C7a).


TOLD: Final = 500
"""Parts of the budget in which a learner is told of it: its rate follows."""


class TokenBudget:
    """The token budget of one run; without a limit it only counts."""

    __slots__ = ("_core", "_merged", "_newest", "_paused", "_under_way", "told")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._merged = [0] * len(core.chains)
        """By shard: its chain's tokens."""
        self._newest = [0] * len(core.chains)
        """By shard: those of its last version."""
        self._under_way = 0
        """The sum of these."""
        self.told = 0
        """What the learner knows of ``merged``."""
        self._paused: LearnerId | None = None

    @property
    def merged(self) -> int:
        """Tokens, the mean over the shards."""
        return sum(self._merged) // len(self._merged)

    @property
    def is_spent(self) -> bool:
        """Whether what is merged, and what is on its way, is all that the run is to have."""
        total = self._core.config.sizes.budget
        return 0 < total <= self.merged + self._under_way // (2 * len(self._merged))

    @property
    def last_step(self) -> int:
        """The global step at which the run ends, as far as can be told."""
        core = self._core
        if not core.config.sizes.budget:
            return core.config.total_steps
        if self.is_spent:
            return core.step
        rest = core.config.sizes.budget / max(1, self.merged)
        return min(core.config.total_steps, max(core.step + 1, round(core.step * rest)))

    def moved(self, shard: ShardId) -> None:
        """The shard has a new head."""
        core, tokens = self._core, self._core.head(shard).tokens
        if not core.config.sizes.budget:
            return
        newest = max(0, tokens - self._merged[shard])
        self._under_way += newest - self._newest[shard]
        self._merged[shard], self._newest[shard] = tokens, newest
        merged = self.merged
        if core.learner is not None and abs(merged - self.told) * TOLD >= core.config.sizes.budget:
            self.told = merged
            core.effects.append(AdoptStep(core.step, merged))
        self.look()

    def look(self) -> None:
        """Stop the learner if there is nothing left to train."""
        core = self._core
        learner = core.learner
        if not core.is_current or core.departure or learner is None or learner.is_paused or learner.id == self._paused:
            return
        if self.is_spent:
            self._paused = learner.id
            core.effects.append(PauseLearner())


# -- Ledger of own contributions to one shard --------------------------------------------------------------------------
# A chain merges a prefix of a learner's tokens, so where a chain stands with this learner is one number: the mark.
# Every contribution that was sent is an edge from one mark to a later one. Moving to another head moves the mark,
# forwards or (after a fork) backwards; the walk along edges says which contributions leave the learner's delta
# (settled) and which return to it (restored). One rule thus serves carry, refusal, takeover, forks and their healing.
#
# Because what was *sent* (after quantization) is what leaves the delta, the quantization error stays in it and is sent
# with the next contribution: error feedback without a buffer of its own.


class Edge(NamedTuple):
    """One contribution: own tokens ``start`` to ``stop``, and its payload."""

    start: int
    stop: int
    payload: Digest


class Walk(NamedTuple):
    """Payloads that leave the learner's delta, and payloads that return to it."""

    settled: tuple[Digest, ...]
    restored: tuple[Digest, ...]


STAY = Walk((), ())


class Ledger:
    """The last ``depth`` contributions to one shard in this life of the learner."""

    __slots__ = ("edges",)

    def __init__(self, depth: int) -> None:
        self.edges: deque[Edge] = deque(maxlen=depth)

    def record(self, start: int, stop: int, payload: Digest) -> None:
        """Remember a contribution; of the same range sent twice (another base), walks take the newer."""
        self.edges.append(Edge(start, stop, payload))

    @property
    def last(self) -> int:
        """The furthest mark that a contribution may have led to; -1 if there was none."""
        return max((edge.stop for edge in self.edges), default=-1)

    def walk(self, old: int, new: int) -> Walk | None:
        """From mark ``old`` to mark ``new`` along contributions, fewest first; None if they do not lead there."""
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


class FragmentTurn:
    """One fragment's turns."""

    __slots__ = ("asked_at", "encoding", "is_snapshotting", "open", "step", "steps", "tokens")

    def __init__(self) -> None:
        self.step = 0
        """Of the newest turn."""
        self.open: dict[ShardId, tuple[Digest, float]] = {}
        """Shards whose turn is open: the heads they had when it opened, and when that was."""
        self.is_snapshotting = False
        self.asked_at = 0.0
        """When that was asked for, or the learner has answered last."""
        self.encoding: dict[ShardId, tuple[Digest, Contributor]] = {}
        """Shards being encoded: the heads that their outer gradients are relative to, and the ranges."""
        self.steps = 0
        """The learner's counters at the last snapshot."""
        self.tokens = 0


class Pending:
    """A contribution that has not been merged or superseded."""

    __slots__ = ("asked", "beyond", "contribution", "rank", "target")

    def __init__(self, contribution: Contribution) -> None:
        self.contribution = contribution
        self.rank = 0
        """How many owners have let it wait."""
        self.asked: set[PeerId] = set()
        """On this lap through the owners."""
        self.beyond: set[PeerId] = set()
        """Those that refused it because their head wins over its base: they cannot merge it any more."""
        self.target = PeerId("")


class Contributions:
    """Turns of all fragments, and this learner's contributions."""

    def __init__(self, core: Core, merges: Aggregation, workload: BlockAssignment) -> None:
        self.core = core
        self.merges = merges
        self.workload = workload
        self.turns = [FragmentTurn() for _ in core.config.fragments]
        self.ledgers = [Ledger(core.config.log_length) for _ in core.chains]
        self.pending: dict[ShardId, Pending] = {}
        self.trouble = Trouble(core)
        self.budget = TokenBudget(core)

    def learner_changed(self) -> None:
        """Another learner, or none: what the last one left unfinished is void."""
        self.pending.clear()
        self.trouble.learner_changed()
        for ledger in self.ledgers:
            ledger.edges.clear()
        for fragment, turn in enumerate(self.turns):
            turn.is_snapshotting = False
            turn.encoding.clear()
            if turn.open:
                self._ask_for_snapshot(FragmentId(fragment))

    # -- turns ---------------------------------------------------------------------------------------------------------

    def stepped(self, learner: LearnerView, steps: int) -> None:
        """The learner made ``steps`` more inner steps: announce the turns that became due. It is as many steps further
        than where it was, or where the others are: a step during which others went on does not count twice."""
        config = self.core.config
        first = self.core.step + 1
        self.core.step = learner.reached = max(self.core.step, learner.reached + steps)
        if not self.core.is_current:
            return
        for fragment in range(len(self.turns)):
            since = (self.core.step - config.offset(FragmentId(fragment))) % config.sync_every
            due = self.core.step - since
            if due >= first and due > 0:
                self.open(FragmentId(fragment), due, is_mine=True)

    def adopt_step(self, claim: int) -> int:
        """Another peer is at ``claim``: this one is, too, as far as that is believed. Returns what is believed."""
        core = self.core
        step = core.plausible(claim)
        if step > core.step:
            core.pace.use(step - core.step, core.now)
            core.step = step
            if core.learner is not None:
                core.effects.append(AdoptStep(step, self.budget.told))
        return step

    def became_current(self) -> None:
        """All states are here: this peer is where most of them are, and no turn before that is news."""
        core = self.core
        steps = sorted(chain.step for chain in core.chains)
        core.step = max(core.step, min(steps[len(steps) // 2], core.config.total_steps))
        for fragment, turn in zip(core.config.fragments, self.turns, strict=True):
            turn.step = max(turn.step, *(min(core.chains[shard].step, core.step) for shard in fragment))

    def heard(self, sender: PeerId, message: Turn) -> None:
        """Another peer announces a turn: those that do not hear it hear of it from here."""
        if self.open(message.fragment, self.adopt_step(message.step), is_mine=False):
            hand_on_turn(self.core, sender, self.announcement(message.fragment))

    def open(self, fragment: FragmentId, step: int, *, is_mine: bool) -> bool:
        """Open a turn for those of the fragment's shards whose last one is over; whether it is news. Beyond the last
        step that is believed turns cannot be told apart: there it is as long as one of the shards has none open."""
        turn, core = self.turns[fragment], self.core
        shards = core.config.fragments[fragment]
        if step <= turn.step and (step < core.config.latest_step or turn.open.keys() >= set(shards)):
            return False
        turn.step = max(turn.step, step)
        if is_mine:
            core.send(core.membership.live, self.announcement(fragment))
        for shard in shards:
            if shard in turn.open:
                core.note("debug", "turn", f"shard {shard} step {step} put off: its last turn is still open")
            else:
                self._open_shard(turn, shard)
        self._ask_for_snapshot(fragment)
        return True

    def _open_shard(self, turn: FragmentTurn, shard: ShardId) -> None:
        turn.open[shard] = (self.core.head(shard).id, self.core.now)
        self.merges.open(shard, turn.step)

    def announcement(self, fragment: FragmentId) -> Turn:
        """The newest turn as others hear it."""
        heads = tuple(self.core.head(shard) for shard in self.core.config.fragments[fragment])
        return Turn(fragment, self.turns[fragment].step, heads)

    def moved(self, shard: ShardId) -> None:
        """The shard has a new head: what was pending is merged or stale, and its turn is over."""
        core = self.core
        self.budget.moved(shard)
        self.pending.pop(shard, None)
        core.alarms.cancel(("takeover", shard))
        fragment = core.fragment_of[shard]
        turn, step = self.turns[fragment], min(core.chains[shard].step, core.step)
        opened = turn.open.pop(shard, None)
        if opened is not None:
            self.merges.measured_turn(core.now - opened[1])
        if turn.step > step and core.is_current:
            self._open_shard(turn, shard)
            self._ask_for_snapshot(fragment)
        turn.step = max(turn.step, step)

    # -- snapshot and encode -------------------------------------------------------------------------------------------

    def _ask_for_snapshot(self, fragment: FragmentId) -> None:
        """Unless one is under way, or all that is open has been given to."""
        turn = self.turns[fragment]
        if self.core.learner is None or turn.is_snapshotting or turn.encoding:
            return
        if not all(map(self.has_given, turn.open)):
            turn.is_snapshotting, turn.asked_at = True, self.core.now
            self.core.effects.append(Snapshot(fragment, turn.step))

    def snapshotted(self, event: Snapshotted) -> None:
        """The learner copied a fragment: encode its shards, or say that there is nothing to give."""
        turn, core = self.turns[event.fragment], self.core
        if core.learner is None or not turn.is_snapshotting:
            return
        turn.is_snapshotting = False
        self.trouble.answered()
        for other in self.turns:
            other.asked_at = core.now  # it copies one after the other
        turn.steps, turn.tokens = event.steps, event.tokens
        for shard in turn.open:
            if self.has_given(shard) or self.merges.collections[shard].is_closed:
                continue
            if turn.tokens > core.learner.marks[shard].tokens:
                head, contributor = core.head(shard), self._range(core.learner, shard, turn)
                turn.encoding[shard] = (head.id, contributor)
                core.effects.append(Encode(shard, head, contributor))
            else:
                self._give_nothing(shard)

    def look(self) -> None:
        """Now and then: is anybody to be told of trouble?"""
        asked = [turn.asked_at for turn in self.turns if turn.is_snapshotting]
        if asked:
            self.trouble.unanswered(self.core.now - min(asked))
        self.trouble.look()

    def has_given(self, shard: ShardId) -> bool:
        """Whether tokens of ours are on offer for the shard's next version."""
        pending = self.pending.get(shard)
        return pending is not None and pending.contribution.contributor.tokens > 0

    def encoded(self, event: Encoded) -> None:
        """A shard's outer gradient is ready: offer it, unless its base is history."""
        shard, given = event.shard, event.contributor
        turn = self.turns[self.core.fragment_of[shard]]
        if turn.encoding.get(shard) == (event.base, replace(given, payload=b"", signature=b"")):
            self.trouble.encoded(shard)
            if shard in turn.open and event.base == self.core.head(shard).id:
                self.ledgers[shard].record(self._mark(shard).tokens, given.tokens_to, Digest(given.payload.hex()))
                self._contribute(shard, given, event.payload_bytes)
            self._finished_encoding(turn, shard)

    def encode_failed(self, shard: ShardId, reason: str) -> None:
        """Nothing to offer this time; the learner keeps its progress, and says so, that nobody waits for it."""
        turn = self.turns[self.core.fragment_of[shard]]
        if shard in turn.encoding:
            self.core.note("debug", "contribution", f"shard {shard} not encoded: {reason}")
            if shard in turn.open and turn.encoding[shard][0] == self.core.head(shard).id:
                self._give_nothing(shard)
                self.trouble.encode_failed(shard, reason)
            self._finished_encoding(turn, shard)

    def _finished_encoding(self, turn: FragmentTurn, shard: ShardId) -> None:
        turn.encoding.pop(shard)
        if not turn.encoding and any(s not in self.pending for s in turn.open):
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
        turn = self.turns[self.core.fragment_of[shard]]
        base = self.core.head(shard)
        self.pending[shard] = Pending(Contribution(shard, base, turn.step, contributor, payload_bytes))
        self._offer(shard)

    def _range(self, learner: LearnerView, shard: ShardId, turn: FragmentTurn) -> Contributor:
        """All that the chain has not merged; of more than anybody believes, the last."""
        limits, mark = self.core.chains[shard].limits, learner.marks[shard]
        all_steps, all_tokens = max(1, turn.steps - mark.steps), turn.tokens - mark.tokens
        steps = min(all_steps, limits.range_steps)
        tokens = min(all_tokens * steps // all_steps, limits.most_tokens(steps))
        blocks = self.workload.between(shard, turn.tokens - tokens, turn.tokens)[-limits.most_blocks(tokens) :]
        return Contributor(learner.id, turn.tokens - tokens, turn.tokens, turn.steps - steps, turn.steps, blocks)

    def _offer(self, shard: ShardId) -> None:
        """Give the pending contribution to the owner of its rank, if there is one who may merge it."""
        core, pending = self.core, self.pending[shard]
        version = pending.contribution.base.version + 1
        ranked = ranked_owners(core.config.run, shard, version, core.membership.owners.candidates)
        if pending.contribution.contributor.tokens:
            laps = 1 + pending.rank // len(ranked)
            core.alarms.set(("takeover", shard), core.now + laps * self.merges.takeover_s())
        if pending.beyond.issuperset(ranked):
            return
        if pending.asked.union(pending.beyond).issuperset(ranked):
            pending.asked.clear()
        pending.target = next(peer for peer in ranked if peer not in pending.asked and peer not in pending.beyond)
        pending.asked.add(pending.target)
        if pending.target == core.config.peer:
            self.merges.collect(pending.target, pending.contribution)
        else:
            core.send((pending.target,), pending.contribution)

    def takeover_due(self, shard: ShardId) -> None:
        """The owner did not commit in time: the next one gets the contribution, too."""
        pending = self.pending.get(shard)
        if pending is not None:
            pending.rank += 1
            if pending.target not in pending.beyond:
                self.core.membership.missed(pending.target, self.core.now, self.merges.takeover_s())
            self.core.note(
                "info",
                "takeover",
                f"shard {shard}: no commit from {pending.target} in time, offering to rank {pending.rank}",
            )
            self._offer(shard)

    def payloads(self, shard: ShardId, size_of: SizeOf, most_bytes: float) -> set[Digest]:
        """Of a shard's contributions what is still on offer, and the youngest that have at most ``most_bytes``
        together: the learner may have to take them out of its delta, or back into it."""
        pending = self.pending.get(shard)
        found, total = {pending.contribution.payload} if pending is not None else set[Digest](), 0
        for edge in reversed(self.ledgers[shard].edges):
            total += size_of(edge.payload)
            if total > most_bytes:
                break
            found.add(edge.payload)
        return found

    def candidates_changed(self) -> None:
        """Owners that are gone, or on their way out: their contributions go to the new owners at once."""
        if not self.pending:
            return
        able = {peer for peer, _ in self.core.membership.owners.candidates}
        for pending in self.pending.values():
            pending.beyond &= able  # who comes back may have less
        for shard in [s for s, p in self.pending.items() if p.target not in able]:
            pending = self.pending[shard]
            self.core.note("info", "takeover", f"shard {shard}: owner {pending.target} is gone, offering again")
            self._offer(shard)

    def lost(self, shard: ShardId) -> None:
        """What is on offer cannot be had here any more. The learner, who has it all, gives anew: else the same would be
        offered until another version comes, which may need it."""
        if self.has_given(shard):
            del self.pending[shard]
            self.core.alarms.cancel(("takeover", shard))
            self._ask_for_snapshot(self.core.fragment_of[shard])

    def refused(self, peer: PeerId, shard: ShardId, base: Digest, head: Head, reason: str) -> None:
        """An owner refused: the learner keeps its progress and contributes it on the next turn."""
        pending = self.pending.get(shard)
        if pending is not None and pending.contribution.base.id == base:
            if is_heavier(head, pending.contribution.base):
                pending.beyond.add(peer)
            self.core.note(
                "debug", "contribution", f"shard {shard} refused ({reason}), their version is {head.version}"
            )


# -- Reconciliation: which contributions leave the learner's delta, and which return to it -----------------------------
# Rules of this file:
# 1. The learner's own marks decide, by the edges of its ledger.
# 2. Nobody can speak in a learner's name: a chain that holds tokens which it never gave is not taken.


class DeltaReconciliation:
    """Between chains and the learner."""

    def __init__(self, core: Core, contributions: Contributions) -> None:
        self.core = core
        self.contributions = contributions

    def problem(self, target: CommitHeader | ShardState) -> str | None:
        """Why what a commit or a state says of this peer's learner is not so, or None."""
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
        return f"it holds tokens of this peer's learner that it has not given, up to {to_tokens}"

    def moves(
        self, shard: ShardId, to_tokens: int | None
    ) -> tuple[LearnerId | None, tuple[Digest, ...], tuple[Digest, ...], bool]:
        """What ``Apply`` and ``Install`` say of the learner, when the shard's chain comes to count its tokens up to
        ``to_tokens`` (None: as before): whose delta it is, what is settled, what is restored, whether it is reset."""
        core, learner = self.core, self.core.learner
        walk: Walk | None = STAY
        if learner is not None and to_tokens is not None and not core.config.is_overwrite:
            walk = self.walk(shard, to_tokens)
        who = None if learner is None else learner.id
        return (who, (), (), True) if walk is None else (who, walk.settled, walk.restored, core.config.is_overwrite)

    def walk(self, shard: ShardId, to_tokens: int) -> Walk | None:
        """What leaves the learner's delta, and what returns to it, when the shard's chain counts its tokens up to
        ``to_tokens``; None if that cannot be told."""
        learner = self.core.learner
        assert learner is not None
        ledger = self.contributions.ledgers[shard]
        walk = ledger.walk(learner.marks[shard].tokens, to_tokens)
        if walk is None:
            self.core.note(
                "warning",
                "carry",
                f"shard {shard}: contributions between own tokens {learner.marks[shard].tokens} and {to_tokens} are "
                "forgotten, the learner takes the global parameters and loses its unmerged progress",
            )
        return walk

    def move_mark(self, shard: ShardId, target: CommitHeader | ShardState) -> None:
        """The shard's chain has become ``target``'s: how far it has merged the learner."""
        learner = self.core.learner
        if learner is None:
            return
        mark = self.core.chains[shard].marks.get(learner.id)
        if isinstance(target, ShardState):
            own = self.mark_in(learner, target)
        else:
            own = learner.marks[shard] if mark is None else mark
        learner.marks[shard] = own
        if self.core.config.is_overwrite:
            learner.threw_away(shard)

    def mark_in(self, learner: LearnerView, state: ShardState) -> Mark:
        """How far a state's chain has merged the learner. What it may have forgotten for its age stays merged."""
        own = learner.marks[state.head.shard]
        is_forgotten = state.head.version - own.version > MARK_LIFE_LOGS * self.core.config.log_length
        return dict(state.marks).get(learner.id, own if is_forgotten else NO_MARK)
