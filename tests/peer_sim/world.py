"""One seed's world: peers with their lives, learners and disks, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pdiloco.codec.digests import StateForm, state_digest
from p2pdiloco.peer import checkpoint, state_client
from p2pdiloco.peer.checkpoint import CheckpointError
from p2pdiloco.peer.disk_budget import DAY_S, LOGGED_SHARE, UNLOGGED_SHARE
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.peer.options import LearnerOptions, PeerOptions
from p2pdiloco.peer.peer import InitialState, Peer
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.chain import genesis_head
from p2pdiloco.protocol.events import ShardState
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId
from p2pdiloco.protocol.manifest import (
    BlockSpec,
    CodecConfig,
    EvaluationConfig,
    InnerConfig,
    Layout,
    Manifest,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
    TensorSpec,
    make_layout,
)
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire.control_messages import PeerStatus, StateProof
from tests.peer_sim.blackout import Blackout
from tests.peer_sim.checkers import Checks
from tests.peer_sim.directory import Directory
from tests.peer_sim.durability import Durability, shown
from tests.peer_sim.host import SimulatedHost
from tests.peer_sim.learner import Learners, SimulatedLearner, Vectors
from tests.peer_sim.loop import StandstillError, VirtualLoop
from tests.peer_sim.lying_owner import LyingOwners
from tests.peer_sim.machine import Computer, PeerSetting
from tests.peer_sim.members import Acquaintances, Everybody
from tests.peer_sim.network import SPARED_S, Network
from tests.peer_sim.tuning import CHUNK

FOLDER = Path("/peer")
CHECKPOINTS = FOLDER / "checkpoint"
CHUNKS_A_SHARD = 4
RESTART_S = 1.0
"""Until a service manager starts a peer again that its machine could not start."""
SELDOM_S = 20.0
"""Between two checkpoints of a thrifty peer."""


class WorldSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What is drawn for a seed, but for its faults."""

    peers: tuple[PeerSetting, ...]
    schedule: ScheduleConfig
    outer: OuterConfig
    codec: CodecConfig
    steps: int
    shards_a_fragment: int
    blocks: int
    delay_s: float
    bytes_per_s: float
    keep_checkpoints: int = 2
    checkpoint_s: float = 5.0
    has_payloads_on_disk: bool = False
    """All but the newest of each shard."""
    is_thrifty: bool = False
    """Checkpoints come seldom, and what is committed is kept in between."""
    is_private: bool = False
    """Peers know only those as members whom they have met, or heard of when they asked."""
    limit_s: float = 600.0
    """When the run must be over, at the latest."""

    @property
    def is_rough(self) -> bool:
        """What its seed number says: many faults, and each where it matters."""
        return self.peers[0].is_rough

    @property
    def is_exact(self) -> bool:
        """Whole numbers survive the codec."""
        return self.codec.up == self.codec.down == "bf16"


