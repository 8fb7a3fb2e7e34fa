"""Peer of the calibration run: node, state machine, state, signatures, transport and sockets are the real ones.

Only the learner is a stand-in: it steps by the clock and computes nothing, so that a small machine holds many of them.
Its outer gradients are noise, new in each round. Like a real learner it takes commands at step boundaries, in order,
and at once before its first step. ``connect`` makes it dial the peers before it, ``go`` starts its steps, ``told``
returns what it has observed; it answers everything else with the interface's byte counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import torch
import uvloop

from benchmarks.netbed import namespace_exec
from benchmarks.scale.sightings import Sightings
from benchmarks.wire import line
from benchmarks.wire.exchange_peer import ExchangePeer, StandIn, block_of, run_of, until
from p2pdiloco.discovery.directory import Directory
from p2pdiloco.node.node import Node
from p2pdiloco.node.telemetry import MachineStepped
from p2pdiloco.peer.options import LinkOptions, PeerOptions
from p2pdiloco.protocol.manifest import ScheduleConfig
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.sockets import DialError
from p2pdiloco.util import logs
from p2pdiloco.wire import learner_ipc

APART_S = 1.0
"""Between the first dials of two peers."""
TOKENS = 1000
"""A step."""
SCHEDULE = ("fragments", "max_shard", "sync_every", "overlap", "together")
"""Fields of the run's schedule that are told."""


def schedule_of(config: line.Message) -> ScheduleConfig:
    """Of the run, as the parent wants it."""
    return ScheduleConfig(**{name: config[name] for name in SCHEDULE})


class SteppingStandIn(StandIn):
    """Steps by the clock."""

    def __init__(self, peer: CalibrationPeer, config: line.Message) -> None:
        super().__init__(peer)
        self._step_s, self._jitter = float(config["step_s"]), float(config["jitter"])
        self._index, self._rounds = int(config["index"]), 0
        self._random = Random(self._index)
        self._commands: list[learner_ipc.FromNode] = []
        self._is_stepping = False

    def send(self, message: learner_ipc.FromNode) -> None:
        """A command of the node's."""
        if self._is_stepping:
            self._commands.append(message)
        else:
            super().send(message)

    async def step(self) -> None:
        """For ever."""
        self._is_stepping = True
        await asyncio.sleep(self._step_s * self._random.random())
        while True:
            step_s = self._step_s * (1.0 + self._jitter * (2.0 * self._random.random() - 1.0))
            await asyncio.sleep(step_s)
            self.train(1, TOKENS, step_s)
            commands, self._commands = self._commands, []
            for command in commands:
                if isinstance(command, learner_ipc.Snapshot):
                    self._rounds += 1
                    self._peer.gradient = block_of(self._index, self._rounds)
                super().send(command)


class CalibrationPeer(ExchangePeer):
    """Notes what its machine sees."""

    config: line.Message
    seen: Sightings

    def begin(self) -> None:
        """As a follower, without a learner."""
        if not self.options.is_follower:
            return super().begin()
        self.events.subscribe(MachineStepped, self._on_step)
        return Node.begin(self)

    def make_stand_in(self) -> SteppingStandIn:
        return SteppingStandIn(self, self.config)

    def _on_step(self, step: MachineStepped) -> None:
        super()._on_step(step)
        self.seen.note(self.transport.peer_id, time.monotonic(), step.event, step.effects, self.fragment_of)

    @property
    def fragment_of(self) -> list[int]:
        """By shard."""
        return [shard.fragment for shard in self.peer.state.layout.shards]


def live(namespace: str, config: line.Message, parent: Connection) -> None:
    """A process's whole life, in a site."""
    namespace_exec.enter(namespace)
    namespace_exec.own_sys()
    logs.configure("warning")
    torch.set_num_threads(1)
    try:
        uvloop.run(serve(config, parent))
    except Exception as error:  # noqa: BLE001
        parent.send({"error": repr(error)})
    os._exit(0)


async def serve(config: line.Message, parent: Connection) -> None:
    """Take part until the parent is gone."""
    manifest, initial = run_of(config, schedule_of(config))
    identity = Identity.ephemeral()
    nowhere = Directory(identity, listen=[], announce=[], initial_peers=[])  # never opened: addresses are told
    budgets = {"up_bytes_per_s": config["up_budget"] or "auto", "down_bytes_per_s": config["down_budget"]}
    line_options = LinkOptions(listen=(f"/ip4/{config['host']}/tcp/0",), **budgets)
    follows = config["index"] >= config["peers"] - config["followers"]
    options = PeerOptions(folder=Path(config["folder"]), link=line_options, is_follower=follows)
    async with CalibrationPeer.open(manifest, options, identity, nowhere, initial) as peer:
        del initial
        peer.config, peer.seen = config, Sightings()
        peer.begin()
        parent.send({"address": peer.transport.listen_addresses()[0]})
        while (command := await asyncio.to_thread(parent.recv)) is not None:
            parent.send(await _obeyed(peer, config, command))


async def _obeyed(peer: CalibrationPeer, config: line.Message, command: line.Message) -> line.Message:
    match command["do"]:
        case "connect":
            addresses = command["addresses"]
            membership, follows = peer.peer.machine.core.membership, peer.options.is_follower
            others, learners = len(addresses) - 1, len(addresses) - config["followers"] - (not follows)
            redial = asyncio.create_task(_redial(peer, addresses[: config["index"]]))
            try:
                await until(
                    lambda: len(membership.live) == others and len(membership.participating) == learners,
                    "the peers see each other",
                )
            finally:
                redial.cancel()
        case "go" if not peer.options.is_follower:
            assert isinstance(peer.stand_in, SteppingStandIn)
            peer.host.spawn(peer.stand_in.step(), name="steps")
        case "told":
            return {"seen": peer.seen}
    return {"at": time.monotonic(), "cpu_s": time.process_time(), **line.counters("eth0"), **segments()}


async def _redial(peer: CalibrationPeer, addresses: Sequence[str]) -> None:
    """Connect to the peers, one after the other, and again to those whose connections end, as nodes do.

    Peers begin one after the other: not even a crowd of volunteers dials in the same hundredth of a second.
    """
    await asyncio.sleep(APART_S * len(addresses))
    while True:
        for address in addresses:
            with contextlib.suppress(DialError):
                await peer.transport.dial(address, timeout_s=60.0)
        await asyncio.sleep(1.0)


def segments() -> dict[str, int]:
    """Of TCP in this namespace: sent, and of them sent again."""
    names, values = (
        text.split() for text in Path("/proc/self/net/snmp").read_text().splitlines() if text.startswith("Tcp:")
    )
    told = dict(zip(names[1:], map(int, values[1:]), strict=True))
    return {"segments": told["OutSegs"], "sent_again": told["RetransSegs"]}
