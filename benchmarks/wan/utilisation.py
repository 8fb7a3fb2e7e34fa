"""Compute utilization of p2pdiloco's learners by rate, round trip, loss, H and codec: formula and measurement.

    python -m benchmarks.wan.utilisation --json out/wan/utilisation.jsonl --plot out/wan/utilisation.png
    python -m benchmarks.wan.utilisation --shipped        # on every shipped topology

1. ``formula`` gives the table for all cells; those of ``MEASURED`` are measured too, each on links that were measured
   first. All cells have four sites, equal lines and paths, and the model of ``task``.
2. Learners never wait for the link, so a bad one costs turns. Predicted are the share of turns that a line can carry,
   and whether a fragment arrives within its overlap; measured are compute utilization and the share of turns with a
   commit.
3. Shipped topologies are used unchanged, schedules included, with one worker per site.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import bench
from benchmarks.netbed import trace
from benchmarks.netbed.namespaces import TestbedError
from benchmarks.netbed.testbed import Testbed
from benchmarks.netbed.topology import SHIPPED, Topology, find_topology, parse_topology
from benchmarks.wan import formula, plots, sites, task
from benchmarks.wan.commits import commits_between

PEERS = 4
FRAGMENTS = 24
BYTES = {"int2": 0.21, "int4": 0.43, "int8": 0.96, "bf16": 1.35}
"""A parameter on the wire (docs of ``CodecConfig.coarsest``)."""
CONTROL_BPS = 40e3
"""What a peer of four sends besides, when nothing is trained: heartbeats, turns, directory."""


class Cell(NamedTuple):
    """One combination."""

    mbps: float
    round_trip_ms: float
    loss: float
    sync_every: int
    codec: str

    @property
    def name(self) -> str:
        """For people."""
        return (
            f"{self.mbps:g} Mbit/s, {self.round_trip_ms:g} ms, loss {self.loss:.1%}, H {self.sync_every}, {self.codec}"
        )

    def run(self, step_s: float) -> formula.Run:
        """As the formula sees it."""
        return formula.Run(
            parameters=task.PARAMETERS,
            peers=PEERS,
            step_s=step_s,
            sync_every=self.sync_every,
            fragments=FRAGMENTS,
            overlap=overlap(self.sync_every),
            bytes_per_parameter=BYTES[self.codec],
            control_bps=CONTROL_BPS,
        )

    def link(self) -> formula.Link:
        """The same."""
        return formula.Link(self.mbps * 1e6, self.round_trip_ms / 1e3, self.loss)


RATES = (1.0, 2.0, 5.0, 10.0, 50.0)
TRIPS = (10.0, 60.0, 200.0)
LOSSES = (0.0, 0.01)
EVERY = (24, 48, 96)
CODECS = ("int4", "bf16")
MEASURED = (
    Cell(50.0, 60.0, 0.0, 24, "int4"),
    Cell(5.0, 60.0, 0.0, 24, "int4"),
    Cell(2.0, 60.0, 0.0, 24, "int4"),
    Cell(1.0, 60.0, 0.0, 24, "int4"),
    Cell(1.0, 60.0, 0.0, 48, "int4"),
    Cell(5.0, 200.0, 0.0, 24, "int4"),
    Cell(10.0, 60.0, 0.01, 24, "int4"),
    Cell(10.0, 60.0, 0.0, 24, "bf16"),
)


def overlap(sync_every: int) -> int:
    """tau: two steps for every 24 of H."""
    return 2 * sync_every // 24


def cells() -> Iterator[Cell]:
    """All of the table."""
    for values in product(RATES, TRIPS, LOSSES, EVERY, CODECS):
        yield Cell(*values)


def predicted(cell: Cell, step_s: float) -> dict[str, Any]:
    """By the formula."""
    run, link = cell.run(step_s), cell.link()
    return {
        "predicted_rounds": formula.sustained_share(run, link),
        "fragment_s": formula.fragment_s(run, link),
        "on_time": "yes" if formula.is_on_time(run, link) else "no",
    }


def measure(made: Testbed, config: dict[str, Any], seconds: float, folder: Path) -> dict[str, Any]:
    """Compute utilisation and turns of a swarm on this testbed, after a first H steps."""
    every, step_s = int(config["sync_every"]), float(config["step_s"])
    count = len(made.topology.sites)
    with sites.Series(made, [{**config, "folder": str(folder)}] * count, folder / "logs") as series:
        series.go(10**6, 1e6)
        stop = threading.Event()
        player = threading.Thread(target=trace.play, args=(made, stop, lambda *_: None), daemon=True)
        time.sleep(max(0.0, -series.elapsed()))
        player.start()
        time.sleep(min(every, 24) * step_s)
        begin, begin_unix = series.elapsed(), time.time()
        time.sleep(seconds)
        end, end_unix = series.elapsed(), time.time()
        stop.set()
        player.join()
        words = [[w for w in worker.of("step") if begin <= w["at"] <= end] for worker in series.workers]
    if min(len(w) for w in words) < 2:
        raise sites.BenchmarkError(f"some worker made no steps within {seconds:g} s; {folder}/logs says why")
    commits = commits_between(folder / "1", begin_unix, end_unix)
    span = sum(w[-1]["at"] - w[0]["at"] for w in words)
    steps = sum(len(w) - 1 for w in words)
    late = sum(w[-1]["late"] - w[0]["late"] for w in words)
    return {
        "utilisation": steps * step_s / span,
        "turns": min(1.0, commits.versions / (steps / count / every * commits.shards)),
        "learners": commits.learners,
        "blocked_s": max(sum(one["blocked"] for one in w) for w in words),
        "blocked_share": sum(one["blocked"] for w in words for one in w) / span,
        "late_share": late / steps,
        "sent_kb_a_step": sum(w[-1]["sent"] - w[0]["sent"] for w in words) / steps / 1e3,
    }


def config_of(step_s: float, sync_every: int, codec: str) -> dict[str, Any]:
    """Of all workers."""
    return {
        "system": "p2pdiloco",
        "step_s": step_s,
        "snapshot_every": 0,
        "sync_every": sync_every,
        "fragments": FRAGMENTS,
        "overlap": overlap(sync_every),
        "codec": codec,
    }


def measure_cells(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sample."""
    for number, cell in enumerate(MEASURED[: options.cells]):
        pairs = {(a, b): cell.round_trip_ms for a in range(PEERS) for b in range(a + 1, PEERS)}
        rate = sites.rate_text(cell.mbps * 1e6)
        toml = sites.topology_toml("wan-cell", [(rate, rate)] * PEERS, pairs, loss=cell.loss)
        with sites.network(toml) as made:
            config = config_of(options.step_s, cell.sync_every, cell.codec)
            seconds = max(options.seconds, cell.sync_every * options.step_s)
            found = measure(made, config, seconds, folder / f"cell-{number}")
        yield cell.name, {**predicted(cell, options.step_s), **found, "cell": cell._asdict()}


