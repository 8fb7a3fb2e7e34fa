"""A simulated process: the driver that runs the machine's effects, as the node does with sockets and threads.

Rules of this file:
1. Long work on shards runs in one worker, in order, and takes time; downloads run beside it.
2. The driver holds what ``machine.payloads()`` names and drops the rest now and then; an effect that needs a payload
   that is gone is a violation.
3. A shard's state is whatever the last Apply or Install made it; the learner is told to move at that moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.config import LEAST_FACTOR
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId, learner_id
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.messages import Commit, Contribution, GroupMerge, Head
from p2pdiloco.protocol.state import ProtocolConfig
from tests.machine_sim.auditing import with_inserted
from tests.machine_sim.integer_shards import (
    POISON,
    Checkpoint,
    GlobalShard,
    Payload,
    States,
    component,
    merged,
    payload_digest,
)
from tests.machine_sim.learner import Adopt, Copy, Learner, MoveEnd, Pause
from tests.machine_sim.network import Link
from tests.simulation.clock import Clock

if TYPE_CHECKING:
    from tests.machine_sim.world import World

WOKE = ev.Woke()
RUINED = 3.0
"""Held-out loss of a ruined model; that of others is 1."""
CHECKED_EVERY = 16
"""Events of one process between two looks at its invariants and bounds."""
PAYLOADS_CHECKED_EVERY = 64
"""Events of one process between two clearings of its payloads."""


def factors_of(payload: Digest, contributions: int, *, is_liar: bool) -> tuple[int, ...]:
    """How much of each contribution counts in a simulated merge: in one of four of three or more, one counts less. A
    liar states now and then what cannot be."""
    drawn = int(payload[:8], 16)
    if is_liar and drawn % 16 == 1:
        return (LEAST_FACTOR - 1,) * contributions
    if contributions < 3 or drawn % 4:
        return ()
    factors = [100] * contributions
    factors[drawn // 4 % contributions] = LEAST_FACTOR + drawn // 64 % (100 - LEAST_FACTOR)
    return tuple(factors)


class PeerSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer is like, in all its lives."""

    step_s: float = 0.2
    step_jitter: float = 0.1
    """Steps take up to this share more or less."""
    tokens_per_step: int = 10
    has_learner: bool = True
    weight: float = 1.0
    work_s: float = 0.01
    """Typical time of one job on one shard."""
    state_bytes: int = 20_000
    payload_bytes: int = 2_000
    learner_lag_s: float = 0.0
    load_s: float = 0.2
    """From the states being there to the learner's first step beginning."""
    block_steps: int = 3
    """Steps that a block of data takes."""
    failed_share: float = 0.0
    """Of jobs that may fail, those that do."""
    lies: float = 0.0
    """Share of its messages that are lies."""
    keeps_commits: bool = False
    """It sends no commits but its own."""
    wildness: float = 0.0
    """Share of the commits that it makes which have values of its own; it goes on from them."""
    dishonesty: float = 0.0
    """Share of the commits that it makes whose values are not the merge of their contributions, though nobody could
    tell from the commit alone."""
    poison: Literal["", "encode", "merge"] = ""
    """The learner's values are never finite: nothing of it can be encoded, or merged by anybody."""


Fetched = tuple[ev.ShardState, tuple[Digest, ...], PeerId, GlobalShard]
"""A state, the heads that led to it, who made the last of them, and its value."""
Job = tuple[Callable[[Any], ev.Event | None], Any]


