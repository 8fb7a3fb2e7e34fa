"""The owner's side of a turn: collect contributions, close by quorum and grace window, merge, commit.

Rules of this file:
1. A contribution is accepted only for the current head of its shard, once per learner and version, and only with tokens
   that the chain has not merged. Its sender is the learner's own peer.
2. A stale contribution is refused, and the newest head is attached. A contribution to a later head waits until this
   peer has caught up.
3. There is no election. Any peer that holds contributions may merge them once its rank's turn has come.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from p2pdiloco.protocol.chain import HeadChange
from p2pdiloco.protocol.effects import Merge
from p2pdiloco.protocol.events import Merged
from p2pdiloco.protocol.ids import Digest, LearnerId, PeerId, ShardId, peer_of
from p2pdiloco.protocol.membership import smoothed
from p2pdiloco.protocol.messages import MAX_TEXT, CommitHeader, Contribution, Head, Refused, commit_id
from p2pdiloco.protocol.state import Core
from p2pdiloco.protocol.support import Support

# -- Own commits: at most one for each parent, also across restarts of this peer ---------------------------------------
# Rules of this file:
# 1. An owner that merges again on a parent for which it already made a commit reuses that commit. Two different commits
#    on one parent would be a proof of equivocation against it (``BarredOwners``).
# 2. The driver stores a commit before it sends it, and passes the commits of earlier runs of this peer in at the start.
# 3. A commit that cannot be applied here is tried again later. Only a peer that is alone makes another one, after
#    OWN_TRIES attempts.
# 4. A peer that comes back to a parent whose commit it has dropped merges nothing on it.


def is_left(header: CommitHeader, head: Head) -> bool:
    """Return whether ``head`` holds at least as many tokens as ``header``.

    The head is then heavier than the commit's parent, so a peer at ``head`` does not merge on that parent again.
    """
    return head.tokens >= header.tokens


class OwnCommitLog:
    """Commits that this peer has made, by shard and parent. A commit is dropped once the head has passed it."""

    def __init__(self, shards: int, log_length: int) -> None:
        self._made: list[dict[Digest, CommitHeader]] = [{} for _ in range(shards)]
        self._dropped: list[deque[Digest]] = [deque(maxlen=log_length) for _ in range(shards)]
        """Parents of the latest dropped commits."""
        self.starts = [0] * shards
        """Versions with which this life began: what earlier lives committed before is not known."""

    def record(self, header: CommitHeader) -> CommitHeader:
        """Store ``header`` and return it, or return the commit that was made on its parent before."""
        return self._made[header.shard].setdefault(header.parent, header)

    def restore(self, header: CommitHeader, head: Head | None) -> bool:
        """Store a commit of an earlier run of this peer; return False if a peer at ``head`` no longer needs it."""
        if head is not None and is_left(header, head):
            self._dropped[header.shard].append(header.parent)
            return False
        return self.record(header) is header

    def restore_made(self, made: Iterable[tuple[ShardId, Digest]], starts: Sequence[int]) -> None:
        """Remember what earlier lives of this peer may have committed, from which it went back (rule K4)."""
        for shard, parent in made:
            self._dropped[shard].append(parent)
        self.starts = [max(pair) for pair in zip(self.starts, starts, strict=True)]

    def parents(self) -> tuple[tuple[ShardId, Digest], ...]:
        """Return the parents of the latest own commits."""
        return tuple(
            (ShardId(shard), parent)
            for shard, (made, dropped) in enumerate(zip(self._made, self._dropped, strict=True))
            for parent in dict.fromkeys((*dropped, *made))
        )

    def is_dropped(self, head: Head) -> bool:
        """Return whether this peer has made a commit on ``head`` and dropped it, or may have in an earlier life."""
        return head.version < self.starts[head.shard] or head.id in self._dropped[head.shard]

    def is_own(self, header: CommitHeader) -> bool:
        """Return whether this peer made the commit."""
        return self._made[header.shard].get(header.parent) == header

    def forget(self, header: CommitHeader) -> None:
        """Forget a commit that nobody else has and that cannot be applied here."""
        self._made[header.shard].pop(header.parent, None)

    def on_head_changed(self, change: HeadChange) -> None:
        """Forget the commits that the head has left behind."""
        made = self._made[change.shard]
        for parent in [parent for parent, header in made.items() if is_left(header, change.head)]:
            del made[parent]
            self._dropped[change.shard].append(parent)

    def payloads(self, shard: ShardId) -> set[Digest]:
        """Return the payloads that are sent with a shard's own commits."""
        return {header.payload for header in self._made[shard].values()}

    def commits(self, shard: ShardId) -> set[Digest]:
        """Return the ids of a shard's own commits."""
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
    """Time at which the K-th contribution with tokens arrived; None: not yet."""
    given: int
    """Number of contributions with tokens."""
    missing: int
    """Number of participating peers that have not answered."""
    min_quorum: int
    rank: int
    """This peer's rank among the owners: rank 0 merges at once, the next after the takeover time, and so on."""
    takeover_s: float
    grace_s: float


