"""p2pdiloco peer without training: node, state machine, driver, global state and transport are the real ones.

Only the learner is a stand-in. It answers at once where a real one answers at its next step boundary, and copies its
snapshots when it is asked for them; memory is neither touched before nor page-locked. An exchange is one turn of all
fragments at once: snapshots are copied, outer gradients encoded, sent to the shards' owners, merged, encoded again,
spread, decoded, applied by the outer step with its momentum, proved by digests, and handed to the learner as shifts.

Peer 0's learner announces the turns, after the others have made one step, so that everybody has tokens to contribute;
all weights are equal (``SYNC_EVERY``). The result is compared with a merge and an outer step of the inputs, on CHECKED
shards.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import uvloop

from benchmarks.plain_gradient import Vector
from benchmarks.wire import line

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from p2pdiloco.node.node import Node
    from p2pdiloco.node.run_creation import version_zero
    from p2pdiloco.node.telemetry import MachineStepped
    from p2pdiloco.peer.options import LinkOptions, PeerOptions
    from p2pdiloco.peer.peer import InitialState
from p2pdiloco.codec import merge, outer_optimizer
from p2pdiloco.codec.digests import StateForm, state_digest
from p2pdiloco.discovery.directory import Directory
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import FragmentId, PeerId
from p2pdiloco.protocol.manifest import (
    CodecConfig,
    EvaluationConfig,
    InnerConfig,
    Manifest,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
    TensorSpec,
    make_layout,
)
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire import learner_ipc

FRAGMENTS = 24
SYNC_EVERY = 144
"""Peer 0 makes so many steps a round and the others one, with 12 times their tokens: equal tokens * tokens / steps."""
TOKENS = 1000
STEP_TIME_S = 30.0
"""As told to the protocol: a slow link must not look like a failed owner."""
BLOCK = 1 << 20
ROLL = 4099
CHECKED = 3
LIMIT_S = 600.0
SAMPLE_S = 0.02


def run_of(config: line.Message, schedule: ScheduleConfig | None = None) -> tuple[Manifest, InitialState]:
    """The same manifest and version 0 at every peer."""
    if schedule is None:
        schedule = ScheduleConfig(fragments=FRAGMENTS, sync_every=SYNC_EVERY, min_quorum=config["peers"])
    parameters, merge, fragments = int(config["parameters"]), config["merge"], schedule.fragments
    tensors = tuple(
        TensorSpec(
            name=f"tensor{i}",
            shape=(parameters * (i + 1) // fragments - parameters * i // fragments,),
            merge=merge,
            fragment=FragmentId(i),
        )
        for i in range(fragments)
    )
    run = RunConfig(
        name="exchange",
        access="open",
        inner=InnerConfig(steps=2**30),
        schedule=schedule,
        outer=OuterConfig(merge=merge, momentum_type="bfloat16"),
        codec=CodecConfig(up=config["codec"], down=config["codec"]),
        evaluation=EvaluationConfig(every=0),
    )
    layout = make_layout(tensors, fragments, run.schedule.max_shard, merge)
    theta, momentum = torch.zeros(layout.elements), StateForm.of(run.outer).still(layout.elements)
    weights = torch.randn(BLOCK, generator=torch.Generator().manual_seed(99)) * 0.02
    for start in range(0, layout.elements, BLOCK):
        theta[start : start + BLOCK] = weights[: layout.elements - start]
    genesis = tuple(state_digest(theta[s.start : s.stop], momentum[s.start : s.stop]) for s in layout.shards)
    manifest = Manifest(founder=PeerId("exchange"), config=run, tensors=tensors, genesis=genesis)
    return manifest, version_zero(manifest, theta, momentum)


def block_of(index: int, number: int) -> torch.Tensor:
    """The outer gradient of peer ``index`` in round ``number``, one block of it. Another one each round: equal payloads
    would be kept once, and the log of commits cost no memory."""
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(index)) * 1e-3
    return block.roll(number * ROLL)


class StandIn:
    """Answers as a learner does, at once."""

    def __init__(self, peer: ExchangePeer) -> None:
        self._peer = peer
        self._copier = ThreadPoolExecutor(1, "learner")
        self.steps = 0
        self.tokens = 0

    def send(self, message: learner_ipc.FromNode) -> None:
        """A command of the node's."""
        match message:
            case learner_ipc.Shift():
                self.say(learner_ipc.Shifted(shards=message.shards))
            case learner_ipc.Snapshot():
                taken = learner_ipc.Snapshotted(
                    fragment=message.fragment, step=message.step, steps=self.steps, tokens=self.tokens
                )
                loop = asyncio.get_running_loop()
                copying = loop.run_in_executor(self._copier, self._peer.copy, message.fragment)
                copying.add_done_callback(lambda done: self._peer.heard_learner(taken) if done.result() else None)
            case _:
                pass

    def train(self, steps: int, tokens: int, step_s: float = STEP_TIME_S) -> None:
        """As if it had trained, for as long as its steps take (of what one alone claims no more counts: P1a)."""
        self._peer.peer.machine.core.pace.add_missed(SYNC_EVERY * step_s, step_s)
        self.steps += steps
        self.tokens += tokens
        progress = learner_ipc.Progress(
            steps=self.steps, tokens=self.tokens, loss=1.0, step_time_s=step_s, overhead_s=0.0, blocked_s=0.0
        )
        self._peer.heard_learner(progress)

    def say(self, message: learner_ipc.FromLearner) -> None:
        """Tell the node."""
        asyncio.get_running_loop().call_soon(self._peer.heard_learner, message)


