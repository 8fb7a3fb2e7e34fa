"""One peer of ``benchmarks.churn.join``: a donor that holds a run, or a newcomer that downloads it.

Node, state machine, driver, global state and transport are the real ones. There is no learner; a separate process (role
``load``) stands in for one. A join lasts from the first fetch that the state machine requests until every shard is
installed. The newcomer reports when half of the bytes have arrived, and at the end the digest of all heads.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import uvloop

from benchmarks.wire import line

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from benchmarks.wire.exchange_peer import incoming_lines, run_of
    from p2pdiloco.node.node import Node
    from p2pdiloco.node.telemetry import MachineStepped
    from p2pdiloco.peer.options import LinkOptions, PeerOptions
from p2pdiloco.discovery.directory import Directory
from p2pdiloco.protocol import effects as ef
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util import logs

LIMIT_S = 300.0
POLL_S = 0.02
LOAD_WIDTH, LOAD_ROWS = 256, 64


class JoinPeer(Node):
    """A node on addresses that it is told."""

    began: float | None = None
    current: asyncio.Future[float]

    def begin(self) -> None:
        """Take what it was given: version 0, or nothing."""
        self.current = asyncio.get_running_loop().create_future()
        self.events.subscribe(MachineStepped, self._on_step)
        super().begin()

    def _on_step(self, step: MachineStepped) -> None:
        """Note the first fetch and the end."""
        if self.began is None and any(isinstance(effect, ef.Fetch) for effect in step.effects):
            self.began = time.monotonic()
        if any(isinstance(effect, ef.BecameCurrent) for effect in step.effects) and not self.current.done():
            self.current.set_result(time.monotonic())

    async def half(self, size: int) -> None:
        """Until half of ``size`` bytes have come."""
        await _until(lambda: self.transport.traffic().received_bulk >= size / 2 or self.current.done())


async def serve(config: line.Message) -> None:
    """Take part until the parent closes the pipe."""
    manifest, initial = run_of(config)
    identity = Identity.ephemeral()
    nowhere = Directory(identity, listen=[], announce=[], initial_peers=[])  # never opened: addresses are told
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-join-") as folder:
        options = PeerOptions(
            folder=Path(folder), link=LinkOptions(listen=f"/ip4/{config['host']}/tcp/0"), is_follower=True
        )
        is_donor = config["role"] == "donor"
        async with JoinPeer.open(manifest, options, identity, nowhere, initial if is_donor else None) as peer:
            del initial
            if is_donor:
                peer.begin()
            line.answer(address=peer.transport.listen_addresses()[0])
            incoming = incoming_lines()
            while (command := await incoming.get()) is not None:
                await _obey(peer, command)


async def _obey(peer: JoinPeer, command: line.Message) -> None:
    match command["do"]:
        case "cpu":
            line.answer(cpu_s=time.process_time(), sent=peer.transport.traffic().sent_bulk)
        case "meet":
            for address in command["addresses"]:
                await peer.transport.dial(address, timeout_s=30.0)
            others = len(command["addresses"])
            await _until(lambda: len(peer.peer.machine.core.membership.live) == others)
            line.answer(ok=True)
        case "join":
            before, size = time.process_time(), 8 * peer.peer.state.layout.elements
            peer.begin()
            for address in command["addresses"]:
                await peer.transport.dial(address, timeout_s=30.0)
            halfway = asyncio.create_task(peer.half(size))
            halfway.add_done_callback(lambda _: line.answer(is_half=True))
            ended = await asyncio.wait_for(peer.current, LIMIT_S)
            await halfway
            assert peer.began is not None
            line.answer(
                is_half=False,
                wall_s=ended - peer.began,
                cpu_s=time.process_time() - before,
                heads=f"{peer.peer.machine.core.heads_mark:x}",
                received=peer.transport.traffic().received_bulk,
                peak=line.memory("VmHWM"),
                faults=dict(peer.peer.metrics.faults),
            )
        case "heads":
            line.answer(heads=f"{peer.peer.machine.core.heads_mark:x}")


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the peers do not see each other")
        await asyncio.sleep(POLL_S)


def load(config: line.Message) -> None:
    """Train something small on one thread; tell steps, wall and CPU seconds whenever asked."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(LOAD_WIDTH, LOAD_WIDTH) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randn(LOAD_ROWS, LOAD_WIDTH)
    steps, asked = 0, threading.Event()

    def listen() -> None:
        for _ in line.commands():
            asked.set()
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    line.answer(ok=True)
    while True:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        steps += 1
        if asked.is_set():
            asked.clear()
            line.answer(steps=steps, wall_s=time.monotonic(), cpu_s=time.process_time())


def begin(config: line.Message) -> None:
    """In its role."""
    logs.configure("info")
    if config["role"] == "load":
        load(config)
    else:
        uvloop.run(serve(config))


if __name__ == "__main__":
    line.live(begin)