class World:
    """See the module."""

    def __init__(self, seed: int, setting: WorldSetting) -> None:
        self.random = Random(f"{seed}/world")
        self.setting = setting
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(self._defect)
        secrets = (Random(f"{seed}/{i}").randbytes(32) for i in range(len(setting.peers)))
        identities = [Identity(Ed25519PrivateKey.from_private_bytes(secret)) for secret in secrets]
        self.manifest = founded(seed, setting, identities[0].peer_id)
        self.layout = Layout.of(self.manifest)
        self.computers = {
            identity.peer_id: Computer(seed, identity, each)
            for identity, each in zip(identities, setting.peers, strict=True)
        }
        self.network = Network(self)
        self.directory = Directory(self)
        self.checks = Checks(self)
        least_s = SELDOM_S * LOGGED_SHARE / UNLOGGED_SHARE if setting.is_thrifty else 0.0
        self.durability = Durability(self, CHECKPOINTS, least_s)
        self.hosts: dict[PeerId, SimulatedHost] = {}
        """Lives under way."""
        self.learners = Learners()
        self.lying_owners = LyingOwners()
        self.blackout: Blackout | None = None
        self._over: asyncio.Future[None] = self.loop.create_future()
        self.happened: Counter[str] = Counter()
        """Faults that hit somebody, by kind."""
        self.harmed_at = 0.0
        """When the last fault ended, or the last life began."""

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self.loop.time()

    def at(self, when: float, action: Callable[[], object]) -> None:
        """``action`` at world time ``when``."""
        self.loop.call_at(max(when, self.now), action)

    def end(self) -> None:
        """Enough."""
        if not self._over.done():
            self._over.set_result(None)

    def run(self) -> list[str]:
        """From the beginning to the end; what was violated."""
        asyncio.set_event_loop(self.loop)
        self.at(self.setting.limit_s, self._too_late)
        self.at(SPARED_S, self.network.spare)

        async def main() -> None:
            await self._over

        try:
            self.loop.run_until_complete(main())
            if not self.checks.violations:
                self.checks.finished()
        except StandstillError:
            self.checks.violated(5, "things go on for ever at one moment")
            return self.checks.violations
        finally:
            self._close()
        return self.checks.violations

    def _close(self) -> None:
        for host in list(self.hosts.values()):
            host.die()
        with contextlib.suppress(StandstillError):
            self.loop.run_until_complete(asyncio.sleep(1.0))  # what is cancelled ends
        asyncio.set_event_loop(None)
        self.loop.close()

    def _defect(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback failed."""
        error = context.get("exception")
        if error is not None and not self._over.done():
            self.checks.failed(f"{context.get('message')}: {error!r}", error)

    def _too_late(self) -> None:
        if self._over.done():
            return
        phases = {host.peer.machine.core.phase() for name, host in self.hosts.items() if name not in self.checks.spoilt}
        if len(phases) <= 1 and phases <= {"joining", "following"}:
            self.end()  # whoever joins waits for somebody who has the model, who follows for somebody who trains
            return
        standing = []
        for name, host in self.hosts.items():
            core = host.peer.machine.core
            versions = [chain.head.version for chain in core.chains if chain.head is not None]
            live = len(core.membership.live)
            standing.append(f"{name[-6:]} {core.phase()} at step {core.step}, versions {versions}, live {live}")
        self.checks.violated(6, f"the run has no end: {'; '.join(standing) or 'nobody is there'}")

    def harm_until(self, when: float) -> None:
        """Until then not everything is as it should be."""
        self.harmed_at = max(self.harmed_at, when)

    # -- lives ---------------------------------------------------------------------------------------------------------

    def begin(self, name: PeerId) -> None:
        """A life of this peer, with what lies on its disk."""
        if name in self.hosts or name in self.checks.endings:
            return
        computer = self.computers[name]
        if computer.disk.shortage is not None:
            self.at(self.now + RESTART_S, partial(self.begin, name))
            return
        self.checks.counted["lives"] += 1
        self.harm_until(self.now)
        setting = computer.setting
        vectors = Vectors(self.layout)
        host = self.hosts[name] = SimulatedHost(self, name, computer.disk, setting.clock, vectors)
        options = PeerOptions(
            folder=FOLDER,
            is_follower=setting.is_follower,
            checkpoint_s=self.setting.checkpoint_s,
            keep_checkpoints=self.setting.keep_checkpoints,
            learner=LearnerOptions(reattach_s=setting.reattach_s),
            write_bytes_per_day=self._write_bytes_per_day(),
            payload_memory_bytes=0 if self.setting.has_payloads_on_disk else 4 << 20,
        )
        metrics = Metrics(FOLDER / "metrics.jsonl", partial(self.durability.told, name))
        peer = Peer(
            self.manifest,
            options,
            computer.identity,
            host,
            vectors,  # type: ignore[arg-type]
            metrics,
            sent_bytes=lambda: 0,
            status=self._status,
            observed=lambda event, effects, now: self._observed(host, event),
            permissions=Acquaintances(self.network.met[name], host.links, self.happened)
            if self.setting.is_private
            else Everybody(),
        )
        if setting.lie:
            self.lying_owners.begin(peer, setting.lie, self.checks.counted["lives"])
        host.serve(peer, partial(self._begin, host, peer))

    def _write_bytes_per_day(self) -> float | None:
        if not self.setting.is_thrifty:
            return None
        width = StateForm.of(self.setting.outer).width
        return width * self.layout.elements * DAY_S / SELDOM_S / LOGGED_SHARE

    def _begin(self, host: SimulatedHost, peer: Peer) -> None:
        initial = self._initial(host)
        is_founding = initial is None and not self.checks.values
        if is_founding:
            initial = self._version_zero()
        peer.begin(initial)
        self.durability.began(peer)
        if is_founding:
            self.checks.founded(peer)
        host.spawn(self._live(host, peer), name="peer")
        self.directory.begin(host)

    async def _live(self, host: SimulatedHost, peer: Peer) -> None:
        ending = await peer.live()
        if host.is_dead:
            return
        heads = (chain.head for chain in peer.machine.core.chains)
        self.computers[host.name].last_heads = tuple(head.id for head in heads if head is not None)
        self.checks.ended(peer, ending)
        if ending.status == 0 and not self.checks.violations:
            self.durability.ended(peer, host)
        peer.driver.close()
        self.network.close(host)
        self.directory.withdraw(host.name)
        del self.hosts[host.name]
        host.die()
        if not self.hosts and len(self.checks.endings) == len(self.computers):
            self.end()

    def _initial(self, host: SimulatedHost) -> InitialState | None:
        """What ``node.session`` would find on the disk, swept as by ``node.run_folder``."""
        checkpoint.sweep_halves(CHECKPOINTS, host.disk)
        earlier, problem = None, None
        try:
            earlier = checkpoint.load(CHECKPOINTS, host.disk)
        except CheckpointError as error:
            problem = error
        self.durability.read_back(host, earlier, problem)
        if host.name == self.durability.resumes and earlier is not None:
            self.durability.resumes = None
            others = [checkpoint.load(CHECKPOINTS, shown(computer.disk)) for computer in self.computers.values()]
            found = [earlier, *(one for one in others if one is not None)]
            earlier = checkpoint.best_of(found)
            self.durability.resumed(host.name, found, earlier)
        if earlier is not None:
            return InitialState(earlier.shards, earlier.theta, earlier.momentum)
        kept = state_client.load(FOLDER / state_client.INCOMING, self.manifest, host.disk)
        return None if kept is None else InitialState(kept.shards, kept.theta, kept.momentum)

    def _version_zero(self) -> InitialState:
        states = (
            ShardState(genesis_head(self.manifest.run, s.shard, self.manifest.genesis[s.shard]), 0, ())
            for s in self.layout.shards
        )
        proofs = tuple(StateProof(state, None, b"") for state in states)
        still = StateForm.of(self.setting.outer).still(self.layout.elements)
        return InitialState(proofs, torch.zeros(self.layout.elements), still)

    def kill(self, name: PeerId, *, with_learner: bool = False) -> None:
        """SIGKILL to the node, and to its learner if it goes with it."""
        host = self.hosts.pop(name, None)
        if host is None:
            return
        self.durability.died(host)
        host.die()
        self.network.vanish(host)
        learner = self.learners.newest.get(name)
        if with_learner and learner is not None:
            learner.kill()

    def check_alive(self, host: SimulatedHost) -> None:
        """A dead process starts nothing."""
        if host.is_dead:
            raise asyncio.CancelledError

    def waiting_learner(self, name: PeerId) -> SimulatedLearner | None:
        """One whose node has died, and that looks out for the next."""
        learner = self.learners.newest.get(name)
        if learner is None or learner.is_dead or learner.listener is None or not learner.listener.is_open:
            return None
        return learner if learner.listener.incoming is None else None

    def survives_without(self, names: set[PeerId]) -> bool:
        """Whether somebody else has, or will have, all states."""
        names = names | self.checks.spoilt
        return any(name not in names and host.peer.machine.core.is_current for name, host in self.hosts.items())

    def _observed(self, host: SimulatedHost, event: ev.Event) -> None:
        self.checks.observed(host.peer, event)
        if isinstance(event, ev.Applied):
            chain = host.peer.machine.core.chains[event.shard]
            if chain.head is not None and chain.head.id == event.head:
                parent = chain.log[-1].parent if chain.log else None
                self.durability.applied(host.peer, event.shard, chain.head, parent)
                if self.blackout is not None and chain.log:
                    self.blackout.applied(host.name, chain.log[-1])

    def _status(self, peer: Peer) -> PeerStatus:
        raise NotImplementedError  # nobody asks here


def founded(seed: int, setting: WorldSetting, founder: PeerId) -> Manifest:
    """The run of a seed, and of its first peer. Its parameters of version 0 are zeros."""
    elements = setting.shards_a_fragment * CHUNKS_A_SHARD * CHUNK
    tensors = tuple(
        TensorSpec(name=f"t{i}", shape=(elements,), merge="direct" if i % 2 else "rda", fragment=FragmentId(i))
        for i in range(setting.schedule.fragments)
    )
    config = RunConfig(
        name="simulated",
        seed=seed % 2**62,
        inner=InnerConfig(steps=setting.steps, warmup=0),
        schedule=msgspec.structs.replace(setting.schedule, max_shard=CHUNKS_A_SHARD * CHUNK),
        outer=setting.outer,
        codec=setting.codec,
        evaluation=EvaluationConfig(every=3),
    )
    layout = make_layout(tensors, setting.schedule.fragments, CHUNKS_A_SHARD * CHUNK, setting.outer.merge)
    theta = torch.zeros(layout.elements)
    zero = StateForm.of(setting.outer).still(layout.elements)
    genesis = tuple(state_digest(theta[s.start : s.stop], zero[s.start : s.stop]) for s in layout.shards)
    blocks = BlockSpec(number=setting.blocks, samples=16, data=Digest("d" * 40)) if setting.blocks else BlockSpec()
    return Manifest(founder=founder, config=config, tensors=tensors, genesis=genesis, blocks=blocks)
