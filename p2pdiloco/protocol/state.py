"""State that the parts of the machine share: configuration, time, chains, the learner's counters, and the list of
effects."""

from __future__ import annotations

from typing import Literal

import msgspec

from p2pdiloco.protocol.chain import NO_MARK, Chain
from p2pdiloco.protocol.config import LEAD_TURNS, RANGE_TURNS, Limits, Sizes
from p2pdiloco.protocol.effects import Effect, Note, Send
from p2pdiloco.protocol.events import Mark
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, PeerId, RunId, ShardId
from p2pdiloco.protocol.membership import Membership
from p2pdiloco.protocol.messages import Head, Message, Phase
from p2pdiloco.timing import Timers, TokenBucket

Key = tuple[str, int]
"""What to look at when the time comes: a topic and, for most, a shard."""


# -- Rate limit for claimed steps --------------------------------------------------------------------------------------
# The fastest learner is the first to say a new step, so one peer's claim must count; and nothing proves it. So a claim
# counts for as much as a learner ``HASTE`` times as fast as the median could have done meanwhile, or for what more than
# half of all live peers say of themselves.
#
# Rules of this file:
# 1. The allowance fills with time and is used up by claims; it holds two turns' steps at most, so that patience buys no
#    leap. Time during which this peer stood still fills it without that bound: it must catch up with what it missed.
# 2. Those who believed a claim say it in turn. That is no second witness to a leap, since each of them was held to the
#    same pace.


HASTE = 8.0
BURST_TURNS = 2
USUAL_STEP_S = 1.0
"""Until somebody has said how long its steps take."""


class StepClaimLimit:
    """The allowance for claims, in steps. ``step_s``: the median step time, 0 if none is known."""

    __slots__ = ("_steps",)

    def __init__(self, sync_every: int) -> None:
        self._steps = TokenBucket(burst=BURST_TURNS * sync_every, per_s=HASTE / USUAL_STEP_S)

    def add_missed(self, seconds: float, step_s: float) -> None:
        """Allow what could have been done in the seconds that this peer missed."""
        self._steps.grant(seconds * HASTE / (step_s or USUAL_STEP_S))

    def allowed(self, now: float, step_s: float) -> int:
        """Return how far beyond the own step a claim counts."""
        self._steps.per_s = HASTE / (step_s or USUAL_STEP_S)
        return int(self._steps.available(now))

    def use(self, steps: int, now: float) -> None:
        """Use up as many steps as were believed."""
        self._steps.take(now, min(steps, self._steps.available(now)))


# -- Shared state of the machine's parts -------------------------------------------------------------------------------


BEAT: Key = ("beat", 0)
"""The alarm of this peer's next heartbeat."""
STALL_BEATS = 2
"""Heartbeats by which a deadline must be missed for a peer to know that it stood still."""


class ProtocolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the machine must know of a run and of this peer. Times in seconds."""

    run: RunId
    peer: PeerId
    founder: PeerId = PeerId("")
    """Whose word decides for a newcomer between as many on each side."""
    fragments: tuple[tuple[ShardId, ...], ...]
    """The shards of each fragment; shard ids count up over all fragments."""
    sync_every: int
    """H."""
    overlap: int
    """tau, in inner steps."""
    min_quorum: int
    """K."""
    grace_share: float
    """gamma."""
    total_steps: int
    """Global step at which the run is complete."""
    expects_learner: bool = False
    """A learner belongs to this peer, sooner or later; else it only follows."""
    blocks: int = 0
    """Of data in an epoch; 0: learners draw their data by themselves."""
    sizes: Sizes = Sizes()
    """What one step, one block and one shard hold, as far as the manifest says."""
    early_bytes: int = 256 << 20
    """Of payloads that may wait for a head that this peer has not reached, over all peers."""
    is_overwrite: bool = False
    """Learners take the global parameters on each commit instead of carrying their delta."""
    evaluation_every: int = 0
    """Versions of shard 0 between evaluations; 0 for none."""
    weight: float = 1.0
    """Share of ownership that this peer asks for; with 0 it owns only if nobody else may."""
    log_length: int = 32
    """Commits kept for each shard, and own contributions kept for undoing a fork."""
    heartbeat_s: float = 1.0
    takeover_floor_s: float = 1.0
    takeover_ceiling_s: float = 60.0
    stuck_s: float = 300.0
    """Without a new version for so long, though learners train, is a trouble that people are told of."""
    request_s: float = 10.0
    """How long a request for commits or state may be unanswered."""
    leave_s: float = 20.0
    """How long an orderly leave may take."""
    needs_majority: bool = False
    """Nothing is merged to which no more than half have answered, of all who could or are missing."""
    finish_s: float = 60.0
    """How long a peer waits for the others when the run is complete."""

    @property
    def shards(self) -> int:
        """Number of shards."""
        return sum(len(f) for f in self.fragments)

    @property
    def waiting_most(self) -> int:
        """Commits that wait for their parents, over all shards: who catches up needs a whole log for a few of them."""
        return 4 * (self.log_length + self.shards)

    @property
    def limits(self) -> Limits:
        """What is believed of a contribution or a commit."""
        return Limits(
            step_tokens=self.sizes.step_tokens,
            block_tokens=self.sizes.block_tokens,
            range_steps=RANGE_TURNS * self.sync_every,
            turn_steps=self.sync_every,
            lead_steps=LEAD_TURNS * self.sync_every,
            run_steps=self.total_steps,
        )

    @property
    def latest_step(self) -> int:
        """No claim counts beyond the last step and a turn."""
        return self.total_steps + self.sync_every

    def offset(self, fragment: FragmentId) -> int:
        """The fragment's turn is due when the global step is this, modulo H."""
        return fragment * self.sync_every // len(self.fragments)


