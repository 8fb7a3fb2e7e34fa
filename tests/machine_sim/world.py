"""The simulated world: one virtual clock, one heap of what is to come, and the peers that live in it.

Rules of this file:
1. All chance comes from one ``random.Random(seed)``, drawn in the order of events; nothing depends on a set's order.
2. What a paused process should do waits until it goes on; what a dead one should do is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.chain import genesis_head
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.messages import CommitHeader
from p2pdiloco.protocol.own_commits import is_left
from p2pdiloco.protocol.state import ProtocolConfig
from tests.machine_sim.auditing import Auditing
from tests.machine_sim.byzantine import Liars
from tests.machine_sim.checkers import Checks
from tests.machine_sim.integer_shards import EMPTY, Checkpoint, GlobalShard, Payload, outer_step
from tests.machine_sim.network import Network, NetworkSetting
from tests.machine_sim.process import PeerSetting, Process

if TYPE_CHECKING:
    from tests.machine_sim.transcript import Transcript

STEPS_REMEMBERED = 2048
"""Outer steps whose result is remembered, since every peer makes the same ones."""


class Conditions:
    """What the world is like; it may change."""

    def __init__(self) -> None:
        self.is_healed = False
        """No link or job fails any more."""
        self.are_leaves_whole = False
        """Whoever leaves must have merged everything: nothing failed since it began to."""
        self.is_frozen = False
        """Learners make no steps, so that everything comes to rest."""
        self.clock_drift = 0.0
        """Share by which peers' clocks are too fast or too slow at most."""
        self.directory_lag_s = 0.5
        self.paces: dict[PeerId, Callable[[float, float], float]] = {}
        """Of learners whose machines fail in part: how long work takes that begins now and needs so many seconds."""


class Fates:
    """What became of lives."""

    def __init__(self) -> None:
        self.disks: dict[PeerId, Checkpoint] = {}
        self.coming_back: set[PeerId] = set()
        """Crashed, with a disk, and due to restart."""
        self.gone: dict[PeerId, str] = {}
        """Left in order, with the reason."""
        self.incarnations = 0
        """Of learners."""


