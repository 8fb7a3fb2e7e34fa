"""One machine on a stage: peers are names, long work is done when the test says so, time is a number.

Peer a is the machine, founder of a run of one shard (H = 4) with a learner. The others are connected, live and
training, answer heartbeats without delay, so that round trips are 0, and say that their heads are ours.
"""

from __future__ import annotations

from itertools import count
from typing import Any, TypeVar

import msgspec

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.chain import genesis_head, record_of
from p2pdiloco.protocol.counted_tokens import NOTHING_COUNTED, TokenCounts
from p2pdiloco.protocol.data_blocks import Trained
from p2pdiloco.protocol.groups import drawn_groups, group_of
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, PeerId, RunId, ShardId, digest_of, learner_id, peer_of
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.ownership import ranked_owners
from p2pdiloco.protocol.state import ProtocolConfig
from tests.machine_sim.scenarios import base_config

A, B, C, D = (PeerId(name) for name in "abcd")
SHARD = ShardId(0)
STEP_S = 0.5
TOKENS = 10
"""Of one inner step."""
TICK_S = 0.1
"""How often the other peers beat."""
NEWS_S = 0.05
"""By then the machine has looked at what a heartbeat says (it waits a little, for others to come)."""
WORK = (ef.Snapshot, ef.Encode, ef.Merge, ef.Apply, ef.Install)
BEAT = msg.Heartbeat(
    sequence=1,
    echo=0,
    echo_held_s=0.0,
    phase="training",
    is_participating=True,
    step=0,
    step_time_s=STEP_S,
    heads_mark=0,
    weight=1.0,
)
"""A training peer's; a mark of 0 stands for heads like ours."""

E = TypeVar("E", bound=ef.Effect)
M = TypeVar("M", bound=msg.Message)


def only(effects: list[ef.Effect], kind: type[E]) -> list[E]:
    """The effects of one kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects: list[ef.Effect], kind: type[M]) -> list[tuple[PeerId, M]]:
    """To whom messages of one kind go."""
    sends = only(effects, ef.Send)
    return [(peer, s.message) for s in sends if isinstance(s.message, kind) for peer in s.peers]


def notes(effects: list[ef.Effect], topic: str) -> list[str]:
    """What is said about a topic."""
    return [note.reason for note in only(effects, ef.Note) if note.topic == topic]


def life(peer: PeerId, incarnation: int = 1) -> LearnerId:
    """One of the peer's learners."""
    return learner_id(peer, str(incarnation))


