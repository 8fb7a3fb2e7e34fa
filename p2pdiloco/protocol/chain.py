"""One shard's chain of commits as this peer sees it.

Rules of this file:
1. A commit extends the chain only if its parent is the head and no token of its ranges has been merged. Gaps are
   allowed: a learner that was reset (``overwrite``, a fork deeper than its ledger) has discarded the tokens in between.
2. Of two heads the one with more cumulative tokens wins; ties go to the larger id. Nothing else decides. A
   contribution's declared tokens count only as far as ``counted_tokens`` allows.
3. The log holds the last ``length`` commits. Marks of learners that were last merged long before the head are dropped.
   Only the version decides, so that every peer drops the same marks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import msgspec

from p2pdiloco.protocol.config import LEAST_FACTOR, LONGEST_RUN, MAX_COUNT, Limits
from p2pdiloco.protocol.counted_tokens import NOTHING_COUNTED, TokenCounts
from p2pdiloco.protocol.data_blocks import BlockLedger, Trained
from p2pdiloco.protocol.events import Mark, ShardState
from p2pdiloco.protocol.groups import group_bits, group_of, group_of_print
from p2pdiloco.protocol.ids import Digest, LearnerId, PeerId, RunId, ShardId, digest_of, peer_of
from p2pdiloco.protocol.messages import MAX_CONTRIBUTORS, MOST_LENGTH, CommitHeader, Contributor, Head
from p2pdiloco.protocol.norm_bound import NO_NORM, NormBound, counted_steps

NO_MARK = Mark(0, 0, 0)
SizeOf = Callable[[Digest], int]
"""Returns the bytes of a payload, or 0 if it is not here."""
RECENT_VERSIONS = 4
"""An owner waits for peers of other groups, and for groups, that contributed to so many newest versions."""
FIRST_RMS = 1.0
"""Maximum RMS move of parameters in an inner step before any was measured; real moves are far smaller."""
MARK_LIFE_LOGS = 8
"""A mark lives for this many log lengths of versions without being touched."""


def no_size(_payload: Digest) -> int:
    """Return 0 for every payload, for a peer that keeps a whole log regardless of its size."""
    return 0


def genesis_head(run: RunId, shard: ShardId, result: Digest) -> Head:
    """Return version 0 of a shard. Its id depends on the run, so that chains of two runs never share a head."""
    return Head(shard, 0, digest_of(f"{run}/{shard}/{result}".encode()), 0)


def is_heavier(a: Head, b: Head) -> bool:
    """Return whether head ``a`` wins over head ``b`` of the same shard (fork rule)."""
    return (a.tokens, a.id) > (b.tokens, b.id)


def record_of(marks: Mapping[LearnerId, Mark], trained: Trained, norm_bound: NormBound = NO_NORM) -> Digest:
    """Return the digest of everything that a state holds besides its tensors, its head and its step."""
    return digest_of(_encoder.encode((sorted(marks.items()), trained, *((norm_bound,) if norm_bound.counted else ()))))


_encoder = msgspec.msgpack.Encoder()


class Successor(NamedTuple):
    """Marks, norm bound and record of a chain after its next commit."""

    marks: dict[LearnerId, Mark]
    norm_bound: NormBound
    record: Digest
    """Digest of the marks, trained blocks and norm bound, which the commit's owner signs."""


