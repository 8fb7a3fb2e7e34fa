"""Exchange of fragments as large as those of a 1B-parameter model, over lines of 2 to 5 Gbit/s; no training.

    python -m benchmarks.wan.fragments --json out/wan/fragments.jsonl --plot out/wan/fragments.png

1. Four sites; node, state machine, driver and transport are the real ones (``benchmarks.wire.exchange_peer``). Outer
   gradients are quantized, sent to the owners, merged, sent to all, applied and proved by digests. A wrong result
   fails.
2. The limit is the time that the payload's bytes need on a site's line, in full packets, without round trips.
3. With ``--in-flight n``, n fragments are due at once, as on a busy line; the time is that of all, divided by n.
4. Four peers share this machine's processors, which four sites would not. So the CPU seconds of a peer stand beside the
   wall time, and all CPU seconds divided by the number of cores stand beside the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarks import bench
from benchmarks.netbed import verification
from benchmarks.netbed.namespaces import TestbedError
from benchmarks.netbed.testbed import Testbed
from benchmarks.netbed.topology import Change
from benchmarks.wan import formula, plots, sites
from p2pdiloco.protocol.norm_bound import MEMORY

PEERS = 4
LARGEST_ERROR = 0.25
MODULE = "benchmarks.wire.exchange_peer"


class Peers:
    """Four peers that exchange when told. ``with Peers(...) as peers``."""

    def __init__(self, made: Testbed, parameters: int, logs: Path) -> None:
        self._made = made
        self._parameters = parameters
        self._logs = logs
        self._workers: list[sites.Worker] = []

    def __enter__(self) -> Peers:
        try:
            for i in range(PEERS):
                config = {
                    **sites.site_config(i),
                    "index": i,
                    "peers": PEERS,
                    "parameters": self._parameters,
                    "codec": "int4",
                    "merge": "rda",
                    "is_sampled": False,
                    "bytes_per_parameter": 0.0,
                }
                self._workers.append(sites.Worker(self._made, i, MODULE, config, self._logs / f"fragments-{i}.log"))
            addresses = [worker.wait_for("")["address"] for worker in self._workers]
            self._ask("connect", addresses=addresses)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()

    def _ask(self, what: str, **more: object) -> list[sites.Words]:
        for worker in self._workers:
            worker.tell(do=what, **more)
        return [worker.wait_for("") for worker in self._workers]

    def exchange(self) -> dict[str, float]:
        """One exchange of all that is in flight.

        Raises:
            BenchmarkError: it failed, or its result is wrong.
        """
        before, cpu = self._ask("prepare"), self._cpu_s()
        done = self._ask("go")
        cpu = self._cpu_s() - cpu
        after = self._ask("check")
        if not all(one["ok"] for one in done) or len({one["digest"] for one in after}) > 1:
            raise sites.BenchmarkError(f"an exchange failed: {done}")
        if max(one["error"] for one in after) > LARGEST_ERROR:
            raise sites.BenchmarkError("an exchange's result is wrong")
        return {
            "wall_s": max(d["ended"] for d in done) - min(d["began"] for d in done),
            "payload": max(one["payload"] for one in after),
            "sent": max(a["sent"] - b["sent"] for a, b in zip(after, before, strict=True)),
            "cpu_s": cpu,
            "peak_bytes": max(one["peak"] for one in after),
            "idle_bytes": max(one["rss"] for one in before),
        }

    def _cpu_s(self) -> float:
        total = 0.0
        for worker in self._workers:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(worker.process.pid).cpu_times()
                total += times.user + times.system
        return total


def measure(made: Testbed, rate_bps: float, in_flight: int, options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Medians of the rounds after those in which peers check each other most (``benchmarks.wire.exchange``)."""
    for site in made.topology.sites:
        made.apply(Change(at_s=0.0, site=site.name, up=sites.rate_text(rate_bps), down=sites.rate_text(rate_bps)))
    verification.must_agree(made)
    with Peers(made, int(options.parameters) * in_flight, logs) as peers:
        for _ in range(MEMORY):
            peers.exchange()
        rounds = [peers.exchange() for _ in range(options.rounds)]
    median = {key: statistics.median(one[key] for one in rounds) / in_flight for key in rounds[0]}
    limit = median["payload"] * 8 / (rate_bps * formula.PAYLOAD_SHARE)
    cores = len(os.sched_getaffinity(0))
    return {
        "rate_gbps": rate_bps / 1e9,
        "in_flight": in_flight,
        "fragment_s": median["wall_s"],
        "limit_s": limit,
        "times_limit": median["wall_s"] / limit,
        "cpu_s_a_peer": median["cpu_s"] / PEERS,
        "processors_s": median["cpu_s"] / cores,
        "payload_mb": median["payload"] / 1e6,
        "bytes_per_parameter": median["payload"] / (2 * (PEERS - 1) / PEERS * options.parameters),
        "peak_mb": max(one["peak_bytes"] for one in rounds) / 1e6,
        "added_mb": max(one["peak_bytes"] - one["idle_bytes"] for one in rounds) / 1e6,
        "fastest_s": min(one["wall_s"] for one in rounds) / in_flight,
    }


COLUMNS = (
    ("fragments in flight", "in_flight", ".0f"),
    ("s a fragment", "fragment_s", ".3f"),
    ("fastest", "fastest_s", ".3f"),
    ("limit of the line, s", "limit_s", ".3f"),
    ("x limit", "times_limit", ".2f"),
    ("all CPU s / cores", "processors_s", ".3f"),
    ("CPU s a peer", "cpu_s_a_peer", ".3f"),
    ("MB sent a peer", "payload_mb", ".1f"),
    ("MB at most a peer", "peak_mb", ".0f"),
    ("of it the exchange's", "added_mb", ".0f"),
)


def main() -> int:
    """The command line."""
    options = _options()
    pairs = {(a, b): options.round_trip_ms for a in range(PEERS) for b in range(a + 1, PEERS)}
    toml = sites.topology_toml("wan-fragments", [("1gbit", "1gbit")] * PEERS, pairs)
    results: dict[str, dict[str, Any]] = {}
    status = 0
    try:
        with sites.stage(options, toml) as (made, folder):
            for gbps in options.gbps:
                for in_flight in options.in_flight:
                    one = measure(made, gbps * 1e9, in_flight, options, folder)
                    results[f"{gbps:g} Gbit/s, {in_flight} in flight"] = one
                    print(json.dumps(one), file=sys.stderr, flush=True)
    except (sites.BenchmarkError, TestbedError) as error:
        print(error, file=sys.stderr)
        status = 1
    for one in results.values():
        bench.write(options, "wan/fragments", {}, one)
    print(f"\n{options.parameters / 1e6:.0f}M parameters, int4, {PEERS} sites, {options.round_trip_ms:g} ms\n")
    print(bench.table("line", COLUMNS, results))
    if options.plot and results:
        plots.fragments(options.plot, results)
    return status


def _options() -> argparse.Namespace:
    parser = bench.parser(__doc__, rows="line", has_keep=True)
    parser.add_argument("--parameters", type=float, default=42e6, help="parameters of a fragment")
    parser.add_argument("--gbps", type=float, nargs="*", default=[2.0, 2.5, 5.0], help="line rates")
    parser.add_argument("--in-flight", type=int, nargs="*", default=[1, 3], help="fragments that are due at once")
    parser.add_argument("--round-trip-ms", type=float, default=60.0, help="between two sites")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the warm-up")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