class Process:
    """One life of one peer's node process, with its learner."""

    def __init__(
        self, world: World, name: PeerId, setting: PeerSetting, config: ProtocolConfig, clock: tuple[float, float]
    ) -> None:
        self.world = world
        self.name = name
        self.setting = setting
        self.machine = Machine(config)
        self.clock = Clock(*clock)
        self.is_dead = False
        self.paused_until = 0.0
        self.links: dict[PeerId, Link] = {}
        self.store: dict[Digest, Payload] = {}
        self.states = States(config.shards)
        self.jobs: deque[Job] = deque()
        """The first of them is under way."""
        self.learner: Learner | None = None
        self.handled = 0
        self.good: Checkpoint | None = None
        """The last one of this life after which the model was not ruined."""
        self.saved: Checkpoint | None = None
        self._wake_due = float("inf")
        """The earliest deadline that the world will wake us for, by our own clock."""
        self._run: dict[type, Callable[[Any], None]] = {
            ef.Send: self._send,
            ef.Snapshot: self._snapshot,
            ef.Train: self._train,
            ef.Encode: self._encode_later,
            ef.Merge: self._merge_later,
            ef.Apply: self._apply_later,
            ef.Install: self._install_later,
            ef.Fetch: self._fetch,
            ef.Restore: self._restore,
            ef.AdoptStep: self._adopt_step,
            ef.BecameCurrent: self._became_current,
            ef.PauseLearner: self._pause_learner,
            ef.MoveEnd: self._move_end,
            ef.Evaluate: self._evaluate,
            ef.Audit: lambda effect: world.auditing.consider(self, effect),
            ef.HangUp: lambda effect: world.network.break_connection(self, effect.peer, effect.reason),
            ef.Leave: self._leave,
        }

    def is_paused(self) -> bool:
        """Whether SIGSTOP holds it."""
        return self.paused_until > self.world.now

    def start(self, disk: Checkpoint) -> None:
        """The first event, with what lies on disk."""
        for state, value in disk.shards:
            self.states.heads[state.head.shard] = state.head.id
            self.states.values[state.head.shard] = value
        self.store.update((header.payload, payload) for header, payload in disk.own)
        own = tuple(header for header, _ in disk.own)
        self.tell(ev.Started(tuple(state for state, _ in disk.shards), disk.lineages, own, disk.convictions))

    def tell(self, event: ev.Event) -> None:
        """Hand the machine an event and run what it answers."""
        world, machine = self.world, self.machine
        effects = machine.handle(event, self.clock.at(world.now))
        if world.transcript is not None:
            world.transcript.write(self, event, effects)
        if effects:
            run = self._run
            for effect in effects:
                kind = effect.__class__
                if kind is not ef.Note:
                    run[kind](effect)
        deadline = machine.next_deadline()
        if deadline is not None and deadline < self._wake_due and not self.is_dead:
            self._wake_due = deadline
            at = self.clock.when(deadline)
            world.schedule(at if at > world.now else world.now, self, self._wake, deadline)
        self.handled = handled = self.handled + 1
        if not handled % CHECKED_EVERY:
            world.checks.after_events(self)
            if not handled % PAYLOADS_CHECKED_EVERY:
                self._clear_payloads()

    def _wake(self, due: float) -> None:
        if due == self._wake_due:
            self._wake_due = float("inf")
            self.tell(WOKE)

    def _clear_payloads(self) -> None:
        held = set[Digest]().union(*(self.machine.payloads(chain.shard) for chain in self.machine.core.chains))
        self.store = {digest: payload for digest, payload in self.store.items() if digest in held}

    # -- messages ------------------------------------------------------------------------------------------------------

    def _send(self, effect: ef.Send) -> None:
        message, payload, payload_bytes = effect.message, None, 0
        kind = message.__class__
        if kind is Commit or kind is Contribution:
            digest = message.header.payload if isinstance(message, Commit) else message.payload  # type: ignore[union-attr]
            if digest:
                payload, payload_bytes = self._payload(digest), self.setting.payload_bytes
            if self.setting.keeps_commits and isinstance(message, Commit) and message.header.owner != self.name:
                return
        send = self.world.network.send
        for peer in effect.peers:
            link = self.links.get(peer)
            if link is not None:
                send(link, message, payload, payload_bytes)

    def _payload(self, digest: Digest) -> Payload:
        payload = self.store.get(digest)
        if payload is None:
            self.world.checks.violated(6, f"{self.name} needs payload {digest[:8]}, which machine.payloads() gave up")
            return ()
        return payload

    # -- the worker ----------------------------------------------------------------------------------------------------

    def _work(self, job: Callable[[Any], ev.Event | None], argument: Any) -> None:
        self.jobs.append((job, argument))
        if len(self.jobs) == 1:
            self._begin()

    def _begin(self) -> None:
        world = self.world
        world.schedule(world.now + self.setting.work_s * (0.5 + world.random.random()), self, self._end, None)

    def _end(self, _: None) -> None:
        job, argument = self.jobs.popleft()
        if self.jobs:
            self._begin()
        event = job(argument)
        if event is not None:
            self.tell(event)

    def _fails(self) -> bool:
        share = self.setting.failed_share
        return bool(share) and not self.world.conditions.is_healed and self.world.random.random() < share

    def _snapshot(self, effect: ef.Snapshot) -> None:
        if self.learner is not None:
            self.learner.order(Copy(effect.fragment, effect.step))

    def _train(self, effect: ef.Train) -> None:
        if self.learner is not None:
            self.learner.work.blocks.append(effect.block)

    def _encode_later(self, effect: ef.Encode) -> None:
        self._work(self._encode, (effect, self.learner))

    def _encode(self, argument: tuple[ef.Encode, Learner | None]) -> ev.Event:
        effect, learner = argument
        shard, base = effect.shard, self.states.values[effect.shard]
        if learner is None or learner is not self.learner:
            return ev.Failed("encode", shard, None, "the learner is gone")
        own = learner.orders.effective(shard)
        if self.states.heads[shard] != effect.base.id or base is None:
            return ev.Failed("encode", shard, None, "the head has moved")
        if own is None:
            return ev.Failed("encode", shard, None, "the learner was reset after the snapshot")
        if self.setting.poison == "encode" or self._fails():
            return ev.Failed("encode", shard, None, "values are not finite")
        payload: Payload = ((learner.name, base.of(learner.name) - own),)
        if (
            self.world.poison is not None
            and self.world.poison[0] == self.name
            and self.world.now >= self.world.poison[1]
        ):
            payload, self.world.poison = (*payload, (POISON, 1)), None
        digest = payload_digest(shard, effect.base.id, payload)
        self.store[digest] = payload
        given = msgspec.structs.replace(effect.contributor, payload=bytes.fromhex(digest))
        if self.world.liars is not None:
            self.world.liars.signs(self.name, shard, effect.base.id, given, payload)
        return ev.Encoded(shard, effect.base.id, given, self.setting.payload_bytes)

    def _merge_later(self, effect: ef.Merge) -> None:
        if not effect.is_group:
            self.world.checks.merging(self, sum(len(c.contributors) for c in effect.contributions))
        self._work(self._merge, (effect, [self._payload(c.payload) for c in effect.contributions]))

    def _merge(self, argument: tuple[ef.Merge, list[Payload]]) -> ev.Event:
        effect, payloads = argument
        shard, base, kind = effect.shard, self.states.values[effect.shard], "group" if effect.is_group else "merge"
        if base is None or self.states.heads[shard] != effect.base.id:
            return ev.Failed(kind, shard, None, "the head has moved")
        givers = [c.giver for c in effect.contributions]
        learners = [c.giver for c in effect.contributions if c.group is None]
        culprits = [peer for peer in learners if self.world.settings[peer].poison == "merge"]
        if culprits or self._fails():
            return ev.Failed(kind, shard, (culprits or givers)[0], "values are not finite")
        wildness = 0.0 if effect.is_group else self.setting.wildness
        payload = merged(payloads, is_wild=bool(wildness) and self.world.random.random() < wildness)
        if is_inserted := self.world.auditing.inserts(self.name):
            payload = with_inserted(payload)
        digest = payload_digest(shard, effect.base.id, payload)
        if is_inserted:
            self.world.auditing.false.add(digest)
        self.store[digest] = payload
        factors = factors_of(digest, len(payloads), is_liar=bool(self.setting.lies))
        if effect.is_group:
            contributors = tuple(c.contributor for c in effect.contributions)
            group = GroupMerge(self.name, contributors, bytes.fromhex(digest), factors)
            self.world.checks.group_merges.add((shard, effect.base.id, group))
            return ev.GroupMerged(shard, effect.base.id, group, self.setting.payload_bytes)
        result = self.world.outer_step(base, digest, payload)
        return ev.Merged(shard, effect.base.id, digest, result.digest, factors=factors)

    # -- states --------------------------------------------------------------------------------------------------------

    def _apply_later(self, effect: ef.Apply) -> None:
        payload = self._payload(effect.header.payload)
        if effect.header.owner == self.name:
            self.world.made(self.name, effect.header, payload)
        self._work(self._apply, (effect, payload, self._own(effect)))

    def _own(self, effect: ef.Apply | ef.Install) -> int:
        """The own component of what is settled, less what is restored."""
        learner = self.learner
        if learner is None or effect.learner != learner.name:
            return 0
        settled, restored = (
            sum(component(self._payload(digest), learner.name) for digest in digests)
            for digests in (effect.settled, effect.restored)
        )
        return settled - restored

    def _apply(self, argument: tuple[ef.Apply, Payload, int]) -> ev.Event:
        effect, payload, own = argument
        header = effect.header
        shard, base = header.shard, self.states.values[header.shard]
        if base is None or self.states.heads[shard] != header.parent:
            self.world.checks.violated(1, f"{self.name} applies {effect.id[:8]}, whose parent is not its head")
            return ev.Failed("apply", shard, None, "its parent is not the head")
        value = self.world.outer_step(base, header.payload, payload)
        if value.is_wild and not self.setting.wildness:
            return ev.Failed("values", shard, None, "nobody's step is so long")
        if value.digest != header.result or self._fails():
            return ev.Failed("apply", shard, None, "the digest is not the commit's")
        self.world.checks.applied(self, header, effect.id, base, value)
        self.world.auditing.applied(self, header, effect.id, payload)
        self._take(effect, shard, effect.id, value, own)
        return ev.Applied(shard, effect.id)

    def _install_later(self, effect: ef.Install) -> None:
        self._work(self._install, (effect, self._own(effect)))

    def _install(self, argument: tuple[ef.Install, int]) -> ev.Event:
        effect, own = argument
        head: Head = effect.state.head
        value = self.states.fetched.pop(head.id, None)
        if value is None or self._fails():
            return ev.Failed("install", head.shard, None, "the state is not here")
        if value.is_wild and self.states.values[head.shard] and effect.farthest < 1e300 and not self.setting.wildness:
            return ev.Failed("values", head.shard, None, "nobody's state is so far")
        self.world.checks.installed(self, effect.state, value)
        self._take(effect, head.shard, head.id, value, own)
        return ev.Applied(head.shard, head.id)

    def _take(self, effect: ef.Apply | ef.Install, shard: ShardId, head: Digest, value: GlobalShard, own: int) -> None:
        old = self.states.values[shard]
        self.states.heads[shard] = head
        self.states.values[shard] = value
        learner = self.learner
        if learner is None:
            return
        is_own = effect.learner == learner.name
        if effect.is_reset and is_own:
            learner.move(shard, value.of(learner.name), is_reset=True)
            return
        moved = value.of(learner.name) - (0 if old is None else old.of(learner.name)) + (own if is_own else 0)
        if moved:
            self.world.checks.moved(learner, shard, moved)
        learner.move(shard, moved, is_reset=False)

    def _restore(self, effect: ef.Restore) -> None:
        self.world.has_gone_back = True
        self.world.schedule(self.world.now + 0.5 * self.world.random.random(), self, self._restored, effect)

    def _restored(self, effect: ef.Restore) -> None:
        convictions, disks = self.machine.view.convictions(), self.world.fates.disks
        self.saved = None
        if self.good is None:
            self.tell(ev.Restored(effect.shard, None))
            return
        disks[self.name] = msgspec.structs.replace(self.good, own=(), convictions=convictions)
        state, value = self.good.shards[effect.shard]
        self.states.fetched[state.head.id] = value
        self.world.checks.went_back(state.head)
        self.tell(ev.Restored(effect.shard, state, self.good.lineages[effect.shard]))

    def _fetch(self, effect: ef.Fetch) -> None:
        world, link = self.world, self.links.get(effect.peer)
        if link is None or not link.connection.is_open:
            world.schedule(world.now, self, self._fetch_failed, effect)
            return
        slowness = 1 + world.random.random()
        at_once = self._read(link.target, effect.shard) if world.random.random() < 0.5 else None
        world.network.carry(link, self.setting.state_bytes, slowness, self._fetch_ends, (effect, link, at_once))

    def _read(self, donor: Process, shard: ShardId) -> Fetched | None:
        value = donor.states.values[shard]
        chain = donor.machine.core.chains[shard]
        if donor.is_dead or value is None or chain.head is None or chain.head.id != donor.states.heads[shard]:
            return None
        known = self.world.checks.commits.get((shard, chain.head.id))
        owner = PeerId("") if known is None or known.header is None else known.header.owner  # it has signed
        return chain.state(), tuple(chain.ancestry), owner, value

    def _fetch_ends(self, argument: tuple[ef.Fetch, Link, Fetched | None]) -> None:
        effect, link, found = argument
        is_cut = (effect.peer, self.name) in self.world.network.blocked
        if found is None and not is_cut and not link.target.is_paused():
            found = self._read(link.target, effect.shard)
        if found is None or is_cut or not link.connection.is_open:
            self._fetch_failed(effect)
        else:
            state, lineage, owner, value = found
            self.states.fetched[state.head.id] = value
            self.tell(ev.Fetched(effect.peer, state, lineage, owner))

    def _fetch_failed(self, effect: ef.Fetch) -> None:
        self.tell(ev.Failed("fetch", effect.shard, effect.peer, "the download broke off"))

    # -- the learner ---------------------------------------------------------------------------------------------------

    def _adopt_step(self, effect: ef.AdoptStep) -> None:
        if self.learner is not None:
            self.learner.order(Adopt(effect.step))

    def _became_current(self, _: ef.BecameCurrent) -> None:
        if self.setting.has_learner:
            self.world.schedule(self.world.now + self.setting.load_s, self, self._start_learner, None)

    def _start_learner(self, _: None) -> None:
        if self.learner is None and not self.machine.shutdown.is_done:
            name = learner_id(self.name, f"{self.world.next_incarnation()}")
            self.learner = Learner(self, name, self.machine.core.step)
            self.tell(ev.LearnerStarted(name, has_blocks=True))

    def crash_learner(self, restart_s: float) -> None:
        """The learner dies; the supervisor starts another one."""
        learner = self.learner
        if learner is not None:
            learner.is_dead = True
            self.learner = None
            self.tell(ev.LearnerStopped("killed"))
            self.world.schedule(self.world.now + restart_s, self, self._start_learner, None)

    def _pause_learner(self, _: ef.PauseLearner) -> None:
        if self.learner is not None:
            self.world.checks.pausing(self)
            self.learner.order(Pause())

    def _move_end(self, effect: ef.MoveEnd) -> None:
        if self.learner is not None:
            self.learner.order(MoveEnd(effect.end.steps))

    def _evaluate(self, effect: ef.Evaluate) -> None:
        self.world.schedule(self.world.now + 0.5, self, self._evaluated, effect.version)

    def _evaluated(self, version: int) -> None:
        if self.learner is not None:
            self.tell(ev.Evaluated(version, RUINED if self.is_ruined() else 1.0))

    def _leave(self, effect: ef.Leave) -> None:
        self.world.left(self, effect.reason)

    def is_ruined(self) -> bool:
        """Whether its model holds the poison."""
        return any(value is not None and bool(value.of(POISON)) for value in self.states.values)

    def judge(self, saved: Checkpoint) -> None:
        """The last checkpoint is good if the model is, now that the next one is written."""
        if self.saved is not None and not self.is_ruined():
            self.good = self.saved
            self.tell(ev.CheckpointGood(tuple(state.head.id for state, _ in self.good.shards)))
        self.saved = saved

    def checkpoint(self) -> Checkpoint | None:
        """What the disk gets; None while nothing is joined."""
        shards = []
        for chain, value in zip(self.machine.core.chains, self.states.values, strict=True):
            if chain.head is None or value is None:
                return None
            shards.append((chain.state(), value))
        return Checkpoint(tuple(shards), tuple(tuple(chain.ancestry) for chain in self.machine.core.chains))