class Decision(NamedTuple):
    """Result of ``decide``: close now, or check again at ``look_again_at`` (None: when something changes)."""

    is_close: bool
    look_again_at: float | None
    reason: str


def grace_window_s(
    *, grace_share: float, overlap_steps: int, step_time_s: float, quorum_s: float, sync_s: float
) -> float:
    """Return gamma * (tau * step time - (quorum time + sync time)), in seconds, at least 0."""
    return max(0.0, grace_share * (overlap_steps * step_time_s - (quorum_s + sync_s)))


def decide(view: QuorumView) -> Decision:
    """Decide whether to merge the contributions collected so far."""
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
# The paper's grace window is a share of tau steps. On a long or slow path answers regularly take longer than that. Each
# version would then hold one learner's progress, and the contributions of the others would be refused and sent again.
#
# Rules of this file:
# 1. Late answers are measured, too, and answers that were waited for in vain count as late. Otherwise a peer that was
#    not waited for would look as if it never answered. The own learner is timed in all turns, whoever owns the shard
#    (``Contributions``).
# 2. The owner waits until the limit for a peer that usually answers within it, or is new. It merges as soon as nobody
#    is missing, so only unusually late answers cost time.
# 3. It does not wait for a peer that usually takes longer. Such a peer contributes at its next turn.


TOO_LATE = 1.25
"""Multiple of the limit that is recorded as the response time of a peer that did not answer within the limit."""


class ResponseTimes:
    """Measures how long each peer takes to answer a turn, from the moment the turn opens at this owner."""

    def __init__(self, shards: int) -> None:
        self._delays: dict[PeerId, float] = {}
        """Smoothed response time, in seconds."""
        self._merged: list[tuple[Digest, float] | None] = [None] * shards
        """By shard: the base of the last version and the time its turn opened. Used to measure late answers."""

    def record(self, peer: PeerId, delay_s: float) -> None:
        """Record an answer that arrived ``delay_s`` seconds after the turn opened."""
        self._delays[peer], _ = smoothed(self._delays.get(peer, 0.0), 0.0, delay_s)

    def end_turn(self, shard: ShardId, base: Digest, opened_at: float) -> None:
        """Record the end of the turn on ``base``, which opened at ``opened_at``: later answers are late."""
        self._merged[shard] = base, opened_at

    def record_late(self, peer: PeerId, shard: ShardId, base: Digest, now: float) -> None:
        """Record an answer to a version that has been merged already."""
        merged = self._merged[shard]
        if merged is not None and merged[0] == base:
            self.record(peer, now - merged[1])

    def wait_s(self, absent: Iterable[PeerId], limit_s: float) -> float:
        """Return how many seconds after the opening the ``absent`` peers are waited for: ``limit_s`` if one of them
        usually answers until then, or is new, else 0. Most answer sooner, and end the waiting."""
        return limit_s if any(self._delays.get(peer, 0.0) <= limit_s for peer in absent) else 0.0

    def record_missing(self, absent: Iterable[PeerId], limit_s: float) -> None:
        """Record that ``absent`` peers were waited for until the limit."""
        for peer in absent:
            self.record(peer, TOO_LATE * limit_s)

    def forget(self, peer: PeerId) -> None:
        """Drop the measurements of a peer that has left."""
        self._delays.pop(peer, None)


# -- Owners that leave contributions out -------------------------------------------------------------------------------


