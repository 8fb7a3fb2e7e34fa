"""What peers say to each other when nothing goes on, directory included::

    python -m benchmarks.wire.idle [--peers 16] [--settle-s 90] [--seconds 60] [--json out/idle.json]

So many followers of a tiny run, each with a directory node of its own, in one process and in a network namespace whose
loopback carries nothing else (needs root): its counter, less what the first seconds cost, by peers and seconds.

Rules of this file:
1. Everybody has met everybody before anything is counted, else it fails.
2. A peer sends and receives that much each, headers of IP and TCP included.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch
import uvloop

from benchmarks import bench
from p2pdiloco.node.foundation import make_manifest, version_zero
from p2pdiloco.node.node import Node
from p2pdiloco.peer.options import LinkOptions, PeerOptions
from p2pdiloco.protocol.manifest import RunConfig, ScheduleConfig
from p2pdiloco.runtime import logs
from p2pdiloco.runtime.directory import Directory
from p2pdiloco.runtime.identity import Identity

LIMIT = 5.0
"""kB/s."""
MEET_S = 240.0
SLICE_S = 10.0


def loopback_bytes() -> int:
    """That this namespace's loopback has carried."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[0])


async def swarm(peers: int, settle_s: float, seconds: float, folder: Path) -> dict[str, object]:
    """Bytes a second and peer."""
    config = RunConfig(name="idle", access="open", schedule=ScheduleConfig(fragments=1))
    weights = torch.zeros(1024)
    identities = [Identity.ephemeral() for _ in range(peers)]
    named = [("w", weights.shape, False)]
    manifest, theta, momentum = make_manifest(config, identities[0].peer_id, named, [("w", weights)])
    async with AsyncExitStack() as stack:
        nodes, boot = list[Node](), list[str]()
        for number, identity in enumerate(identities):
            directory = Directory(identity, listen=["/ip4/127.0.0.1/tcp/0"], announce=[], initial_peers=boot)
            await stack.enter_async_context(directory)
            boot = boot or directory.bootstrap_lines()[:1]
            options = PeerOptions(
                folder=folder / str(number), link=LinkOptions(listen=("/ip4/127.0.0.1/tcp/0",)), is_follower=True
            )
            initial = version_zero(manifest, theta.clone(), momentum.clone()) if not number else None
            node = await stack.enter_async_context(Node(manifest, options, identity, directory, initial))
            running = asyncio.create_task(node.run(lambda _: None))
            stack.callback(running.cancel)
            nodes.append(node)
        began = time.monotonic()
        while any(len(node.peer.machine.view.live) < peers - 1 for node in nodes):
            if time.monotonic() - began > MEET_S:
                raise TimeoutError("not all have met")
            await asyncio.sleep(0.2)
        met_s = time.monotonic() - began
        await asyncio.sleep(settle_s)
        slices = []
        for _ in range(max(1, round(seconds / SLICE_S))):
            before, at = loopback_bytes(), time.monotonic()
            await asyncio.sleep(SLICE_S)
            slices.append((loopback_bytes() - before) / (time.monotonic() - at) / peers)
            print(f"{slices[-1]:.0f} bytes/s each", flush=True)
    return {"bytes_per_s": sum(slices) / len(slices), "most": max(slices), "met_s": met_s}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, record."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--settle-s", type=float, default=90.0, help="after all have met, before it is counted")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--inside", action="store_true", help="the namespace is made already")
    options = parser.parse_args(argv)
    if not options.inside:
        command = [sys.executable, "-m", "benchmarks.wire.idle", "--inside", *(argv or sys.argv[1:])]
        return subprocess.call(["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command])
    logs.configure()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-idle-") as folder:
        found = uvloop.run(swarm(options.peers, options.settle_s, options.seconds, Path(folder)))
    bench.write(options, "wire/idle", {}, found)
    each = float(str(found["bytes_per_s"])) / 1e3
    print(f"{options.peers} peers: {each:.2f} kB/s each, {found['most']:.0f} bytes/s at most in ten seconds")
    print(
        f"all had met after {found['met_s']:.1f} s; {LIMIT:g} kB/s are allowed, {'held' if each <= LIMIT else 'MISSED'}"
    )
    return int(each > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
