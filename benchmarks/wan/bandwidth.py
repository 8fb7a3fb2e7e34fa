"""Slowest line on which each system computes 95 % of the time, by bisecting the rate of all lines.

    python -m benchmarks.wan.bandwidth --json out/wan/bandwidth.jsonl --plot out/wan/bandwidth.png

1. Four sites have equal lines and paths; training goes on while the rates change. The rate that is found is measured on
   the links themselves afterwards, and refused if it is off.
2. Data parallel: step time over the mean of the steps at a rate. DiLoCo: the time for which one exchange stops all
   workers is measured every few steps and set against ``--sync-every`` steps of computing.
3. p2pdiloco's learners do not wait; a slow line costs turns instead. A rate is enough if learners compute 95 % of the
   time *and* 95 % of the turns' commits were made while they trained.
4. Bytes are those of the interface, with all control traffic, at the rate that is found.
5. Paths are short (``--round-trip-ms 2``): data parallel's last bucket passes 2 (M - 1) hops after the backward pass,
   and with 20 ms it computes less than 95 % of a 0.6 s step on any line. p2pdiloco has ``tau`` steps for that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import bench
from benchmarks.netbed import verification
from benchmarks.netbed.namespaces import TestbedError
from benchmarks.netbed.testbed import Testbed
from benchmarks.netbed.topology import SLOWEST_BPS, Change
from benchmarks.wan import formula, plots, sites, task
from benchmarks.wan.commits import Commits, commits_between

WANTED = 0.95
PEERS = 4
CLOSE = 1.08
"""Bisecting ends when the two rates are this near to each other."""
SPREAD = 3.0
"""It begins this much below and above the formula's."""
DILOCO_EVERY = 3
"""Steps between the exchanges that are timed."""
INT4_BYTES = 0.43
"""A parameter on the wire, both ways alike (measured by benchmarks.wire.codec)."""


class Case:
    """One system with its settings, and how it is judged at a rate."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.system, _, schedule = name.partition(" ")
        self._options = options
        self.settings: dict[str, object]
        step_s = options.step_s
        plain = formula.Run(task.PARAMETERS, PEERS, step_s)
        if self.system in task.DATA_PARALLEL:
            kind = "bf16" if self.system == "ddp-bf16" else "float32"
            self.run = plain._replace(bytes_per_parameter=2.0 if kind == "bf16" else 4.0)
            self.settings = {"bucket_mb": 1, "gradients": kind}
        elif self.system == "diloco":
            self.run = plain._replace(sync_every=options.sync_every)
            self.settings = {"sync_every": DILOCO_EVERY, "outer_lr": 0.7, "outer_momentum": 0.9}
        else:
            every, fragments, overlap = (int(part) for part in schedule.split("/"))
            self.run = plain._replace(
                sync_every=every, fragments=fragments, overlap=overlap, bytes_per_parameter=INT4_BYTES
            )
            self.settings = {"sync_every": every, "fragments": fragments, "overlap": overlap, "codec": "int4"}

    def predicted_bps(self) -> float:
        """The formula's rate."""
        trip = self._options.round_trip_ms / 1e3
        return formula.least_rate(self.run, WANTED, system=self.system.removesuffix("-bf16"), round_trip_s=trip)

    def window_s(self) -> float:
        """How long a rate is looked at; whole rounds, because fragments differ in size."""
        least: float = self._options.window_s
        rounds = 2.0 * self.run.sync_every * self.run.step_s if self.system == "p2pdiloco" else 0.0
        return max(least, rounds)

    def settle_s(self) -> float:
        """What is left of the rate before is let go."""
        return max(3.0, 0.5 * self.window_s())

    def shares(self, words: Sequence[Sequence[sites.Words]], commits: int, shards: int) -> tuple[float, float]:
        """Compute utilisation, and the share of turns that were committed, of a window's words of all workers."""
        made = [w for w in words if len(w) > 1]
        if not made:
            return 0.0, 0.0
        if self.system == "diloco":
            stops = [one["blocked"] for w in made for one in w if one["number"] % DILOCO_EVERY == 0]
            if not stops:
                return 0.0, 0.0
            computing = self.run.sync_every * self.run.step_s
            return computing / (computing + statistics.mean(stops)), 1.0
        steps = sum(len(w) - 1 for w in made)
        share = steps * self.run.step_s / sum(w[-1]["at"] - w[0]["at"] for w in made)
        if self.system in task.DATA_PARALLEL:
            return share, 1.0
        turns = (steps / len(made)) / self.run.sync_every * shards
        return share, commits / turns


