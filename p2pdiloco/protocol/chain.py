"""One shard's chain of commits as this peer sees it.

Rules of this file:
1. A commit extends the chain only if its parent is the head and no token of its ranges has been merged. A gap is
   allowed: a learner that was reset (``overwrite``, a fork deeper than its ledger) has thrown the tokens in it away.
2. Of two heads the one with more cumulative tokens wins; ties go to the larger id. Nothing else decides. What a
   contribution declares counts no further than ``counted_tokens`` says.
3. The log holds the last ``length`` commits; marks of learners that were last merged long before the head are dropped,
   by version alone, so that every peer drops the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from p2pdiloco.protocol.config import LEAST_FACTOR, MAX_COUNT, Limits
from p2pdiloco.protocol.counted_tokens import NOTHING_COUNTED, TokenCounts
from p2pdiloco.protocol.data_blocks import BlockLedger, Trained
from p2pdiloco.protocol.events import Mark, ShardState
from p2pdiloco.protocol.ids import Digest, LearnerId, PeerId, RunId, ShardId, digest_of, peer_of
from p2pdiloco.protocol.messages import MAX_CONTRIBUTORS, CommitHeader, Contributor, Head
from p2pdiloco.protocol.norm_bound import NO_NORM, NormBound

NO_MARK = Mark(0, 0, 0)
SizeOf = Callable[[Digest], int]
"""Bytes of a payload; 0 if it is not here."""
FIRST_RMS = 1.0
"""What parameters move in an inner step, at most, where nothing is known yet: far more than any do."""
MARK_LIFE_LOGS = 8
"""A mark lives for this many log lengths of versions without being touched."""


def no_size(_payload: Digest) -> int:
    """Count every payload as empty, for a peer that keeps all of a log."""
    return 0


def genesis_head(run: RunId, shard: ShardId, result: Digest) -> Head:
    """Version 0 of a shard: named by the run, so that chains of two runs can never meet."""
    return Head(shard, 0, digest_of(f"{run}/{shard}/{result}".encode()), 0)


def is_heavier(a: Head, b: Head) -> bool:
    """The fork rule: whether head ``a`` wins over head ``b`` of the same shard."""
    return (a.tokens, a.id) > (b.tokens, b.id)


def record_of(marks: Mapping[LearnerId, Mark], trained: Trained, norm_bound: NormBound = NO_NORM) -> Digest:
    """The digest of all that a state holds besides its tensors, its head and its step."""
    return digest_of(_encoder.encode((sorted(marks.items()), trained, *((norm_bound,) if norm_bound.counted else ()))))


_encoder = msgspec.msgpack.Encoder()


class Chain:
    """Head, marks and recent commits of one shard. ``head`` is None until the shard's state is here."""

    __slots__ = (
        "_first",
        "_most_tokens",
        "_run_tokens",
        "ancestry",
        "counts",
        "head",
        "ledger",
        "length",
        "limits",
        "log",
        "log_ids",
        "marks",
        "norm_bound",
        "shard",
        "step",
    )

    def __init__(
        self, shard: ShardId, length: int, blocks: int = 0, limits: Limits | None = None, elements: int = 0
    ) -> None:
        self.shard = shard
        self.length = length
        self.limits = limits = limits or Limits()
        self._most_tokens = MAX_COUNT - MAX_CONTRIBUTORS * limits.range_tokens
        """With more, the next commit might not be countable."""
        self._run_tokens = limits.run_tokens
        self.head: Head | None = None
        self.step = 0
        self.ledger = BlockLedger(blocks) if blocks and shard == 0 else None
        """Of shard 0: which blocks of data it has merged."""
        self.marks: dict[LearnerId, Mark] = {}
        self.norm_bound = NO_NORM
        self.counts = NOTHING_COUNTED
        self._first = FIRST_RMS * math.sqrt(elements) if elements else math.inf
        self.log: deque[CommitHeader] = deque(maxlen=length)
        self.log_ids: deque[Digest] = deque(maxlen=length)
        self.ancestry: deque[Digest] = deque(maxlen=length)
        """The heads before the head, oldest first; unlike the log it outlives a fetched state, which brings its own."""

    def extends(self, header: CommitHeader) -> bool:
        """Whether ``header`` is a child of the head."""
        return self.head is not None and header.parent == self.head.id and header.version == self.head.version + 1

    def is_merged(self, contributor: Contributor) -> bool:
        """Whether the chain holds some of these tokens."""
        return contributor.tokens_from < self.marks.get(contributor.learner, NO_MARK).tokens

    def range_problem(self, c: Contributor) -> str | None:
        """Why nobody can give this range to the next version (``c`` is a range), or None."""
        mark, limits = self.marks.get(c.learner, NO_MARK), self.limits
        if self.is_merged(c):
            return "its tokens are merged already"
        if c.tokens_to > mark.tokens + self._run_tokens or c.steps_to > mark.steps + limits.learner_steps:
            return "it counts further than a learner can come in the whole run"
        if self.head is not None and self.head.tokens > self._most_tokens:
            return "the chain cannot count further"
        return limits.range_problem(c.tokens, c.steps, len(c.blocks))

    def farthest(self, head: Head, lineage: Iterable[Digest]) -> float:
        """How far the state at ``head`` can be from this one's: so many versions lie between them, and a long one."""
        if self.head is None:
            return math.inf
        is_met = self.head.id in lineage or not set(self.ancestry).isdisjoint(lineage)
        versions = (
            abs(head.version - self.head.version) + 2 * self.length if is_met else head.version + self.head.version
        )
        turn = self.limits.turn_steps
        return (versions + self.limits.range_steps // turn) * self.norm_bound.longest(turn, turn, self._first)

    def record_after(self, version: int, contributors: Sequence[Contributor], length: float = 0.0) -> Digest:
        """What an owner signs of the chain's counts after a commit with these, ``length`` long: the digest of marks,
        blocks and norm bound."""
        marks, ledger, norm_bound = self._marks_after(version, contributors), self.ledger, self.norm_bound
        if length:
            norm_bound = norm_bound.after(length, max(c.steps for c in contributors), self.limits.turn_steps)
        if ledger is None:
            return record_of(marks, Trained(), norm_bound)
        after = ledger.copied()
        for c in contributors:
            after.add(c.blocks)
        return record_of(marks, after.state(), norm_bound)

    def count(self, contributors: Sequence[Contributor], factors: Sequence[int]) -> tuple[int, TokenCounts]:
        """The tokens for which the contributions of a next commit count, all together, and the counts after it."""
        return self.counts.count([c.tokens for c in contributors], self.limits.first_tokens, factors)

    def longest(self, contributors: Iterable[Contributor]) -> float:
        """Return the largest length of a merged outer gradient of these contributors."""
        steps = max(c.steps for c in contributors)
        return self.norm_bound.longest(steps, self.limits.turn_steps, self._first)

    def _marks_after(self, version: int, contributors: Iterable[Contributor]) -> dict[LearnerId, Mark]:
        oldest = version - MARK_LIFE_LOGS * self.length
        marks = {learner: mark for learner, mark in self.marks.items() if mark.version >= oldest}
        for c in contributors:
            marks[c.learner] = Mark(c.tokens_to, c.steps_to, version)
        return marks

    def latest_step(self) -> int:
        """The largest that the next commit may have."""
        return min(self.step, self.limits.run_steps) + self.limits.lead_steps

    def problem(self, header: CommitHeader) -> str | None:
        """Why ``header`` cannot be this chain's next commit, or None if it can."""
        if self.head is None or not self.extends(header):
            return f"its parent {header.parent[:8]} is not the head"
        previous, givers = "", set[PeerId]()
        for c in header.contributors:
            giver = peer_of(c.learner)
            if c.learner <= previous or giver in givers:
                return "its contributors are not sorted and distinct"
            previous = c.learner
            givers.add(giver)
            if c.tokens <= 0 or c.steps <= 0:
                return f"learner {c.learner} has an empty range"
            problem = self.range_problem(c)
            if problem is not None:
                return f"of learner {c.learner}: {problem}"
        if not header.contributors:
            return "it has no contributors"
        if header.factors and len(header.factors) != len(header.contributors):
            return "it has not one factor for each contributor"
        if any(not LEAST_FACTOR <= factor <= 100 for factor in header.factors):
            return f"a factor is not between {LEAST_FACTOR} and 100 per cent"
        tokens, counts = self.count(header.contributors, header.factors)
        if header.tokens != self.head.tokens + tokens or header.counts != counts:
            return "its cumulative tokens are wrong"
        if header.step > self.latest_step():
            return f"its step {header.step} is too far from its parent's, {self.step}"
        longest = self.longest(header.contributors)
        if not 0.0 <= header.length <= longest:
            return f"its step is {header.length:.3g} long, and after those before it no more than {longest:.3g} fits"
        if header.record != self.record_after(header.version, header.contributors, header.length):
            return "its record is not what the chain counts with it"
        return None

    def advance(self, header: CommitHeader, new_id: Digest) -> None:
        """Make ``header`` (checked by ``problem``) the head."""
        self.log.append(header)
        self.log_ids.append(new_id)
        if self.head is not None:
            self.ancestry.append(self.head.id)
        self.head = Head(self.shard, header.version, new_id, header.tokens)
        self.step = header.step
        self.norm_bound = self.norm_bound.after(header.length, header.steps, self.limits.turn_steps)
        self.counts = header.counts
        self.marks = self._marks_after(header.version, header.contributors)
        if self.ledger is not None:
            for c in header.contributors:
                self.ledger.add(c.blocks)

    def state_problem(self, state: ShardState) -> str | None:
        """Why no chain of this run has this state, or None."""
        head, limits = state.head, self.limits
        if not 0 <= state.step <= min(head.version * limits.lead_steps, limits.run_steps + limits.lead_steps):
            return f"step {state.step} cannot be reached with version {head.version}"
        if head.tokens > head.version * MAX_CONTRIBUTORS * limits.range_tokens:
            return f"{head.tokens} tokens cannot be merged in {head.version} versions"
        if not state.norm_bound.is_sound:
            return "its norm bound is malformed"
        for learner, mark in state.marks:
            counts = (mark.tokens, mark.steps, mark.version)
            if min(counts) < 0 or max(counts) > MAX_COUNT or mark.version > head.version:
                return f"its mark of learner {learner} is none"
        return None

    def replace(self, state: ShardState, lineage: Iterable[Digest] = ()) -> None:
        """Take a fetched (or restored) state, and the heads that led to it; the log starts anew."""
        self.log.clear()
        self.log_ids.clear()
        self.ancestry.clear()
        self.ancestry.extend(lineage)
        self.head = state.head
        self.step = state.step
        self.marks = dict(state.marks)
        self.norm_bound = state.norm_bound
        self.counts = state.counts
        if self.ledger is not None:
            self.ledger.restore(state.trained)

    def commits_after(self, known: Digest) -> list[CommitHeader] | None:
        """Commits from just after ``known`` to the head, or None if ``known`` is not on this chain's log."""
        if self.head is None:
            return None
        if known == self.head.id:
            return []
        for i, header in enumerate(self.log):
            if header.parent == known:
                return list(self.log)[i:]
        return None

    def payloads(self, size_of: SizeOf, most_bytes: int) -> set[Digest]:
        """Of the log, the youngest first, as many as have at most ``most_bytes`` together; the head's in any case."""
        found: set[Digest] = set()
        total = 0
        for header in reversed(self.log):
            total += size_of(header.payload)
            if found and total > most_bytes:
                break
            found.add(header.payload)
        return found

    def commits(self) -> set[Digest]:
        """Return the ids of the log's commits, and of the head, which a fetched state has without a log."""
        return {*self.ancestry, self.head.id} if self.head is not None else set(self.log_ids)

    def state(self) -> ShardState:
        """Return what travels with a state transfer."""
        assert self.head is not None
        trained = Trained() if self.ledger is None else self.ledger.state()
        return ShardState(
            self.head, self.step, tuple(sorted(self.marks.items())), trained, self.norm_bound, self.counts
        )


# -- Head changes ------------------------------------------------------------------------------------------------------


class HeadChange(NamedTuple):
    """A shard has a new head."""

    shard: ShardId
    previous: Head | None
    """None: the shard had no state."""
    head: Head
    taken: CommitHeader | ShardState
    """The commit that was applied, or the state that was installed."""


class HeadListener(Protocol):
    """A component of the machine that keeps something by head. ``Machine`` holds all of them, in order."""

    def on_head_changed(self, change: HeadChange) -> None:
        """Follow a shard's new head. The chain is at that head already."""