class ExchangePeer(Node):
    """A node with a stand-in for its learner, on addresses that it is told."""

    stand_in: StandIn
    gradient: torch.Tensor
    came: asyncio.Future[float]
    awaited_version = 0

    def begin(self) -> None:
        """Take version 0, and a learner."""
        self.events.subscribe(MachineStepped, self._on_step)
        super().begin()
        ward = self.peer.supervision.child = self.peer.supervision.new_child("standin")
        self.stand_in = self.make_stand_in()
        ward.process = self.stand_in  # type: ignore[assignment]
        self.heard_learner(learner_ipc.Ready(device="none", parameters=self.peer.state.layout.elements))

    def make_stand_in(self) -> StandIn:
        """Its learner."""
        return StandIn(self)

    def heard_learner(self, message: learner_ipc.FromLearner) -> None:
        """The stand-in says something."""
        self.peer.supervision._on_message(message)

    def _on_step(self, step: MachineStepped) -> None:
        """Note when the last shard of a round is applied."""
        if isinstance(step.event, ev.Applied) and self.awaited_version and self.versions()[0] >= self.awaited_version:
            self.awaited_version = 0
            self.came.set_result(time.monotonic())

    def awaits(self, version: int) -> asyncio.Future[float]:
        """When every shard has reached ``version``."""
        self.awaited_version, self.came = version, asyncio.get_running_loop().create_future()
        return self.came

    def versions(self) -> tuple[int, int]:
        """The lowest and the highest version of all shards."""
        found = [chain.head.version for chain in self.peer.machine.core.chains if chain.head is not None]
        return min(found), max(found)

    def copy(self, fragment: FragmentId) -> bool:
        """Make the snapshot of a fragment: global parameters less ``gradient``, which every BLOCK has."""
        state = self.peer.state
        for shard in self.peer.state.layout.fragments[fragment]:
            theta, snapshot = state.theta, state.shifts.part("snapshot", shard)
            piece = self.peer.state.layout.shards[shard]
            for start in range(piece.start, piece.stop, BLOCK):
                stop = min(start + BLOCK, piece.stop)
                part = snapshot[start - piece.start : stop - piece.start]
                torch.sub(theta[start:stop], self.gradient[: stop - start], out=part)
        return True


class Sampler:
    """Bytes on the interface while payloads wait to be sent."""

    def __init__(self, peer: ExchangePeer, interface: str) -> None:
        self._peer = peer
        self._interface = interface
        self.busy_s = 0.0
        self.busy_bytes = 0

    async def sample(self) -> None:
        """Until cancelled."""
        before: tuple[float, int] | None = None
        while True:
            transport = self._peer.transport
            queued = sum(transport.queued_bytes(peer) for peer in transport.peers())
            now = (time.monotonic(), line.counters(self._interface)["sent"]) if queued else None
            if before is not None and now is not None:
                self.busy_s += now[0] - before[0]
                self.busy_bytes += now[1] - before[1]
            before = now
            await asyncio.sleep(SAMPLE_S)


async def serve(config: line.Message) -> None:
    """Take part until the parent closes the pipe."""
    manifest, initial = run_of(config)
    identity = Identity.ephemeral()
    nowhere = Directory(identity, listen=[], announce=[], initial_peers=[])  # never opened: addresses are told
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-exchange-") as folder:
        options = PeerOptions(folder=Path(folder), link=LinkOptions(listen=f"/ip4/{config['host']}/tcp/0"))
        async with ExchangePeer.open(manifest, options, identity, nowhere, initial) as peer:
            del initial
            peer.begin()
            line.answer(address=peer.transport.listen_addresses()[0])
            rounds = Rounds(peer, config)
            incoming = incoming_lines()
            while (command := await incoming.get()) is not None:
                await rounds.obey(command)


