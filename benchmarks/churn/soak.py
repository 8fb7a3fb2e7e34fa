"""Growth of peers' memory, descriptors and threads while others join and leave.

    python -m benchmarks.churn.soak --cycles 1000 --json out/soak.jsonl

Three real peers stay (one trains, two follow). In this process followers come one after the other, each with its own
identity, libp2p daemon and state folder; each fetches all states and leaves in order, and every fifth one vanishes. The
remaining nodes (without learner and daemon) are measured every few cycles, and the directory's entries at the end.

The first tenth of the cycles is warm-up. Growth is the median of the last tenth over that of the second. Threads are
reported but not judged, because pools grow to a bound when they are first busy.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks import bench
from benchmarks.churn.processes import toml
from p2pdiloco.demo.local_swarm import Member, Swarm
from p2pdiloco.node.node import Node
from p2pdiloco.peer.options import LinkOptions, PeerOptions
from p2pdiloco.swarm.run_lookup import (
    DirectoryOptions,
    RunLookup,
    fetch_manifest,
    observer_transport,
    open_directory,
)
from p2pdiloco.transport.identity import Identity

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
SAMPLE_EVERY = 5
VANISH_EVERY = 5
JOIN_S = 60.0
RECORDS_GO_S = 90.0
"""By then a record of a peer that vanished has expired."""
CONFIG = {
    "name": "soak",
    "model": {"width": 64, "depth": 2, "heads": 2, "context": 64},
    "inner": {"steps": 1_000_000, "batch": 8, "warmup": 5},
    "schedule": {"fragments": 4, "sync_every": 40, "overlap": 4, "max_shard": 16384},
    "evaluation": {"every": 0},
}


async def cycle(address: str, folder: Path, *, vanishes: bool) -> float:
    """One follower comes, takes all states, and goes; seconds until it was current."""
    identity = Identity.ephemeral()
    options = PeerOptions(folder=folder, link=LinkOptions(listen=LOOPBACK), is_follower=True, checkpoint_s=3600.0)
    began = time.perf_counter()
    async with open_directory(
        identity, DirectoryOptions(listen=(LOOPBACK,), initial_peers=(address,)), None
    ) as directory:
        run = next(iter(await RunLookup(directory).list_runs()))
        async with observer_transport(Identity.ephemeral()) as transport:
            manifest = await fetch_manifest(transport, await RunLookup(directory).dial_any(transport, run), run)
        async with Node.open(manifest, options, identity, directory, None) as node:
            running = asyncio.create_task(node.run(lambda line: None))
            async with asyncio.timeout(JOIN_S):
                while not node.peer.machine.core.is_current:  # noqa: ASYNC110 - looked at from outside, as a user would
                    await asyncio.sleep(0.02)
            seconds = time.perf_counter() - began
            if vanishes:
                node.peer.abandon("soak")
            else:
                node.peer.request_leave("soak")
            await running
    return seconds


def sample(member: Member) -> dict[str, float]:
    """What one peer's node process holds."""
    process = psutil.Process(member.process.pid)
    return {
        "rss_mb": process.memory_info().rss / 1e6,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
    }


def growth(values: list[float]) -> float:
    """Last tenth over second tenth."""
    tenth = max(1, len(values) // 10)
    return statistics.median(values[-tenth:]) / statistics.median(values[tenth : 2 * tenth] or values[:1])


async def soak(cycles: int, folder: Path) -> dict[str, Any]:
    """Run it."""
    config = folder / "run.toml"
    config.write_text(toml(CONFIG))
    swarm = Swarm(folder)
    joins: list[float] = []
    samples: list[list[dict[str, float]]] = []
    try:
        address = swarm.start_bootstrap()
        stay = [swarm.start_founder("A", config, address)]
        stay += [swarm.join(name, address, "--follow") for name in "BC"]
        deadline = time.monotonic() + JOIN_S
        while not all(member.view.live == len(stay) for member in stay):
            if time.monotonic() > deadline:
                raise SystemExit("the three peers did not find each other: see " + str(folder))
            await asyncio.sleep(0.2)
            for member in stay:
                member.refresh()
        for number in range(cycles):
            with tempfile.TemporaryDirectory(dir=folder) as own:
                joins.append(await cycle(address, Path(own), vanishes=number % VANISH_EVERY == VANISH_EVERY - 1))
            if number % SAMPLE_EVERY == 0:
                samples.append([sample(member) for member in stay])
                print(
                    f"cycle {number:>5} of {cycles}  join {joins[-1]:.2f} s  "
                    + "  ".join(f"{s['rss_mb']:.0f} MB {s['descriptors']:.0f} fds" for s in samples[-1]),
                    flush=True,
                )
        await asyncio.sleep(RECORDS_GO_S)
        for member in stay:
            member.refresh()
        known = [member.view.live for member in stay]
        records = await listed(address)
    finally:
        swarm.stop()
        left = swarm.leftovers()
        swarm.kill_leftovers()
    return {
        "cycles": cycles,
        "join_s_median": round(statistics.median(joins), 3),
        "growth": {
            name: round(max(growth([row[i][name] for row in samples]) for i in range(len(stay))), 4)
            for name in ("rss_mb", "descriptors", "threads")
        },
        "first_mb": [round(s["rss_mb"], 1) for s in samples[0]],
        "last_mb": [round(s["rss_mb"], 1) for s in samples[-1]],
        "live_at_the_end": known,
        "peers_in_the_directory": records,
        "leftovers": left,
    }


async def listed(address: str) -> int:
    """Peers of the run that the directory lists."""
    async with open_directory(
        Identity.ephemeral(), DirectoryOptions(listen=(LOOPBACK,), initial_peers=(address,)), None
    ) as directory:
        run = next(iter(await RunLookup(directory).list_runs()))
        return len(await directory.peers(run))


def main() -> None:
    """Measure, print, write; exit status 1 if those that stay grew, or something is left."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--cycles", type=int, default=1000, help="number of joins")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-soak-") as folder:
        figures = uvloop.run(soak(options.cycles, Path(folder)))
    print(json.dumps(figures, indent=1))
    bench.write(options, "soak", {}, figures)
    is_clean = not figures["leftovers"] and figures["peers_in_the_directory"] == len(figures["live_at_the_end"])
    if max(figures["growth"][name] for name in ("rss_mb", "descriptors")) > 1.05 or not is_clean:
        sys.exit(1)


if __name__ == "__main__":
    main()