class LearnerView:
    """This peer's learner: its counters over its whole life, and how far each shard's chain has merged them."""

    __slots__ = ("id", "is_able", "is_paused", "is_resting", "marks", "reached", "step_time_s", "steps", "tokens")

    def __init__(self, learner: LearnerId, shards: int, step: int) -> None:
        self.id = learner
        self.reached = step
        """The global step at its last step boundary."""
        self.marks = [NO_MARK] * shards
        """By shard, as the chain counts. Kept here too because chains forget learners that were not merged for long."""
        self.steps = 0
        self.tokens = 0
        self.step_time_s = 0.0
        self.is_paused = False
        self.is_resting = False
        self.is_able = True
        """What it trains can be encoded: else it does not participate."""

    @property
    def is_idle(self) -> bool:
        """It makes no steps: no more (paused), or none for now (resting)."""
        return self.is_paused or self.is_resting

    def unmerged(self, shard: ShardId) -> int:
        """Own tokens that the shard's chain does not hold."""
        return self.tokens - self.marks[shard].tokens

    def discard_unmerged(self, shard: ShardId) -> None:
        """Count what the shard's chain does not hold as thrown away (``overwrite``)."""
        self.marks[shard] = Mark(self.tokens, self.steps, self.marks[shard].version)


def mark_bits(head_id: Digest) -> int:
    """Return what a head adds to ``Core.heads_mark``."""
    return int(head_id[:15], 16)


class Core:
    """Shared state. Parts of the machine read and change it only while an event is handled."""

    __slots__ = (
        "alarms",
        "chains",
        "config",
        "departure",
        "effects",
        "fragment_of",
        "heads_mark",
        "is_current",
        "learner",
        "longest_s",
        "membership",
        "now",
        "pace",
        "stalled_s",
        "step",
    )

    def __init__(self, config: ProtocolConfig) -> None:
        self.config = config
        self.now = 0.0
        """By this peer's own clock, which does not run while the peer stands still."""
        self.stalled_s = 0.0
        """How far it is behind the world's."""
        self.longest_s = STALL_BEATS * config.heartbeat_s
        """By which a deadline may be missed."""
        self.effects: list[Effect] = []
        self.alarms: Timers[Key] = Timers()
        self.membership = Membership(config.peer, config.heartbeat_s)
        elements = config.sizes.elements or (0,) * config.shards
        self.chains = [
            Chain(ShardId(s), config.log_length, config.blocks, config.limits, elements[s])
            for s in range(config.shards)
        ]
        placed = sorted((shard, FragmentId(f)) for f, shards in enumerate(config.fragments) for shard in shards)
        self.fragment_of = [fragment for _, fragment in placed]
        self.learner: LearnerView | None = None
        self.step = 0
        """Global step: as far as its own learner has come, and as others' claims are believed."""
        self.pace = StepClaimLimit(config.sync_every)
        self.is_current = False
        """Every shard has had a state."""
        self.heads_mark = 0
        self.departure: Literal["", "leaving", "finished"] = ""

    def send(self, peers: tuple[PeerId, ...], message: Message) -> None:
        """Emit a ``Send``, unless there is nobody to send to."""
        if peers:
            self.effects.append(Send(peers, message))

    def note(self, level: Literal["debug", "info", "warning"], topic: str, reason: str) -> None:
        """Emit a decision's reason."""
        self.effects.append(Note(level, topic, reason))

    def head(self, shard: ShardId) -> Head:
        """The shard's head, which must be here."""
        head = self.chains[shard].head
        assert head is not None
        return head

    def plausible(self, step: int) -> int:
        """As much of another peer's claim to be at ``step`` as is believed: see ``StepClaimLimit``."""
        if step <= self.step:
            return step
        step = min(step, self.config.latest_step)
        allowed = self.step + self.pace.allowed(self.now, self.membership.median_step_s(self.step_time_s()))
        return step if step <= allowed else max(min(step, self.membership.majority_step(self.step)), allowed)

    def pass_time(self, now: float) -> None:
        """The world's clock says ``now``. If a deadline was missed by far, nothing ran here meanwhile; for this peer
        that was no time: it neither measures it nor lets a deadline of anybody pass in it."""
        now -= self.stalled_s
        if now <= self.now:
            return
        if now - self.now <= self.longest_s:  # what was due before the last event has rung
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
        """The learner's own; 0 without one that trains."""
        return 0.0 if self.learner is None or self.learner.is_idle else self.learner.step_time_s

    def fastest_step_time_s(self) -> float:
        """Return the smallest step time of all learners that train; 0 if none does."""
        own, others = self.step_time_s(), self.membership.fastest_step_s
        return min(own, others) if own and others else own or others

    def is_participating(self) -> bool:
        """Whether this peer's learner may still contribute: it trains, or holds progress that is not merged."""
        learner = self.learner
        if learner is None or not self.is_current or not learner.is_able:
            return False
        return not learner.is_idle or self.unmerged_tokens() > 0

    def unmerged_tokens(self) -> int:
        """The learner's own tokens not merged yet, in the shard where that is most."""
        learner = self.learner
        return 0 if learner is None else max(learner.unmerged(chain.shard) for chain in self.chains)

    def phase(self) -> Phase:
        """Return the phase that this peer reports of itself."""
        if not self.is_current:
            return "joining"
        if self.departure:
            return self.departure
        return "following" if self.learner is None or self.learner.is_idle else "training"
