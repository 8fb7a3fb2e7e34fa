"""Shared state of the machine's components: configuration, time, chains, the learner's counters, effects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from p2pdiloco.protocol.chain import NO_MARK, Chain
from p2pdiloco.protocol.config import LEAD_ROUNDS, RANGE_ROUNDS, Limits, RunEnd, Sizes
from p2pdiloco.protocol.effects import Effect, Note, Send
from p2pdiloco.protocol.events import LineSpeed, Mark
from p2pdiloco.protocol.groups import MOST_TOGETHER
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, PeerId, RunId, ShardId
from p2pdiloco.protocol.membership import Membership
from p2pdiloco.protocol.messages import Head, Message, Phase
from p2pdiloco.protocol.participation import Participation
from p2pdiloco.timing import Timers, TokenBucket

Key = tuple[str, int]
"""Key of an alarm: a topic and, for most topics, a shard."""


# -- Rate limit for claimed steps --------------------------------------------------------------------------------------
# The fastest learner is the first to report a new step, so the claim of a single peer must count, although it cannot be
# proved. A claim counts as far as a learner HASTE times as fast as the median could have come in the meantime, or as
# far as more than half of all live peers report.
#
# Rules of this file:
# 1. The allowance fills with time and is used up by claims. It holds at most two rounds' steps, so that waiting does
#    not permit a leap. Time during which this peer stood still fills it without that limit, because the peer must catch
#    up.
# 2. Peers that believed a claim repeat it. They are not second witnesses to a leap, since each is held to the same
#    limit.


HASTE = 8.0
BURST_ROUNDS = 2
USUAL_STEP_S = 1.0
"""Assumed step time until a peer has reported one."""


class StepClaimLimit:
    """Rate limit for claimed steps. ``step_s`` is the median step time in seconds, 0 if none is known."""

    __slots__ = ("_steps",)

    def __init__(self, sync_every: int) -> None:
        self._steps = TokenBucket(burst=BURST_ROUNDS * sync_every, per_s=HASTE / USUAL_STEP_S)

    def add_missed(self, seconds: float, step_s: float) -> None:
        """Add the steps that were possible in the seconds that this peer missed."""
        self._steps.grant(seconds * HASTE / (step_s or USUAL_STEP_S))

    def allowed(self, now: float, step_s: float) -> int:
        """Return how many steps beyond the own step a claim may lie."""
        self._steps.per_s = HASTE / (step_s or USUAL_STEP_S)
        return int(self._steps.available(now))

    def use(self, steps: int, now: float) -> None:
        """Use up the steps of an accepted claim."""
        self._steps.take(now, min(steps, self._steps.available(now)))


# -- Shared state of the machine's parts -------------------------------------------------------------------------------


BEAT: Key = ("beat", 0)
"""Alarm of this peer's next heartbeat."""
STALL_BEATS = 2
"""Heartbeats by which a deadline must be missed to count as a stall of this peer."""


ABANDONED_MOST = 4096
"""Maximum number of abandoned commits that are remembered, over all shards; the latest stay."""


class ProtocolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the machine: the run's parameters and this peer's. Times are in seconds."""

    run: RunId
    peer: PeerId
    founder: PeerId = PeerId("")
    """Creator of the run. A newcomer follows it where as many peers stand by one state as by another."""
    fragments: tuple[tuple[ShardId, ...], ...]
    """Shards of each fragment; shard ids count up over all fragments."""
    sync_every: int
    """Inner steps between two rounds of a fragment (H)."""
    overlap: int
    """Inner steps that an exchange may take before it is late (tau)."""
    min_quorum: int
    """Number of contributions that a merge needs (K)."""
    grace_share: float
    """Share of the remaining overlap that the owner waits for late contributions (gamma)."""
    total_steps: int
    """Global step at which the run is complete, as its manifest says (``Core.end``: as it is now)."""
    expects_learner: bool = False
    """Whether this peer has, or will have, a learner; if not, it only follows."""
    blocks: int = 0
    """Blocks of data in an epoch; 0: learners choose their data themselves."""
    sizes: Sizes = Sizes()
    """Sizes of a step, a block and a shard, from the manifest."""
    early_bytes: int = 256 << 20
    """Total size of payloads that may wait for heads that this peer has not reached, over all peers."""
    together: int = MOST_TOGETHER
    """Maximum number of learners whose contributions are merged together (``groups``). All peers have the same."""
    takes_mean: bool = False
    """An outer step takes over the mean of the learners (rate 1, no momentum): of one alone, what it has already."""
    is_overwrite: bool = False
    """Learners take the global parameters on each commit instead of carrying their delta."""
    evaluation_every: int = 0
    """Rounds of H steps between evaluations; 0 for none."""
    weight: float = 1.0
    """Share of ownership that this peer asks for; with 0 it owns only if nobody else may."""
    log_length: int = 32
    """Commits kept for each shard, and own contributions kept for undoing a fork."""
    heartbeat_s: float = 1.0
    takeover_floor_s: float = 1.0
    takeover_ceiling_s: float = 60.0
    stuck_s: float = 300.0
    """A health warning is shown after this time without a new version although learners train."""
    request_s: float = 10.0
    """Timeout of a request for commits or a state."""
    leave_s: float = 20.0
    """Maximum duration of a graceful shutdown."""
    needs_majority: bool = False
    """Merge only if more than half of all possible contributors, missing ones included, have answered."""
    finish_s: float = 60.0
    """Maximum time that a peer waits for the others when the run is complete."""

    @property
    def shards(self) -> int:
        """Number of shards."""
        return sum(len(f) for f in self.fragments)

    @property
    def waiting_most(self) -> int:
        """Maximum number of commits that wait for their parents, over all shards.

        A peer that catches up needs a whole log for a few of them.
        """
        return 4 * (self.log_length + self.shards)

    @property
    def limits(self) -> Limits:
        """Limits on what a contribution or a commit may declare."""
        return Limits(
            step_tokens=self.sizes.step_tokens,
            block_tokens=self.sizes.block_tokens,
            range_steps=RANGE_ROUNDS * self.sync_every,
            round_steps=self.sync_every,
            lead_steps=LEAD_ROUNDS * self.sync_every,
            together=self.together,
        )

    def offset(self, fragment: FragmentId) -> int:
        """Return the remainder of the global step modulo H at which the fragment's round is due."""
        return fragment * self.sync_every // len(self.fragments)