class World:
    """Everything, at one moment of simulated time."""

    def __init__(
        self,
        seed: int,
        make_config: Callable[[PeerId, PeerSetting], ProtocolConfig],
        network: NetworkSetting,
        transcript: Transcript | None = None,
    ) -> None:
        self.random = Random(seed)
        self.make_config = make_config
        self.now = 0.0
        self.events = 0
        self.has_gone_back = False
        """Learners were reset: what was merged after the good versions counts as lost."""
        self.poison: tuple[PeerId, float] | None = None
        """The peer whose next contribution ruins the model, and the time from which on it may."""
        self.transcript = transcript
        self.network = Network(self, network)
        self.checks = Checks(self)
        self.settings: dict[PeerId, PeerSetting] = {}
        self.processes: dict[PeerId, Process] = {}
        self.fates = Fates()
        self.conditions = Conditions()
        self.liars: Liars | None = None
        self.auditing = Auditing(self, seed)
        self._heap: list[tuple[float, int, Process | None, Callable[[Any], None], Any]] = []
        self._scheduled = 0
        self._outer_steps: dict[tuple[Digest, Digest], GlobalShard] = {}

    # -- time ----------------------------------------------------------------------------------------------------------

    def schedule(self, at: float, process: Process | None, action: Callable[[Any], None], argument: Any) -> None:
        """Call ``action(argument)`` at ``at``, if ``process`` lives then."""
        self._scheduled = count = self._scheduled + 1
        heappush(self._heap, (at, count, process, action, argument))

    def run_until(self, end: float) -> None:
        """Let time pass."""
        heap, checks = self._heap, self.checks
        while heap and heap[0][0] <= end:
            at, _, process, action, argument = heappop(heap)
            if process is not None:
                if process.is_dead:
                    continue
                if process.paused_until > at:
                    self.schedule(process.paused_until, process, action, argument)
                    continue
            self.now = at
            self.events += 1
            action(argument)
            if checks.is_over:
                return
        self.now = max(self.now, end)

    # -- peers ---------------------------------------------------------------------------------------------------------

    def add(self, name: PeerId, setting: PeerSetting, at: float = 0.0, *, is_founder: bool = False) -> None:
        """A peer comes at ``at``; the founder brings version 0."""
        self.settings[name] = setting
        if is_founder:
            config = self.make_config(name, setting)
            genesis = tuple(
                (ev.ShardState(genesis_head(config.run, ShardId(s), EMPTY.digest), 0, ()), EMPTY)
                for s in range(config.shards)
            )
            self.fates.disks[name] = Checkpoint(genesis)
            for state, value in genesis:
                self.checks.founded(state, value)
        self.schedule(at, None, self._start, name)

    def _start(self, name: PeerId) -> None:
        if name in self.processes:
            return
        self.fates.coming_back.discard(name)
        setting = self.settings[name]
        drift = self.conditions.clock_drift * (2 * self.random.random() - 1)
        clock = (1000.0 * self.random.random(), 1.0 + drift)
        process = Process(self, name, setting, self.make_config(name, setting), clock)
        self.processes[name] = process
        disk = self.fates.disks.get(name)
        process.start(Checkpoint(()) if disk is None else disk)
        if self.network.setting.is_bounded:
            self.schedule(self.now, process, self.network.keep_bounded, process)
            return
        for other in self.processes:
            if other != name:
                self.network.dial_later(name, other, self.conditions.directory_lag_s * self.random.random())

    def next_incarnation(self) -> int:
        """A number that no learner had before."""
        self.fates.incarnations += 1
        return self.fates.incarnations

    def crash(self, name: PeerId, *, keeps_disk: bool, restart_s: float | None) -> None:
        """SIGKILL; the peer restarts after ``restart_s``, or never. The last holder of all states has saved them."""
        if keeps_disk and not self.survives_without(name):
            self.save(name)
        process = self.processes.pop(name, None)
        if process is None:
            return
        process.is_dead = True
        if process.learner is not None:
            process.learner.is_dead = True
        self.network.vanish(process)
        if not keeps_disk:
            self.fates.disks.pop(name, None)
            self.checks.honesty.forgot(name)
        if restart_s is not None:
            if keeps_disk and name in self.fates.disks:
                self.fates.coming_back.add(name)
            self.schedule(self.now + restart_s, None, self._start, name)

    def made(self, name: PeerId, header: CommitHeader, payload: Payload) -> None:
        """A peer makes a commit, and keeps it before it sends it."""
        self.checks.made(name, header)
        disk = self.fates.disks.get(name, Checkpoint(()))
        if header not in [earlier for earlier, _ in disk.own]:
            self.fates.disks[name] = msgspec.structs.replace(disk, own=(*disk.own, (header, payload)))

    def pause(self, name: PeerId, duration_s: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        process = self.processes.get(name)
        if process is not None:
            process.paused_until = max(process.paused_until, self.now + duration_s)

    def left(self, process: Process, reason: str) -> None:
        """The process ends in order."""
        process.is_dead = True
        self.checks.left(process)
        checkpoint = process.checkpoint()
        if checkpoint is not None:
            self.fates.disks[process.name] = checkpoint
        if process.learner is not None:
            process.learner.is_dead = True
        self.fates.gone[process.name] = reason
        self.processes.pop(process.name, None)
        self.network.close_in_order(process)

    def save(self, name: PeerId) -> None:
        """Write the peer's checkpoint, unless it stands still."""
        process = self.processes.get(name)
        if process is not None and not process.is_paused():
            checkpoint = process.checkpoint()
            if checkpoint is not None:
                process.judge(checkpoint)
                heads = {state.head.shard: state.head for state, _ in checkpoint.shards}
                kept = self.fates.disks[name].own if name in self.fates.disks else ()
                own = tuple((h, payload) for h, payload in kept if not is_left(h, heads[h.shard]))
                convictions = process.machine.view.convictions()
                self.fates.disks[name] = msgspec.structs.replace(checkpoint, own=own, convictions=convictions)

    def save_all(self, every_s: float) -> None:
        """Write everybody's, again and again."""

        def save(_: None) -> None:
            for name in sorted(self.processes):
                self.save(name)
            self.schedule(self.now + every_s, None, save, None)

        self.schedule(every_s, None, save, None)

    def survives_without(self, name: PeerId) -> bool:
        """Whether the run goes on if this peer never comes back: somebody else has all states, or will have."""
        others = [p for n, p in self.processes.items() if n != name and p.machine.core.is_current]
        return bool(others) or bool(self.fates.coming_back - {name})

    def living(self) -> list[Process]:
        """Processes of honest peers, by name."""
        return [self.processes[name] for name in sorted(self.processes) if not self.settings[name].lies]

    # -- numbers -------------------------------------------------------------------------------------------------------

    def outer_step(self, base: GlobalShard, digest: Digest, payload: Payload) -> GlobalShard:
        """The outer step, remembered: every peer makes the same one."""
        key = (base.digest, digest)
        value = self._outer_steps.get(key)
        if value is None:
            if len(self._outer_steps) >= STEPS_REMEMBERED:
                self._outer_steps.clear()
            value = self._outer_steps[key] = outer_step(base, payload)
        return value