def measure_shipped(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every shipped topology that was not left out."""
    for name in options.topologies:
        path = find_topology(name)
        step_s = options.step_s * max(1.0, len(parse_topology(path.read_text()).sites) / PEERS)
        with sites.network(path.read_text()) as made:
            seconds = max(options.seconds, 24 * step_s)  # fragments differ in size: all of them
            found = measure(made, config_of(step_s, 24, "int4"), seconds, folder / name)
        yield name, {**possible(parse_topology(path.read_text()), step_s), **found, "step_s": step_s}


def possible(topology: Topology, step_s: float) -> dict[str, Any]:
    """What the formula says of the slowest line and the longest path."""
    rate = min(min(site.up_bps, site.down_bps) for site in topology.sites)
    trip = max(route.round_trip_s for route in topology.paths.values())
    loss = max(route.loss for route in topology.paths.values())
    run = Cell(rate / 1e6, trip * 1e3, loss, 24, "int4").run(step_s)._replace(peers=len(topology.sites))
    link = formula.Link(rate, trip, loss)
    return {
        "predicted_rounds": formula.sustained_share(run, link),
        "fragment_s": formula.fragment_s(run, link),
        "on_time": "yes" if formula.is_on_time(run, link) else "no",
    }


COLUMNS = (
    ("turns, predicted", "predicted_rounds", ".0%"),
    ("turns, measured", "turns", ".0%"),
    ("learners a version", "learners", ".1f"),
    ("on time, predicted", "on_time", "s"),
    ("compute utilisation", "utilisation", ".1%"),
    ("blocked", "blocked_share", ".2%"),
    ("late steps", "late_share", ".1%"),
    ("kB a step", "sent_kb_a_step", ".1f"),
)


def main() -> int:
    """The command line."""
    options = _options()
    sites.on_sigterm()
    table = {cell.name: {**predicted(cell, options.step_s), "cell": cell._asdict()} for cell in cells()}
    if options.formula:
        print(bench.table("cell", COLUMNS[:1] + COLUMNS[3:4], table))
        return 0
    kind = "wan/utilisation shipped" if options.shipped else "wan/utilisation"
    results: dict[str, dict[str, Any]] = {}
    is_whole = True
    try:
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-wan-") as temporary:
            folder = Path(options.keep or temporary)
            for name, one in (measure_shipped if options.shipped else measure_cells)(options, folder):
                results[name] = one
                print(f"{name}: {one}", file=sys.stderr, flush=True)
                bench.write(options, kind, {"name": name}, one)
    except (sites.BenchmarkError, TestbedError) as error:
        print(error, file=sys.stderr)
        is_whole = False
        if not results:
            return 1
    print(f"\np2pdiloco, {task.PARAMETERS / 1e6:.1f}M parameters, {options.step_s:g} s a step\n")
    print(bench.table("topology" if options.shipped else "cell", COLUMNS, results))
    if options.plot:
        plots.utilisation(options.plot, results)
    return 0 if is_whole else 1


def _options() -> argparse.Namespace:
    parser = bench.parser(__doc__, rows="cell", has_keep=True)
    parser.add_argument("--shipped", action="store_true", help="measure the shipped topologies instead of the cells")
    parser.add_argument("--formula", action="store_true", help="print the predictions for all cells; measure nothing")
    parser.add_argument(
        "--topologies",
        nargs="*",
        default=sorted(p.stem for p in SHIPPED.glob("*.toml")),
        help="with --shipped: topologies to measure",
    )
    parser.add_argument("--cells", type=int, default=len(MEASURED), help="number of cells to measure")
    parser.add_argument("--step-s", type=float, default=0.5, help="step time of the emulated accelerator")
    parser.add_argument("--seconds", type=float, default=24.0, help="duration of a cell")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