class LearnerView:
    """This peer's learner: its counters since it started, and how far each shard's chain has merged it."""

    __slots__ = (
        "floors",
        "id",
        "is_able",
        "is_paused",
        "is_resting",
        "marks",
        "reached",
        "step_time_s",
        "steps",
        "tokens",
    )

    def __init__(self, learner: LearnerId, shards: int, step: int) -> None:
        self.id = learner
        self.reached = step
        """Global step at its last step boundary."""
        self.marks = [NO_MARK] * shards
        """Marks by shard. They are kept here too, because chains drop marks of learners not merged for a long time."""
        self.floors = [NO_MARK] * shards
        """By shard: what it discarded when the run went back. No chain returns these tokens to it."""
        self.steps = 0
        self.tokens = 0
        self.step_time_s = 0.0
        self.is_paused = False
        self.is_resting = False
        self.is_able = True
        """Whether its progress can be encoded and it answers; if not, it does not participate."""

    @property
    def is_idle(self) -> bool:
        """True if it makes no steps: paused for good, or resting for now."""
        return self.is_paused or self.is_resting

    def unmerged(self, shard: ShardId) -> int:
        """Return the number of own tokens that the shard's chain has not merged."""
        return self.tokens - self.marks[shard].tokens

    def discard_unmerged(self, shard: ShardId) -> None:
        """Treat all tokens that the shard's chain has not merged as discarded (``overwrite``)."""
        self.marks[shard] = Mark(self.tokens, self.steps, self.marks[shard].version)


def mark_bits(head_id: Digest) -> int:
    """Return a head's contribution to ``Core.heads_mark``."""
    return int(head_id[:15], 16)


LINE_WEIGHTS: Mapping[LineSpeed, float] = {"slow": 0.5, "usual": 1.0, "fast": 2.0}
"""Times of its weight for which a peer asks: peers behind fast lines own more versions, and relay commits before
others."""


