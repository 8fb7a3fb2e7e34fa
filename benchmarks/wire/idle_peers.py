"""Some of the peers of ``benchmarks.wire.idle``, in one process: followers of a tiny run with a directory node each.

They print the address of the first one's directory and, on request, how many others each one hears.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import torch
import uvloop

from benchmarks.wire import line
from benchmarks.wire.exchange_peer import incoming_lines
from p2pdiloco.discovery.directory import Directory, DirectoryError
from p2pdiloco.node.node import Node
from p2pdiloco.node.run_creation import make_manifest, version_zero
from p2pdiloco.peer.options import LinkOptions, PeerOptions
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import RunConfig, ScheduleConfig
from p2pdiloco.transport.identity import Identity

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
TRIES = 5


@asynccontextmanager
async def _directory(identity: Identity, boot: list[str]) -> AsyncIterator[Directory]:
    """It is tried again: on a busy machine the others are slow to answer."""
    for left in reversed(range(TRIES)):
        directory = Directory(identity, listen=[LOOPBACK], announce=[], initial_peers=boot)
        try:
            await directory.__aenter__()
        except DirectoryError:
            if not left:
                raise
            continue
        try:
            yield directory
        finally:
            await directory.__aexit__(None, None, None)
        return


async def serve(config: line.Message) -> None:
    """``peers`` more; those of the first process (no ``boot``) have the state."""
    run = RunConfig(name="idle", access="open", schedule=ScheduleConfig(fragments=1))
    weights = torch.zeros(1024)
    named = [("w", weights.shape, False)]
    manifest, theta, momentum = make_manifest(run, PeerId("idle"), named, [("w", weights)])
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2pdiloco-idle-")))
        nodes, boot = list[Node](), list(config["boot"])
        for number in range(config["peers"]):
            identity, has_state = Identity.ephemeral(), not boot
            directory = await stack.enter_async_context(_directory(identity, boot))
            boot = boot or directory.bootstrap_addresses()[:1]
            options = PeerOptions(folder=folder / str(number), link=LinkOptions(listen=(LOOPBACK,)), is_follower=True)
            initial = version_zero(manifest, theta, momentum) if has_state else None
            node = await stack.enter_async_context(Node.open(manifest, options, identity, directory, initial))
            running = asyncio.create_task(node.run(lambda _: None))
            stack.callback(running.cancel)
            nodes.append(node)
        line.answer(boot=boot)
        incoming = incoming_lines()
        while await incoming.get() is not None:
            line.answer(heard=min(len(node.peer.machine.view.live) for node in nodes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    line.live(lambda config: uvloop.run(serve(config)))