class Chain:
    """Head, marks and recent commits of one shard. ``head`` is None until the shard's state has been installed."""

    __slots__ = (
        "_first",
        "_judged",
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
        """Beyond this many tokens the next commit might exceed the range of a ``Count``."""
        self._run_tokens = limits.run_tokens
        self.head: Head | None = None
        self.step = 0
        self.ledger = BlockLedger(blocks) if blocks and shard == 0 else None
        """Blocks of data that the chain has merged; shard 0 only."""
        self.marks: dict[LearnerId, Mark] = {}
        self.norm_bound = NO_NORM
        self.counts = NOTHING_COUNTED
        self._first = FIRST_RMS * math.sqrt(elements) if elements else math.inf
        self._judged: tuple[CommitHeader, Successor] | None = None
        """The child of the head that was found to be sound last, and what follows from it, so that it is computed once.
        """
        self.log: deque[CommitHeader] = deque(maxlen=length)
        self.log_ids: deque[Digest] = deque(maxlen=length)
        self.ancestry: deque[Digest] = deque(maxlen=length)
        """Heads before the current one, oldest first. Unlike the log, a fetched state brings its own ancestry."""

    def extends(self, header: CommitHeader) -> bool:
        """Return whether ``header`` is a child of the head."""
        return self.head is not None and header.parent == self.head.id and header.version == self.head.version + 1

    def is_merged(self, contributor: Contributor) -> bool:
        """Return whether the chain has merged some of these tokens."""
        return contributor.tokens_from < self.marks.get(contributor.learner, NO_MARK).tokens

    def range_problem(self, c: Contributor) -> str | None:
        """Return why range ``c`` cannot be merged into the next version, or None. ``c`` must be a valid range."""
        mark, limits = self.marks.get(c.learner, NO_MARK), self.limits
        if self.is_merged(c):
            return "its tokens are merged already"
        if c.tokens_to > mark.tokens + self._run_tokens or c.steps_to > mark.steps + limits.learner_steps:
            return "it exceeds the tokens or steps that a learner can make in any run"
        if self.head is not None and self.head.tokens > self._most_tokens:
            return "the chain cannot count further"
        return limits.range_problem(c.tokens, c.steps, len(c.blocks))

    def farthest(self, head: Head, lineage: Iterable[Digest]) -> float:
        """Return an upper bound for the distance between the state at ``head`` and this one, for an outer rate of 1.

        The bound is the number of versions between the two states times the largest length of an update of one round,
        which leaves room for a longer one, of a learner that has come back. Updates of a young chain may grow fast, so
        that more is allowed.
        """
        if self.head is None:
            return math.inf
        parted, steps = self.versions_since(lineage), self.limits.round_steps
        versions = head.version + (self.head.version if parted is None else 2 * parted - self.head.version)
        if self.norm_bound.is_young:
            versions += 2 * self.length + self.limits.range_steps // steps
        return versions * self.norm_bound.longest(steps, steps, self._first)

    def heads(self) -> set[Digest]:
        """Return the head and the known heads before it."""
        return {*self.ancestry} if self.head is None else {self.head.id, *self.ancestry}

    def versions_since(self, lineage: Iterable[Digest]) -> int | None:
        """Return how many of this chain's versions a chain with ``lineage`` lacks; None if the two do not meet."""
        assert self.head is not None
        theirs = set(lineage)
        own = enumerate((self.head.id, *reversed(self.ancestry)))
        return next((versions for versions, one in own if one in theirs), None)

    @property
    def group_bits(self) -> int:
        """Base-2 logarithm of the number of groups whose merges make the next version."""
        return group_bits(len(self.counts.usual), self.limits.together)

    def recent_members(self) -> dict[int, set[int]]:
        """Return the contributors of the newest versions in each group that has some, as fingerprints."""
        assert self.head is not None
        found = dict[int, set[int]]()
        for one, version in self.counts.usual:
            if version > self.head.version - RECENT_VERSIONS:
                found.setdefault(group_of_print(one, self.group_bits), set()).add(one)
        return found

    def is_few(self, contributors: Iterable[Contributor]) -> bool:
        """Return whether a merge of these lacks so many usual contributors that it proves little."""
        return self.counts.is_few(peer_of(c.learner) for c in contributors)

    def record_after(self, version: int, contributors: Sequence[Contributor], length: float = 0.0) -> Digest:
        """Return the digest that an owner signs for a commit with these contributors and update norm ``length``."""
        return self.successor(version, contributors, length).record

    def successor(self, version: int, contributors: Sequence[Contributor], length: float) -> Successor:
        """Return what a commit with these contributors and update norm ``length`` makes of the chain."""
        marks, ledger, norm_bound = self._marks_after(version, contributors), self.ledger, self.norm_bound
        if length:
            norm_bound = self._norm_after(contributors, length)
        trained = Trained()
        if ledger is not None:
            after = ledger.copied()
            for c in contributors:
                after.add(c.blocks)
            trained = after.state()
        return Successor(marks, norm_bound, record_of(marks, trained, norm_bound))

    def count(self, contributors: Sequence[Contributor], factors: Sequence[int]) -> tuple[int, TokenCounts]:
        """Return the counted tokens of the next commit's contributions, in total, and the chain's counts after it."""
        assert self.head is not None
        given = {peer_of(c.learner): c.tokens for c in contributors}
        return self.counts.count(self.head.version + 1, given, self.limits.first_tokens, factors)

    def longest(self, contributors: Sequence[Contributor]) -> float:
        """Return the largest allowed norm of a merged outer gradient of these contributors."""
        steps = self._counted_steps(contributors)
        return self.norm_bound.longest(steps, self.limits.round_steps, self._first, is_few=self.is_few(contributors))

    def _norm_after(self, contributors: Sequence[Contributor], length: float) -> NormBound:
        steps, is_few = self._counted_steps(contributors), self.is_few(contributors)
        return self.norm_bound.after(length, steps, self.limits.round_steps, is_few=is_few)

    def _counted_steps(self, contributors: Sequence[Contributor]) -> int:
        return counted_steps([c.steps for c in contributors], self.limits.round_steps)

    def stated_longest(self, contributors: Sequence[Contributor]) -> float:
        """Return ``longest`` as a commit states it: a finite number, 0 if no limit is known."""
        return _stated(self.longest(contributors))

    def _marks_after(self, version: int, contributors: Iterable[Contributor]) -> dict[LearnerId, Mark]:
        oldest = version - MARK_LIFE_LOGS * self.length
        marks = {learner: mark for learner, mark in self.marks.items() if mark.version >= oldest}
        for c in contributors:
            marks[c.learner] = Mark(c.tokens_to, c.steps_to, version)
        return marks

    def latest_step(self) -> int:
        """Return the largest global step that the next commit may have."""
        return min(self.step, LONGEST_RUN) + self.limits.lead_steps

    def problem(self, header: CommitHeader) -> str | None:
        """Return why ``header`` cannot be this chain's next commit, or None if it can."""
        if self.head is None or not self.extends(header):
            return f"its parent {header.parent[:8]} is not the head"
        problem = self.contributors_problem(header.contributors, header.factors)
        if problem is not None:
            return problem
        if bool(header.parts) != bool(self.group_bits):
            return "it does not merge the merges of groups where there are some, or does where there are none"
        if any(one.collector >= other.collector for one, other in pairwise(header.parts)):
            return "its parts are not sorted and distinct"
        if any(not LEAST_FACTOR <= part.factor <= 100 for part in header.parts):
            return f"a factor is not between {LEAST_FACTOR} and 100 per cent"
        for group in header.groups():
            if (problem := self.part_problem(group.collector, group.contributors)) is not None:
                return problem
        tokens, counts = self.count(header.contributors, header.counted_factors)
        if header.tokens != self.head.tokens + tokens or header.counts != counts:
            return "its cumulative tokens are wrong"
        if header.step > self.latest_step():
            return f"its step {header.step} is too far from its parent's, {self.step}"
        longest = self.longest(header.contributors)
        if not 0.0 <= header.length <= longest:
            return (
                f"its update has length {header.length:.3g}, but at most {longest:.3g} fits the chain's earlier updates"
            )
        if header.longest != _stated(longest):
            return f"it states that an update may have length {header.longest:.3g}, but {longest:.3g} fits the chain"
        successor = self.successor(header.version, header.contributors, header.length)
        if header.record != successor.record:
            return "its record is not the one that follows from the chain"
        self._judged = header, successor
        return None

    def contributors_problem(self, contributors: Sequence[Contributor], factors: Sequence[int]) -> str | None:
        """Return why these contributions, with these factors, cannot be merged into the next version, or None."""
        previous, givers = "", set[PeerId]()
        for c in contributors:
            giver = peer_of(c.learner)
            if c.learner <= previous or giver in givers:
                return "its contributors are not sorted and distinct"
            previous = c.learner
            givers.add(giver)
            if c.tokens <= 0 or c.steps <= 0:
                return f"learner {c.learner} has an empty range"
            problem = self.range_problem(c)
            if problem is not None:
                return f"learner {c.learner}: {problem}"
        if not contributors:
            return "it has no contributors"
        if factors and len(factors) != len(contributors):
            return "it has not one factor for each contributor"
        if any(not LEAST_FACTOR <= factor <= 100 for factor in factors):
            return f"a factor is not between {LEAST_FACTOR} and 100 per cent"
        if factors and min(factors) == 100:  # in a commit they are not told from none, which were signed
            return "it states factors that are all 100 per cent"
        return None

    def part_problem(self, collector: PeerId, contributors: Iterable[Contributor]) -> str | None:
        """Return why these are not a part of the next version that ``collector`` has merged, or None."""
        bits = self.group_bits
        if not bits:
            return "there are no groups"
        index = group_of(collector, bits)
        if any(group_of(peer_of(c.learner), bits) != index for c in contributors):
            return "a part has contributors of another group than its collector's"
        return None

    def advance(self, header: CommitHeader, new_id: Digest) -> None:
        """Make ``header`` the head. The caller has checked it with ``problem``."""
        judged, successor = self._judged or (None, None)
        if successor is None or judged is not header:
            successor = self.successor(header.version, header.contributors, header.length)
        self._judged = None
        self.log.append(header)
        self.log_ids.append(new_id)
        self.norm_bound = successor.norm_bound
        if self.head is not None:
            self.ancestry.append(self.head.id)
        self.head = Head(self.shard, header.version, new_id, header.tokens)
        self.step = header.step
        self.counts = header.counts
        self.marks = successor.marks
        if self.ledger is not None:
            for c in header.contributors:
                self.ledger.add(c.blocks)

    def state_problem(self, state: ShardState) -> str | None:
        """Return why no chain of this run can have this state, or None."""
        head, limits = state.head, self.limits
        if not 0 <= state.step <= min(head.version * limits.lead_steps, LONGEST_RUN + limits.lead_steps):
            return f"step {state.step} cannot be reached with version {head.version}"
        if head.tokens > head.version * MAX_CONTRIBUTORS * limits.range_tokens:
            return f"{head.tokens} tokens cannot be merged in {head.version} versions"
        if not state.norm_bound.is_sound:
            return "its norm bound is malformed"
        for learner, mark in state.marks:
            counts = (mark.tokens, mark.steps, mark.version)
            if min(counts) < 0 or max(counts) > MAX_COUNT or mark.version > head.version:
                return f"its mark of learner {learner} is invalid"
        return None

    def replace(self, state: ShardState, lineage: Iterable[Digest] = ()) -> None:
        """Install a fetched or restored state and the heads that led to it. The log starts empty."""
        self._judged = None
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
        """Return the commits after ``known`` up to the head, or None if the log does not reach back to ``known``."""
        if self.head is None:
            return None
        if known == self.head.id:
            return []
        for i, header in enumerate(self.log):
            if header.parent == known:
                return list(self.log)[i:]
        return None

    def payloads(self, size_of: SizeOf, most_bytes: int) -> set[Digest]:
        """Return the newest payloads of the log that fit into ``most_bytes`` together; always the head's."""
        found: set[Digest] = set()
        total = 0
        for header in reversed(self.log):
            total += size_of(header.payload)
            if found and total > most_bytes:
                break
            found.add(header.payload)
        return found

    def commits(self) -> set[Digest]:
        """Return the ids of the log's commits and of the head. A fetched state has a head but no log."""
        return {*self.ancestry, self.head.id} if self.head is not None else set(self.log_ids)

    def state(self) -> ShardState:
        """Return the part of a state transfer that is not tensors."""
        assert self.head is not None
        trained = Trained() if self.ledger is None else self.ledger.state()
        return ShardState(
            self.head, self.step, tuple(sorted(self.marks.items())), trained, self.norm_bound, self.counts
        )


def _stated(longest: float) -> float:
    return min(longest, MOST_LENGTH) if longest < math.inf else 0.0


# -- Head changes ------------------------------------------------------------------------------------------------------


class HeadChange(NamedTuple):
    """Event: a shard has a new head."""

    shard: ShardId
    previous: Head | None
    """Head before the change; None: the shard had no state."""
    head: Head
    taken: CommitHeader | ShardState
    """The commit that was applied, or the state that was installed."""


class HeadListener(Protocol):
    """A component of the machine that keeps data by head. ``Machine`` calls its listeners in a fixed order."""

    def on_head_changed(self, change: HeadChange) -> None:
        """Update for a shard's new head. The chain is already at that head."""