class Bisection:
    """Of one case on a testbed that is up."""

    def __init__(self, made: Testbed, case: Case, options: argparse.Namespace, folder: Path) -> None:
        self._made = made
        self._case = case
        self._options = options
        self._folder = folder
        self.probes: list[dict[str, float]] = []

    def find(self) -> dict[str, Any]:
        """The figures at the slowest rate that is enough.

        Raises:
            BenchmarkError, TestbedError
        """
        case, options = self._case, self._options
        config = {"system": case.system, "step_s": options.step_s, "snapshot_every": 0, **case.settings}
        configs = [{**config, "folder": str(self._folder / case.name.replace("/", "-"))}] * PEERS
        predicted = case.predicted_bps()
        with sites.Series(self._made, configs, self._folder / "logs") as series:
            set_rates(self._made, predicted * SPREAD)
            series.go(10**6, 1e6)
            self._probe(series, predicted * SPREAD)  # not counted: the first turns are made while everybody warms up
            low, high, best = max(SLOWEST_BPS, predicted / SPREAD), predicted * SPREAD, None
            while best is None or (high / low > CLOSE and len(self.probes) < options.probes):
                rate = high if best is None else (low * high) ** 0.5
                probe = self._probe(series, rate)
                self.probes.append(probe)
                print(f"{case.name}: {probe}", file=sys.stderr, flush=True)
                if min(probe["utilisation"], probe["turns"]) >= WANTED:
                    high, best = rate, probe
                elif best is None:
                    if high > predicted * SPREAD**2:
                        raise sites.BenchmarkError(
                            f"{case.name} does not reach {WANTED:.0%} at {high / 1e6:.0f} Mbit/s"
                        )
                    low, high = high, high * SPREAD
                else:
                    low = rate
        set_rates(self._made, high)
        verification.must_agree(self._made)
        return {**best, "predicted_bps": predicted, "probes": self.probes}

    def _probe(self, series: sites.Series, rate: float) -> dict[str, float]:
        case = self._case
        set_rates(self._made, rate)
        time.sleep(max(0.0, -series.elapsed()) + case.settle_s())
        begin, begin_unix = series.elapsed(), time.time()
        time.sleep(case.window_s())
        end, end_unix = series.elapsed(), time.time()
        words = [[w for w in worker.of("step") if begin <= w["at"] <= end] for worker in series.workers]
        commits = Commits(0, 1, 0.0)
        if case.system == "p2pdiloco":
            folder = self._folder / case.name.replace("/", "-") / "1"
            commits = commits_between(folder, begin_unix, end_unix)
        share, turns = case.shares(words, commits.versions, commits.shards)
        whole = [w for w in words if len(w) > 1]
        sent = sum(w[-1]["sent"] - w[0]["sent"] for w in whole)
        steps = sum(w[-1]["number"] - w[0]["number"] for w in whole)
        return {
            "rate_bps": rate,
            "utilisation": share,
            "turns": min(1.0, turns),
            "learners": commits.learners,
            "steps": steps / PEERS,
            "sent_kb_a_step": sent / max(1, steps) / 1e3,
        }


def set_rates(made: Testbed, bps: float) -> None:
    """Of all lines, both ways."""
    for site in made.topology.sites:
        made.apply(Change(at_s=0.0, site=site.name, up=sites.rate_text(bps), down=sites.rate_text(bps)))


def topology(options: argparse.Namespace, name: str = "wan-bandwidth") -> str:
    """Equal lines, equal paths."""
    pairs = {(a, b): options.round_trip_ms for a in range(PEERS) for b in range(a + 1, PEERS)}
    return sites.topology_toml(name, [("100mbit", "100mbit")] * PEERS, pairs)


COLUMNS = (
    ("least rate, Mbit/s", "rate_mbps", ".2f"),
    ("formula, Mbit/s", "predicted_mbps", ".2f"),
    ("times less than DDP's best", "less_than_ddp", ".0f"),
    ("utilisation", "utilisation", ".1%"),
    ("turns kept", "turns", ".1%"),
    ("kB sent a step and site", "sent_kb_a_step", ".1f"),
    ("bytes, times less", "less_bytes", ".0f"),
)


def main() -> int:
    """The command line."""
    options = _options()
    results: dict[str, dict[str, Any]] = {}
    try:
        with sites.stage(options, topology(options)) as (made, folder):
            for name in options.cases:
                case = Case(name, options)
                results[name] = Bisection(made, case, options, folder).find()
    except (sites.BenchmarkError, TestbedError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if results:
            _report(options, results)
    return 0


def _report(options: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    ddp = results.get("ddp-bf16", results.get("ddp"))
    for one in results.values():
        one["rate_mbps"], one["predicted_mbps"] = one["rate_bps"] / 1e6, one["predicted_bps"] / 1e6
        if ddp is not None:
            one["less_than_ddp"] = ddp["rate_bps"] / one["rate_bps"]
            one["less_bytes"] = ddp["sent_kb_a_step"] / one["sent_kb_a_step"]
    for name, one in results.items():
        bench.write(options, "wan/bandwidth", {"case": name}, one)
    print(f"\nSlowest line for {WANTED:.0%}; {options.step_s:g} s a step, round trip {options.round_trip_ms:g} ms\n")
    print(bench.table("system", COLUMNS, results))
    if options.plot:
        plots.bandwidth(options.plot, results)


def _options() -> argparse.Namespace:
    parser = bench.parser(__doc__, rows="system", has_keep=True)
    parser.add_argument(
        "--cases",
        nargs="*",
        default=["ddp", "ddp-bf16", "diloco", "p2pdiloco 24/24/4", "p2pdiloco 48/24/8"],
        help="systems: ddp, ddp-bf16, diloco, 'p2pdiloco H/P/tau'",
    )
    parser.add_argument("--step-s", type=float, default=0.6, help="step time of the emulated accelerator")
    parser.add_argument("--sync-every", type=int, default=100, help="DiLoCo's H")
    parser.add_argument("--round-trip-ms", type=float, default=2.0, help="round trip of each pair of sites")
    parser.add_argument("--window-s", type=float, default=8.0, help="shortest time at one rate")
    parser.add_argument("--probes", type=int, default=12, help="maximum number of rates to try")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