def incoming_lines() -> asyncio.Queue[line.Message | None]:
    """Commands, read by a thread."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[line.Message | None] = asyncio.Queue()

    def read() -> None:
        for command in line.commands():
            loop.call_soon_threadsafe(queue.put_nowait, command)
        loop.call_soon_threadsafe(queue.put_nowait, None)

    threading.Thread(target=read, daemon=True, name="commands").start()
    return queue


class Rounds:
    """What the parent asks for."""

    def __init__(self, peer: ExchangePeer, config: line.Message) -> None:
        self._peer = peer
        self._config = config
        self._index = int(config["index"])
        self._rounds = 0
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._payload = 0
        self._came: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._sampler: Sampler | None = None
        self._profile = config.get("profile")

    async def obey(self, command: line.Message) -> None:
        """Do it and answer."""
        match command["do"]:
            case "connect":
                await self._connect(command["addresses"])
            case "prepare":
                await self._prepare()
            case "go":
                await self._go()
            case "check":
                await self._check()

    async def _connect(self, addresses: list[str]) -> None:
        for address in addresses[: self._index]:
            await self._peer.transport.dial(address, timeout_s=30.0)
        membership, others = self._peer.peer.machine.core.membership, len(addresses) - 1
        await until(lambda: len(membership.live) == len(membership.participating) == others, "the peers see each other")
        # Who gives before it has heard whom the others hear takes them for badly connected: it gives to itself, until
        # the takeover time, which is long where steps are. All ask for the same weight.
        owners, weight = membership.owners, self._peer.peer.machine.core.config.weight
        await until(lambda: [w for _, w in owners.candidates] == [weight] * len(addresses), "all know who may own")
        line.answer(ok=True)

    async def _prepare(self) -> None:
        peer, state = self._peer, self._peer.peer.state
        self._rounds += 1
        peer.gradient = block_of(self._index, self._rounds)
        pieces = [peer.peer.state.layout.shards[s] for s in self._checked()]
        self._before = [
            (state.theta[p.start : p.stop].clone(), state.momentum[p.start : p.stop].clone()) for p in pieces
        ]
        peer.stand_in.train(1, TOKENS if self._index else 12 * TOKENS)
        self._payload = peer.transport.traffic().sent_bulk
        self._came = peer.awaits(self._rounds)
        line.forget_peak()
        line.answer(**line.counters(self._config["interface"]))

    async def _go(self) -> None:
        peer = self._peer
        self._sampler = Sampler(peer, self._config["interface"])
        sampling = asyncio.create_task(self._sampler.sample()) if self._config["is_sampled"] else None
        began = time.monotonic()
        if self._index == 0:
            peer.stand_in.train(SYNC_EVERY - 1, 0)
        ended = await asyncio.wait_for(self._came, LIMIT_S)
        if sampling is not None:
            sampling.cancel()
        line.answer(ok=peer.versions() == (self._rounds, self._rounds), reason="", began=began, ended=ended)

    async def _check(self) -> None:
        peer, peak = self._peer, line.memory("VmHWM")
        counters = line.counters(self._config["interface"])
        payload = peer.transport.traffic().sent_bulk - self._payload
        error = await asyncio.to_thread(self._error)
        assert self._sampler is not None
        heads = f"{peer.peer.machine.core.heads_mark:x}"
        line.answer(
            **counters,
            peak=peak,
            error=error,
            digest=heads,
            payload=payload,
            busy_s=self._sampler.busy_s,
            busy_bytes=self._sampler.busy_bytes,
        )

    def _checked(self) -> list[int]:
        shards = len(self._peer.peer.state.layout.shards)
        return sorted({round(i * (shards - 1) / (CHECKED - 1)) for i in range(CHECKED)})

    def _error(self) -> float:
        """Of the movement of the parameters, relative to that without a codec."""
        peer, config = self._peer, self._peer.peer.manifest.config
        worst = 0.0
        for shard, (theta, momentum) in zip(self._checked(), self._before, strict=True):
            piece = peer.peer.state.layout.shards[shard]
            found = peer.peer.state.theta[piece.start : piece.stop] - theta
            numbers = range(self._config["peers"])
            gradients = [Vector(_repeated(block_of(i, self._rounds), piece.elements)) for i in numbers]
            merged, moved = torch.empty(piece.elements), theta.clone()
            merge.merge(piece.merge, gradients, [1.0] * len(gradients), [1] * len(gradients), 1, merged)
            outer_optimizer.outer_step(
                moved,
                momentum,
                merged,
                learning_rate=config.outer.learning_rate,
                momentum_factor=config.outer.momentum,
            )
            moved -= theta
            worst = max(worst, float((found - moved).norm() / moved.norm()))
        return worst


def _repeated(block: torch.Tensor, elements: int) -> torch.Tensor:
    return block.repeat(-(-elements // block.numel()))[:elements].clone()  # alone, without the rest


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for it; TimeoutError."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_S:g} s: {what}")
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    line.live(lambda config: uvloop.run(serve(config)))