class Core:
    """Shared state. Components read and change it only while an event is handled."""

    __slots__ = (
        "abandoned",
        "alarms",
        "are_others_at_rest",
        "chains",
        "config",
        "departure",
        "effects",
        "end",
        "fragment_of",
        "has_heard_end",
        "heads_mark",
        "is_current",
        "learner",
        "line_speed",
        "longest_s",
        "membership",
        "now",
        "pace",
        "participation",
        "stalled_s",
        "step",
    )

    def __init__(self, config: ProtocolConfig) -> None:
        self.config = config
        self.end = RunEnd(config.total_steps, config.sizes.budget)
        """The run's end, as far as this peer knows. It may move (``EndMoved``)."""
        self.now = 0.0
        """This peer's own clock, in seconds; it does not run while the peer stands still."""
        self.stalled_s = 0.0
        """Seconds by which the own clock lags behind the driver's."""
        self.longest_s = STALL_BEATS * config.heartbeat_s
        """Seconds by which a deadline may be missed before this counts as a stall."""
        self.effects: list[Effect] = []
        self.abandoned: dict[Digest, None] = {}
        """Commits without which the run goes on, and their descendants (``going_back``), oldest first."""
        self.alarms: Timers[Key] = Timers()
        self.membership = Membership(config.peer, config.heartbeat_s)
        elements = config.sizes.elements or (0,) * config.shards
        self.chains = [
            Chain(ShardId(s), config.log_length, config.blocks, config.limits, elements[s])
            for s in range(config.shards)
        ]
        self.participation = Participation(config.run, self.membership, self.chains, self)
        placed = sorted((shard, FragmentId(f)) for f, shards in enumerate(config.fragments) for shard in shards)
        self.fragment_of = [fragment for _, fragment in placed]
        self.learner: LearnerView | None = None
        self.step = 0
        """Global step: the larger of the own learner's step and the accepted claims of others."""
        self.pace = StepClaimLimit(config.sync_every)
        self.is_current = False
        """Whether every shard has had a state."""
        self.line_speed: LineSpeed = "usual"
        """How fast this peer's line is for what it has to send."""
        self.has_heard_end = False
        """Whether a peer has said that the run is complete."""
        self.heads_mark = 0
        """Exclusive-or over the ``mark_bits`` of all heads."""
        self.departure: Literal["", "leaving", "finished"] = ""
        self.are_others_at_rest = False
        """Whether this peer and all live ones have finished with the same heads."""

    @property
    def weight(self) -> float:
        """Return the weight in the selection of owners that this peer asks for."""
        return self.config.weight * LINE_WEIGHTS[self.line_speed]

    def abandon(self, commit: Digest) -> None:
        """Go on without this commit and those that follow it."""
        while len(self.abandoned) >= ABANDONED_MOST:
            del self.abandoned[next(iter(self.abandoned))]
        self.abandoned[commit] = None

    def send(self, peers: tuple[PeerId, ...], message: Message) -> None:
        """Emit a ``Send``, unless ``peers`` is empty."""
        if peers:
            self.effects.append(Send(peers, message))

    def note(self, level: Literal["debug", "info", "warning"], topic: str, reason: str) -> None:
        """Emit a ``Note``: a decision and its reason."""
        self.effects.append(Note(level, topic, reason))

    def head(self, shard: ShardId) -> Head:
        """Return the shard's head, which must exist."""
        head = self.chains[shard].head
        assert head is not None
        return head

    @property
    def latest_step(self) -> int:
        """Largest step that a claim may name: one round beyond the last step."""
        return self.end.steps + self.config.sync_every

    def plausible(self, step: int) -> int:
        """Return how much of another peer's claim to be at ``step`` is accepted (``StepClaimLimit``)."""
        if step <= self.step:
            return step
        step = min(step, self.latest_step)
        allowed = self.step + self.pace.allowed(self.now, self.membership.median_step_s(self.step_time_s()))
        return step if step <= allowed else max(min(step, self.membership.majority_step(self.step)), allowed)

    def pass_time(self, now: float) -> None:
        """Advance the own clock to the driver's time ``now``.

        If a deadline was missed by far, this process did not run in between. The own clock then skips that time: it is
        not measured, and no deadline passes in it.
        """
        now -= self.stalled_s
        if now <= self.now:
            return
        if now - self.now <= self.longest_s:  # no stall: all earlier deadlines have fired
            self.now = now
            return
        due = self.alarms.next()
        if due is not None and now - due > self.longest_s:
            seconds, now = now - self.now, self.now
            self.stalled_s += seconds
            self.alarms.set(BEAT, now)
            self.pace.add_missed(seconds, self.membership.median_step_s(self.step_time_s()))
            self.membership.on_stall(now, seconds)
            self.note("info", "stall", f"this peer stood still for {seconds:.1f} s")
        self.now = now

    def step_time_s(self) -> float:
        """Return the own learner's step time in seconds; 0 if it does not train."""
        return 0.0 if self.learner is None or self.learner.is_idle else self.learner.step_time_s

    def fastest_step_time_s(self) -> float:
        """Return the smallest step time of all learners that train; 0 if none does.

        A peer that says it is faster than ``HASTE`` times the median learner is believed to be that fast.
        """
        own, others = self.step_time_s(), self.membership.fastest_step_s
        fastest_s = min(own, others) if own and others else own or others
        return max(fastest_s, self.membership.median_step_s(own) / HASTE)

    def is_participating(self) -> bool:
        """Return whether this peer's learner may still contribute: it trains, or holds progress that is not merged."""
        learner = self.learner
        if learner is None or not self.is_current or not learner.is_able:
            return False
        return not learner.is_idle or self.unmerged_tokens() > 0

    def unmerged_tokens(self) -> int:
        """Return the learner's own unmerged tokens, in the shard where there are most."""
        learner = self.learner
        return 0 if learner is None else max(learner.unmerged(chain.shard) for chain in self.chains)

    def phase(self) -> Phase:
        """Return the phase that this peer reports in heartbeats."""
        if not self.is_current:
            return "joining"
        if self.departure:
            return "done" if self.are_others_at_rest else self.departure
        return "following" if self.learner is None or self.learner.is_idle else "training"