def tokens(peer: PeerId, start: int, stop: int) -> msg.Contributor:
    """A range of the peer's learner, a step for each ten tokens."""
    return msg.Contributor(life(peer), start, stop, start // TOKENS, stop // TOKENS)


def with_payload(contributor: msg.Contributor, name: str) -> msg.Contributor:
    """The range with an outer gradient of this name."""
    return msgspec.structs.replace(contributor, payload=bytes.fromhex(digest(name)))


def bare(contributor: msg.Contributor) -> msg.Contributor:
    """The range alone."""
    return msgspec.structs.replace(contributor, payload=b"", signature=b"")


def digest(name: str) -> Digest:
    """Any digest."""
    return digest_of(name.encode())


def merged_by(collector: PeerId, *contributors: msg.Contributor, **changes: Any) -> msg.GroupMerge:
    """A group's merge of these, sorted by learner."""
    payload = bytes.fromhex(digest(f"merged by {collector} of {contributors}"))
    return msgspec.structs.replace(msg.GroupMerge(collector, contributors, payload), **changes)


def run_owned(owners: str, version: int = 1, bits: int = 0) -> RunId:
    """A run in which these equal peers are ranked in this order for shard 0's ``version``; of groups, the first one's
    comes first."""
    wanted = tuple(PeerId(name) for name in owners)
    candidates = tuple((peer, 1.0) for peer in sorted(wanted))
    runs = (RunId(f"run {i}") for i in count())
    first = group_of(wanted[0], bits)
    return next(
        run
        for run in runs
        if ranked_owners(run, 0, version, candidates) == wanted and drawn_groups(f"{run}/0/{version}", bits)[0] == first
    )


def genesis(config: ProtocolConfig) -> tuple[ev.ShardState, ...]:
    """Version 0 of all shards."""
    shards = [ShardId(s) for s in range(config.shards)]
    return tuple(ev.ShardState(genesis_head(config.run, s, digest(f"state {s}")), 0, ()) for s in shards)


def commit_on(parent: msg.Head, *contributors: msg.Contributor, **changes: Any) -> msg.CommitHeader:
    """A sound child of ``parent``, whose chain counts nobody else, but for ``changes``."""
    usual, factors = _usual.get(parent.id, NOTHING_COUNTED), changes.get("factors", ())
    if len(factors) != len(contributors):
        factors = ()
    given = {peer_of(c.learner): c.tokens for c in contributors} or {B: 1}
    tokens, counts = usual.count(parent.version + 1, given, 2**60, factors)
    marks = {c.learner: ev.Mark(c.tokens_to, c.steps_to, parent.version + 1) for c in contributors}
    header = msg.CommitHeader(
        shard=parent.shard,
        version=parent.version + 1,
        parent=parent.id,
        step=4 * (parent.version + 1),
        owner=B,
        contributors=contributors,
        tokens=parent.tokens + tokens,
        payload=digest(f"payload on {parent.id} of {contributors}"),
        result=digest(f"result on {parent.id} of {contributors}"),
        record=record_of(marks, Trained()),
        counts=counts,
    )
    return remembered(msgspec.structs.replace(header, **changes))


_usual: dict[Digest, TokenCounts] = {}
"""By head, of all commits that a test has seen."""


def remembered(header: msg.CommitHeader) -> msg.CommitHeader:
    """``header``, on which ``commit_on`` may build."""
    _usual[msg.commit_id(header)] = header.counts
    return header


def head_of(header: msg.CommitHeader) -> msg.Head:
    """The head that a commit makes."""
    return msg.Head(header.shard, header.version, msg.commit_id(remembered(header)), header.tokens)


class Stage:
    """Peer a's machine and what happens to it."""

    def __init__(
        self,
        *others: PeerId,
        owners: str = "",
        is_founder: bool = True,
        has_learner: bool = True,
        **changes: Any,
    ) -> None:
        run = run_owned(owners) if owners else RunId("run")
        self.config = base_config(**{"run": run, "peer": A, **changes})
        self.machine = Machine(self.config)
        self.now = 0.0
        self.next_tick = TICK_S
        """When the others beat again."""
        self.beats: dict[PeerId, msg.Heartbeat] = {}
        """What the others say whenever they beat; who is not in here is silent."""
        self.round_trip_s = 0.0
        """Round trip that the machine measures to the others, but for those in ``round_trips``."""
        self.round_trips: dict[PeerId, float] = {}
        self.beaten: dict[PeerId, tuple[int, float]] = {}
        """The newest heartbeat that each of the others got, and when."""
        self.steps = 0
        self.incarnation = 1
        self.tell(ev.Started(genesis(self.config) if is_founder else ()))
        for other in others:
            self.meet(other)
        if has_learner:
            self.tell(ev.LearnerStarted(life(A)))

    # -- what happens --------------------------------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> list[ef.Effect]:
        """One event, now."""
        effects = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        for peer, beat in sent(effects, msg.Heartbeat):
            self.beaten[peer] = (beat.sequence, self.now)
        return effects

    def hear(self, peer: PeerId, message: msg.Message) -> list[ef.Effect]:
        """``peer`` says something."""
        return self.tell(ev.Received(peer, message))

    def meet(self, peer: PeerId, **says: Any) -> list[ef.Effect]:
        """A connection, and a first heartbeat."""
        self.beats[peer] = msgspec.structs.replace(BEAT, sequence=0)
        return self.tell(ev.PeerConnected(peer)) + self.says(peer, **says)

    def says(self, peer: PeerId, **says: Any) -> list[ef.Effect]:
        """``peer`` says something else of itself from now on; time for the machine to take it in."""
        self.beats[peer] = msgspec.structs.replace(self.beats[peer], **says)
        return self.beat(peer) + self.wait(NEWS_S)

    def beat(self, peer: PeerId) -> list[ef.Effect]:
        """``peer`` says what it says of itself; the machine may not have taken it in when this returns."""
        before = self.beats[peer]
        echo, at = self.beaten.get(peer, (0, self.now))
        self.beats[peer] = msgspec.structs.replace(
            before,
            sequence=before.sequence + 1,
            echo=echo,
            echo_held_s=self.now - at - self.round_trips.get(peer, self.round_trip_s),
        )
        ours = self.machine.core.heads_mark
        return self.hear(peer, msgspec.structs.replace(self.beats[peer], heads_mark=before.heads_mark or ours))

    def wait(self, seconds: float) -> list[ef.Effect]:
        """Time passes: the others beat, and the machine is woken at its deadlines."""
        effects: list[ef.Effect] = []
        end = self.now + seconds
        while self.now < end:
            due = self.machine.next_deadline()
            self.now = min(end, self.next_tick, end if due is None else max(due, self.now))
            if self.now == self.next_tick:
                self.next_tick += TICK_S
                for peer in self.beats:
                    effects += self.beat(peer)
            effects += self.tell(ev.Woke())
        return effects

    # -- the learner and the worker ------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """What the learner has trained."""
        return self.steps * TOKENS

    def train(self, steps: int) -> list[ef.Effect]:
        """The learner makes steps, at once."""
        self.steps += steps
        return self.tell(ev.Stepped(self.steps, self.tokens, STEP_S))

    def work(self, effects: list[ef.Effect], *kinds: type[ef.Effect]) -> list[ef.Effect]:
        """Do the long work of these kinds (all, if none is named) until none is left; returns all effects."""
        done, effects = list(effects), list(effects)
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, kinds or WORK):
                more = self.tell(self.end_of(effect))
                done += more
                effects += more
        return done

    def end_of(self, effect: ef.Effect) -> ev.Event:
        """The event in which a piece of work ends well."""
        match effect:
            case ef.Snapshot():
                return ev.Snapshotted(effect.fragment, effect.step, self.steps, self.tokens)
            case ef.Encode():
                given = with_payload(effect.contributor, f"own {effect.shard} {effect.base.id} {self.tokens}")
                return ev.Encoded(effect.shard, effect.base.id, given, 100)
            case ef.Merge():
                name = f"{effect.base.id} {sorted(c.payload for c in effect.contributions)}"
                if effect.is_group:
                    made = merged_by(self.config.peer, *(c.contributor for c in effect.contributions))
                    return ev.GroupMerged(effect.shard, effect.base.id, made, 100)
                return ev.Merged(effect.shard, effect.base.id, digest(f"merged {name}"), digest(f"result {name}"))
            case ef.Apply():
                return ev.Applied(effect.header.shard, effect.id)
            case ef.Install():
                return ev.Applied(effect.state.head.shard, effect.state.head.id)
            case _:
                raise AssertionError(effect)

    def give(self, steps: int = 4) -> list[ef.Effect]:
        """The learner trains to its next round and contributes."""
        return self.work(self.train(steps), ef.Snapshot, ef.Encode)

    # -- what the others say -------------------------------------------------------------------------------------------

    def head(self, shard: ShardId = SHARD) -> msg.Head:
        """This peer's head."""
        head = self.machine.core.chains[shard].head
        assert head is not None
        return head

    def lineage(self) -> tuple[Digest, ...]:
        """Of a state that parts from this peer's chain at its head."""
        return (self.head().id,)

    def bring(self, state: ev.ShardState, by: PeerId) -> list[ef.Effect]:
        """A state that all others have is there; its chain goes on from this peer's head."""
        for peer in self.machine.core.membership.live:
            self.hear(peer, msg.Heads((state.head,), 0))
        return self.tell(ev.Fetched(by, state, self.lineage()))

    def contribution(
        self, peer: PeerId, start: int = 0, stop: int = 40, *, base: msg.Head | None = None, **changes: Any
    ) -> msg.Contribution:
        """What ``peer`` gives to the shard's next version."""
        given = changes.pop("contributor", tokens(peer, start, stop))
        if stop > start:
            given = with_payload(given, f"of {given}")
        contribution = msg.Contribution(SHARD, base or self.head(), 4, given, 100 if given.payload else 0)
        return msgspec.structs.replace(contribution, **changes)

    def offer(self, peer: PeerId, start: int = 0, stop: int = 40) -> list[ef.Effect]:
        """``peer`` contributes on this peer's head, to a round that it announces if nobody has."""
        effects: list[ef.Effect] = []
        if self.machine.aggregation.collections[SHARD].opened_at is None:
            effects = self.announce(peer, self.machine.contributions.rounds[0].step + 4)
        return effects + self.hear(peer, self.contribution(peer, start, stop))

    def announce(self, peer: PeerId, step: int, *heads: msg.Head) -> list[ef.Effect]:
        """``peer`` announces a round of fragment 0, with our head if no other is named."""
        return self.hear(peer, msg.Round(FragmentId(0), step, heads or (self.head(),)))

    def commit(self, *contributors: msg.Contributor, **changes: Any) -> msg.CommitHeader:
        """A sound child of the head."""
        chain = self.machine.core.chains[SHARD]
        record = chain.record_after(self.head().version + 1, contributors)
        _usual[self.head().id] = chain.counts
        longest = chain.stated_longest(contributors) if contributors else 0.0
        return commit_on(self.head(), *contributors, **{"record": record, "longest": longest, **changes})

    def take(self, header: msg.CommitHeader, sender: PeerId = B) -> list[ef.Effect]:
        """A commit comes and is applied, in its owner's turn."""
        return self.work(self.hear_in_turn(sender, header), ef.Apply)

    def hear_in_turn(self, sender: PeerId, header: msg.CommitHeader) -> list[ef.Effect]:
        """A commit comes, and time passes until its owner may merge."""
        effects = self.hear(sender, msg.Commit(header))
        alarm = ("turn", header.shard)
        alarms = self.machine.core.alarms
        for _ in range(100):
            if alarm not in alarms:
                break
            effects += self.wait(TICK_S)
        return effects
