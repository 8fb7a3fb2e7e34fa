"""Memory, descriptors, threads and disk of a swarm over a day, in pieces that continue where the last one stopped.

    python -m benchmarks.churn.day out/day --minutes 30   # again and again, until the last line says 24 hours

Two peers train and one follows, with a bootstrap. In this process followers come one after the other, each with its own
identity, libp2p daemon and state folder; each fetches all states and leaves in order, and every fifth one vanishes.
A piece starts all processes anew on the folders of the piece before; its figures are a line of ``pieces.jsonl`` there.

Memory is the rate at which each kind of process grows, in MB an hour: the slope of a line through all samples but those
of the first quarter of a piece, and its mean over all pieces. What grows slowly is thus found only with long pieces.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
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
from p2pdiloco.training import NAME
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util.status_pipe import Invited

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
VANISH_EVERY = 5
SAMPLE_S = 2.0
JOIN_S = 120.0
DAY_H = 24.0
MOST_DESCRIPTORS = 1.05
"""A process may have this many times the descriptors that it had in the middle of its piece."""

CONFIG = {
    "name": "day",
    "model": {"width": 64, "depth": 2, "heads": 2, "context": 64},
    "inner": {"steps": 1_000_000, "batch": 8, "warmup": 5},
    "schedule": {"fragments": 4, "sync_every": 40, "overlap": 4, "max_shard": 16384},
    "evaluation": {"every": 0},
}

Samples = dict[str, list[dict[str, float]]]
"""By process, the oldest first."""


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
                node.peer.abandon("day")
            else:
                node.peer.request_leave("day")
            await running
    return seconds


def processes(members: dict[str, Member]) -> dict[str, psutil.Process]:
    """Return all processes of the swarm by peer and kind."""
    found = {}
    for name, member in members.items():
        node = psutil.Process(member.process.pid)
        found[f"{name} node"] = node
        for child in node.children():
            found[f"{name} {'learner' if child.name() == NAME else 'p2pd'}"] = child
    return found


def take(members: dict[str, Member], samples: Samples) -> None:
    """Append a sample of each process."""
    for name, process in processes(members).items():
        with process.oneshot():
            samples[name].append(
                {
                    "hours": time.monotonic() / 3600.0,
                    "mb": process.memory_info().rss / 1e6,
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                }
            )


def growth(samples: list[dict[str, float]]) -> float:
    """Return how fast a process grows, in MB an hour."""
    late = samples[len(samples) // 4 :]
    return statistics.linear_regression([s["hours"] for s in late], [s["mb"] for s in late]).slope


def disk_mb(folder: Path) -> float:
    """Return the size of all files below ``folder``."""
    return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6, 2)


async def piece(folder: Path, minutes: float) -> dict[str, Any]:
    """Start everything, let followers come and go, and end everything in order."""
    (folder / "run.toml").write_text(toml(CONFIG))
    swarm, samples = Swarm(folder), defaultdict[str, list[dict[str, float]]](list)
    try:
        address = swarm.start_bootstrap()
        members = {"bootstrap": swarm.bootstrap, "A": swarm.launch("A", founding(folder, address))}
        for name, more in (("B", ()), ("C", ("--follow",))):
            await asyncio.to_thread(members["A"].wait_for, Invited, JOIN_S)
            members[name] = swarm.join(name, address, *more)
        deadline, cycles = time.monotonic() + JOIN_S, 0
        while not all(swarm[name].view.live == 3 for name in "ABC"):
            if time.monotonic() > deadline:
                raise SystemExit(f"the three peers did not find each other: see {folder}")
            await asyncio.sleep(0.2)
            for name in "ABC":
                swarm[name].refresh()
        began = sampled = time.monotonic()
        while (now := time.monotonic()) < began + 60.0 * minutes:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                await cycle(address, Path(own), vanishes=cycles % VANISH_EVERY == VANISH_EVERY - 1)
            cycles += 1
            if now >= sampled:
                take(members, samples)
                sampled = now + SAMPLE_S
        ended = [member.name for member in members.values() if not member.is_running]
    finally:
        swarm.stop()
        left = swarm.leftovers()
        swarm.kill_leftovers()
    return {
        "hours": (time.monotonic() - began) / 3600.0,
        "cycles": cycles,
        "mb_an_hour": {name: round(growth(found), 2) for name, found in samples.items()},
        "last": {name: {key: round(found[-1][key], 1) for key in found[-1]} for name, found in samples.items()},
        "descriptors": {
            name: round(found[-1]["descriptors"] / found[len(found) // 2]["descriptors"], 3)
            for name, found in samples.items()
        },
        "disk_mb": disk_mb(folder),
        "ended": ended,
        "leftovers": left,
    }


def founding(folder: Path, address: str) -> list[str]:
    """Return the command of the first peer, in every piece."""
    return ["start", str(folder / "run.toml"), "--access", "open", "--bootstrap", address]


def main() -> None:
    """Measure a piece and print the sum of all; exit status 1 if a process ended, remained, or kept descriptors."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of all pieces; made by the first one")
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M", help="length of this piece")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder.resolve() / "pieces.jsonl"
    found = uvloop.run(piece(path.parent, options.minutes))
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    pieces = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    hours = sum(one["hours"] for one in pieces)
    figures = {
        "pieces": len(pieces),
        "hours": round(hours, 2),
        "cycles": sum(one["cycles"] for one in pieces),
        "mb_an_hour": {
            name: round(sum(one["mb_an_hour"].get(name, 0.0) * one["hours"] for one in pieces) / hours, 2)
            for name in found["mb_an_hour"]
        },
        "descriptors": max(max(one["descriptors"].values()) for one in pieces),
        "disk_mb": [one["disk_mb"] for one in pieces],
        "ended": found["ended"],
        "leftovers": found["leftovers"],
    }
    print(json.dumps(figures, indent=1))
    print(f"{hours:.1f} of {DAY_H:.0f} hours")
    bench.write(options, "day", {}, figures)
    if found["ended"] or found["leftovers"] or figures["descriptors"] > MOST_DESCRIPTORS:
        sys.exit(1)


if __name__ == "__main__":
    main()