class SmallCommits:
    """Shares of each owner's commits that most participants did not take part in.

    An owner need not wait for contributions that are late, and no audit can tell. But what is late is late for all
    owners alike, so only an owner whose commits are small more often than those of the others is suspected.
    """

    def __init__(self) -> None:
        self._latest: dict[PeerId, deque[bool]] = {}
        """For each owner, whether its latest commits were small; the longest silent owner first."""

    def record(self, owner: PeerId, *, is_small: bool) -> None:
        """Record a commit."""
        latest = self._latest.pop(owner, None) or deque(maxlen=COMMITS_KEPT)
        latest.append(is_small)
        self._latest[owner] = latest
        if len(self._latest) > OWNERS_REMEMBERED:
            del self._latest[next(iter(self._latest))]

    def is_unfair(self, owner: PeerId) -> bool:
        """Return whether more than half of the commits of ``owner`` are small, and more than twice as many as of the
        others' commits."""
        latest = self._latest.get(owner, ())
        others = [one for peer, their in self._latest.items() if peer != owner for one in their]
        if min(len(latest), len(others)) < COMMITS_LEAST:
            return False
        return sum(latest) / len(latest) > max(0.5, 2.0 * sum(others) / len(others))


# -- Aggregation -------------------------------------------------------------------------------------------------------


SMOOTHING = 0.2
LEAST_WAIT_STEPS = 3
"""Least number of steps that an owner waits for usual answers. Learners answer at the end of a step, and some are
slower, so half of a short turn is not enough."""
PAIR = 2
"""Participants of which one is enough: nobody can tell which of two contributions is usual."""
LEFT_OUT_TAKEOVERS = 2
"""Takeover times for which a peer does not apply a suspected owner's commit that left most contributions out. The next
owner merges them in the second."""
COMMITS_KEPT, COMMITS_LEAST, OWNERS_REMEMBERED = 24, 6, 1024
"""Commits of an owner that are remembered; those of it, and of the others, that are needed to suspect it; and owners
that are remembered. In one bad round an owner may make several small commits."""
OWN_TRIES = 8
"""Attempts to apply an own commit before a peer that is alone makes another."""


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
        self.is_unusual = False
        """Whether a commit was found due although most did not contribute and its owner's turn had not come."""
        self.is_closed = False
        """A merge is running or another head is being applied: further contributions are too late."""
        self.step = 0


class Job(NamedTuple):
    """A running merge."""

    base: Digest
    contributions: tuple[Contribution, ...]
    """Sorted by learner."""
    began_at: float


class Retry(NamedTuple):
    """Schedule for an own commit that could not be applied."""

    tries: int
    at: float
    """Time of the next attempt."""


