"""Memory and CPU of a peer as the swarm grows: real nodes of a small model on this machine, over loopback.

    python -m benchmarks.scale.growth [--peers 2 4 8 16 32] [--rounds 20] [--json FILE] [--plot FILE]

The peers are those of ``benchmarks.wire.exchange``: nodes whose learners only stand in. A round is one version of every
shard. CPU is that of all rounds but the first eight, in which peers check most merges, divided by peers and shards; it
includes what a peer does without exchanges, such as heartbeats, for as long as its round takes. Memory is what the node
has for itself after the last round but one. The last round's result is checked. A size that is in the file of
``--json`` is not measured again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import bench, plots
from benchmarks.wire.exchange_peer import FRAGMENTS
from benchmarks.wire.exchange_swarm import BenchmarkError, Case, Swarm

WARM_UP = 8
IDLE_S = 10.0
INT4_BYTES = 0.43
"""Per parameter."""
COLUMNS: tuple[bench.Column, ...] = (
    ("MB, connected", "connected_mb", ".0f"),
    ("MB after the rounds", "private_mb", ".0f"),
    ("CPU ms per shard version", "cpu_ms", ".1f"),
    ("idle, % of a core", "idle_percent", ".2f"),
    ("s per round", "round_s", ".2f"),
)


def measure(peers: int, parameters: int, rounds: int) -> dict[str, float]:
    """Return the figures of one swarm: means of its peers.

    Raises:
        BenchmarkError: a peer failed, or a result is wrong.
    """
    with Swarm(Case("p2pdiloco", "int4", "lo", peers, parameters, "direct"), INT4_BYTES, is_verbose=False) as swarm:
        connected = statistics.fmean(swarm.private_bytes())
        spent, walls = [], []
        for _ in range(rounds - 1):
            cpu_s, wall_s = swarm.exchange_unchecked()
            spent.append(cpu_s)
            walls.append(wall_s)
        private = statistics.fmean(swarm.private_bytes())
        swarm.exchange()
        before = swarm.cpu_s()
        time.sleep(IDLE_S)
        idle = swarm.cpu_s() - before
    return {
        "connected_mb": connected / 1e6,
        "private_mb": private / 1e6,
        "cpu_ms": 1e3 * statistics.fmean(spent[WARM_UP:]) / peers / FRAGMENTS,
        "idle_percent": 100.0 * idle / IDLE_S / peers,
        "round_s": statistics.median(walls[WARM_UP:]),
    }


def draw(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Draw memory and CPU against the number of peers."""
    sizes = [int(name) for name in rows]
    with plots.figure(path, 2, size=(8.0, 3.2)) as (memory, cpu):
        for axes, key, unit in ((memory, "private_mb", "MB per node"), (cpu, "cpu_ms", "CPU ms per shard version")):
            figures = [row[key] for row in rows.values()]
            axes.plot(sizes, figures, "o-", color=plots.OURS)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, map(str, sizes))
            axes.set_ylim(0, 1.15 * max(figures))
            axes.set_xlabel("peers")
            axes.set_ylabel(unit)


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench.parser(__doc__, rows="number of peers")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="sizes of the swarm")
    parser.add_argument("--parameters", type=int, default=2_400_000, help="parameters of the model")
    parser.add_argument("--rounds", type=int, default=20, help="versions of every shard")
    found = parser.parse_args(argv)
    if found.rounds < WARM_UP + 2:
        parser.error(f"--rounds {found.rounds}: the first {WARM_UP} and the last are not counted; use {WARM_UP + 2} up")
    return found


def main() -> int:
    """Measure each size, and draw."""
    given = options()
    rows = bench.known(given.json, "scale/growth", "size")
    for peers in given.peers:
        if str(peers) in rows:
            continue
        print(f"{peers} peers ...", flush=True)
        try:
            rows[str(peers)] = measure(peers, given.parameters, given.rounds)
        except BenchmarkError as error:
            print(f"{peers} peers: {error}", file=sys.stderr)
            return 1
        bench.write(given, "scale/growth", {"size": str(peers)}, rows[str(peers)])
    print(bench.table("peers", COLUMNS, rows))
    if given.plot:
        draw(given.plot, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