class Aggregation:
    """Collects contributions for all shards and decides when to merge them."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.collections = [Collection(core.now) for _ in core.chains]
        self.early: list[dict[PeerId, Contribution]] = [{} for _ in core.chains]
        """By shard: contributions to versions that this peer has not reached, one per peer."""
        self.response_times = ResponseTimes(len(core.chains))
        self.small_commits = SmallCommits()
        self.turn_s = core.config.takeover_floor_s
        """Smoothed time from the announcement of a turn to its last commit, in seconds."""
        self.sync_s = 0.0
        """Smoothed time from closing a collection to the commit, in seconds."""
        self.jobs: dict[ShardId, Job] = {}
        """Running merges. A shard has at most one, so that a result can be matched to its merge."""
        self.own_commits = OwnCommitLog(len(core.chains), core.config.log_length)
        self._retries: dict[ShardId, Retry] = {}
        """Own commits that could not be applied, by shard."""
        self._unsure_until: dict[ShardId, float] = {}
        """Shards restored from disk whose newer heads no peer has reported yet, and the time until which to wait."""

    # -- measured times ------------------------------------------------------------------------------------------------

    def record_turn(self, seconds: float) -> None:
        """Add the duration of a turn, from its announcement to its last commit, to the mean."""
        seconds = min(seconds, self.core.config.takeover_ceiling_s)
        self.turn_s += SMOOTHING * (seconds - self.turn_s)

    def takeover_s(self) -> float:
        """Return how long an owner may take before the next in rank takes over, in seconds.

        The time covers the overlap, three turns and a few round trips.
        """
        config, membership = self.core.config, self.core.membership
        overlap = config.overlap * self.core.fastest_step_time_s()
        wanted = overlap + 3 * self.turn_s + 4 * membership.slowest_round_trip_s
        return min(max(wanted, config.takeover_floor_s), config.takeover_ceiling_s)

    def turn_of(self, header: CommitHeader) -> float:
        """Return when the owner of ``header``, a child of the head, may merge as far as is known here (own clock).

        It may at once if more than half of the participants took part: a peer contributes to the owner that it
        considers next. An owner of rank 0 may a little later, as it has to wait for the others (``wait_for_most_s``).
        But if owners wait, and this one leaves most out more often than others do (``SmallCommits``), the next owner
        comes first, which gets all contributions after the takeover time, and those to the next versions at once.
        """
        core, collection = self.core, self.collections[header.shard]
        able, is_small = core.participation.entitled(header.shard), self._is_small(header)
        rank = core.participation.rank(header.owner, header.shard)
        is_pair, is_crowd = len(able) <= PAIR and not rank, self._is_crowd(header)
        is_unfair = not is_pair and not rank and self._waits_for_most() and self.small_commits.is_unfair(header.owner)
        is_suspect = is_crowd or (is_unfair and is_small)
        if not is_suspect and (core.departure == "leaving" or not is_small or is_pair):
            return core.now
        if is_suspect:
            core.membership.on_takeover_missed(header.owner, core.now, self.takeover_s())
            began_at = collection.began_at if collection.opened_at is None else collection.opened_at
            return max(core.now, began_at + LEFT_OUT_TAKEOVERS * self.takeover_s())
        wait_s = rank * self.takeover_s() if rank else self.wait_for_most_s()
        if collection.opened_at is not None and core.now >= collection.opened_at + wait_s:
            return core.now
        turn = collection.began_at + self.unusual_s()
        collection.is_unusual = turn <= core.now
        return turn if collection.opened_at is None else min(turn, collection.opened_at + wait_s)

    def _is_small(self, header: CommitHeader) -> bool:
        """Return whether at most half of the peers that may take part did: the owner, and the contributors."""
        able = self.core.participation.entitled(header.shard)
        took_part = able.intersection((header.owner, *(peer_of(c.learner) for c in header.contributors)))
        return not Support(len(took_part), len(able)).is_most

    def _is_crowd(self, header: CommitHeader) -> bool:
        """Return whether a commit names contributors that this peer never met, and the others, without its owner, are
        at most half of all. An owner can make keys, whose contributions are then what all are measured by.

        Where some peers hear each other only through others, nobody can tell.
        """
        membership, givers = self.core.membership, {peer_of(c.learner) for c in header.contributors}
        heard = {peer for peer in givers if peer in membership.met or peer == self.core.config.peer}
        is_told = not membership.connectivity.afar and heard < givers
        return is_told and not Support(len(heard - {header.owner}), len(givers)).is_most

    def wait_for_most_s(self) -> float:
        """Return how long after the quorum an owner waits if at most half of the participants have answered.

        While a peer leaves, no round waits: its time is short.
        """
        core = self.core
        if not self._waits_for_most():
            return 0.0
        turn_s = core.config.sync_every * core.membership.median_step_s(core.step_time_s())
        return min(turn_s, self.takeover_s()) / 2

    def _waits_for_most(self) -> bool:
        return bool(self.core.config.grace_share) and not self.core.participation.is_any_leaving()

    def unusual_s(self) -> float:
        """Return how often commits that most participants did not contribute to may come from other ranks than 0."""
        return max(self.takeover_s(), self.core.config.sync_every * self.core.fastest_step_time_s() / 2)

    def commit_patience_s(self) -> float:
        """Return how long to wait for a commit that other peers have, in seconds.

        The time covers a turn (at most one heartbeat interval) and two round trips.
        """
        config, membership = self.core.config, self.core.membership
        return min(self.turn_s, config.heartbeat_s) + 2 * membership.slowest_round_trip_s

    # -- after a start -------------------------------------------------------------------------------------------------

    def wait_for_heads(self, shard: ShardId) -> None:
        """Postpone merges of a shard that was restored from disk.

        The state on disk may be older than this peer's last commit, so this peer may have made the next commit already.
        """
        self._unsure_until[shard] = self.core.now + self.core.config.request_s

    def confirm_head(self, shard: ShardId) -> None:
        """Allow merges again: no peer has a later head, or this peer has caught up."""
        if self._unsure_until.pop(shard, None) is not None:
            self.merge_if_due(shard)

    # -- collect -------------------------------------------------------------------------------------------------------

    def open(self, shard: ShardId, step: int) -> None:
        """Record that a turn opened: this peer's rank is timed from now on."""
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
        """Return whether the payload may be downloaded. One for a later head must fit into its peer's share of
        ``early_bytes``."""
        head = self.core.chains[contribution.shard].head
        if peer_of(contribution.contributor.learner) != sender:
            return False
        if head is None or is_on_head(contribution, head) or not is_ahead(contribution, head):
            return True
        others = (early.get(sender) for shard, early in enumerate(self.early) if shard != contribution.shard)
        waiting = contribution.payload_bytes + sum(other.payload_bytes for other in others if other is not None)
        return waiting <= self.core.config.early_bytes // max(1, len(self.core.membership.peers))

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
            collection.held_until = min(collection.held_until, self.core.now + self.takeover_s())
            if self._answers(contribution.shard).is_most:
                self.open(contribution.shard, collection.step)
        if c.tokens:
            for learner in [x for x in collection.given if peer_of(x) == giver and x != c.learner]:
                del collection.given[learner]
            collection.given.setdefault(c.learner, contribution)
        self.merge_if_due(contribution.shard)

    def _answers(self, shard: ShardId, missing: int = 0) -> Support:
        """Return how many of those that can contribute have answered; ``missing`` more may be behind a cut."""
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
        if (again := self._retries.get(shard)) is not None and core.now < again.at:
            core.alarms.set(("close", shard), again.at)
            return
        if core.now < (until := self._unsure_until.get(shard, 0.0)):
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
        if collection.opened_at is not None and core.now >= collection.opened_at + self._limit_s():
            self.response_times.record_missing(self._missing(shard, collection), self._limit_s())
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
        core = self.core
        config, membership = core.config, core.membership
        assert collection.opened_at is not None
        ranked = core.participation.ranked_owners(shard)
        rank = ranked.index(config.peer) if config.peer in ranked else len(ranked)
        missing = self._missing(shard, collection)
        quorum_s = 0.0 if collection.quorum_at is None else collection.quorum_at - collection.opened_at
        grace_s = grace_window_s(
            grace_share=config.grace_share,
            overlap_steps=config.overlap,
            step_time_s=self.core.fastest_step_time_s(),
            quorum_s=quorum_s,
            sync_s=self.sync_s + membership.slowest_round_trip_s,
        )
        if config.grace_share:
            grace_s = max(grace_s, self.response_times.wait_s(missing, self._limit_s()) - quorum_s)
            if len(missing) + len(collection.answered) > PAIR and not self._answers(shard).is_most:
                grace_s = max(grace_s, self.wait_for_most_s() - quorum_s)
        takeover_s = self.takeover_s()
        if any(map(core.participation.is_departing, missing - {config.peer})):
            # A departing peer has no later turn. It goes when its own time is up, and what waits here goes with it.
            grace_s = min(config.leave_s, config.finish_s) / 2
        grace_s = min(grace_s, takeover_s)
        return QuorumView(
            now=core.now,
            opened_at=collection.opened_at,
            quorum_at=collection.quorum_at,
            given=len(collection.given),
            missing=len(missing),
            min_quorum=quorum,
            rank=rank,
            takeover_s=takeover_s,
            grace_s=grace_s,
        )

    def _missing(self, shard: ShardId, collection: Collection) -> frozenset[PeerId]:
        """Return the peers that can contribute and have not answered, this peer included."""
        return self.core.participation.participants(shard) - collection.answered

    def _limit_s(self) -> float:
        """Return how long after the opening of a round an owner waits for those who usually answer until then.

        Where steps are shorter than a round trip, nobody can answer within some steps. The median of round trips,
        because a single peer that answers heartbeats late must not make all owners wait. Half of the takeover time
        at most, so that the commit arrives before the next owner would merge, too.
        """
        core = self.core
        steps = max(core.config.sync_every / 2, LEAST_WAIT_STEPS)
        usual_s = steps * core.fastest_step_time_s() + 2 * core.membership.usual_round_trip_s
        return min(usual_s, self.takeover_s() / 2)

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
        """Schedule another attempt for an own commit that cannot be applied here now, since other peers may have it.

        A peer that is alone gives up after OWN_TRIES attempts.
        """
        if not self.own_commits.is_own(header):
            return
        again = self._retries.get(header.shard)
        tries = 1 if again is None else again.tries + 1
        if tries >= OWN_TRIES and not self.core.participation.peers(header.shard):
            self.own_commits.forget(header)
        self._retries[header.shard] = Retry(tries, self.core.now + self.takeover_s())

    def on_repaired(self, shard: ShardId) -> None:
        """Allow own commits again: the shard's state has been repaired."""
        self._retries.pop(shard, None)
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
            self.response_times.end_turn(shard, change.previous.id, opened_at)
        last = self.collections[shard]
        began_at = min(core.now, last.began_at + self.unusual_s()) if last.is_unusual else core.now
        self.collections[shard] = Collection(began_at)
        if isinstance(change.taken, CommitHeader):
            self.small_commits.record(change.taken.owner, is_small=self._is_small(change.taken))
            if not core.chains[shard].norm_bound.is_few(len(change.taken.contributors)):
                core.membership.owners.forgive(change.taken.owner)
        self._retries.pop(shard, None)
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
