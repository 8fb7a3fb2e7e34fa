"""One exchange of a whole model among peers (reduce and spread), side by side with other systems.

    python -m benchmarks.wire.exchange --system p2pdiloco --peers 2 --parameters 100e6 --codec int4 --link 1gbit
    python -m benchmarks.wire.exchange --all --passes 2 --json out/exchange.jsonl --plot out/exchange.png

1. Each peer is a process on a shaped link in a network namespace of its own (``links``; needs root).
2. A figure is the median of the rounds after a warm-up: one round, of p2pdiloco those in which a chain is young and
   peers repeat each other's merges to check them (rules V5). Later they repeat one in ten. ``--first`` measures the
   first rounds instead. With ``--passes 2`` the systems take turns (A B C A B C), so that a change in the machine's
   load affects all of them.
3. The clock runs from the first peer's start to the last peer's end. hivemind's covers the all-reduce alone, without
   matchmaking; p2pdiloco's includes the outer step, digests and signatures, which the others do not have.
4. A round whose result is wrong, or differs between peers, fails the benchmark.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import bench
from benchmarks.wire import links, plots
from benchmarks.wire.baselines import environments
from benchmarks.wire.exchange_swarm import SYSTEMS, BenchmarkError, Case, Round, Swarm
from p2pdiloco.protocol.norm_bound import MEMORY

RAW_BYTES = {"int4": 0.46, "int8": 0.9, "bf16": 1.6, "fp32": 4.0}
"""Bytes per parameter that ``raw`` moves, where p2pdiloco has not been measured in the same run."""


def measure(
    cases: Sequence[Case], rounds: int, passes: int, *, is_first: bool = False, is_verbose: bool = False
) -> Iterator[tuple[Case, list[Round]]]:
    """Each case's rounds, each pass with a warm-up of its own.

    Raises:
        BenchmarkError, links.LinkError, environments.SetupError
    """
    bytes_per_parameter = dict(RAW_BYTES)
    found: dict[Case, list[Round]] = {case: [] for case in cases}
    for number in range(passes):
        for case in cases:
            wanted = rounds * (number + 1) // passes - rounds * number // passes
            with Swarm(case, bytes_per_parameter.get(case.codec, 0.0), is_verbose=is_verbose) as swarm:
                for _ in range(MEMORY if case.system == "p2pdiloco" and not is_first else 1):
                    swarm.exchange()
                found[case] += [swarm.exchange() for _ in range(wanted)]
            load = os.getloadavg()[0]
            print(f"{time.strftime('%H:%M:%S')} load {load:.2f}  {case.link} {case.name}", file=sys.stderr)
            if case.system == "p2pdiloco":
                scale = 2 * (case.peers - 1) / case.peers * case.parameters
                bytes_per_parameter[case.codec] = statistics.median(r.payload for r in found[case]) / scale
            if number == passes - 1:
                yield case, found[case]


def figures(case: Case, rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians, and what follows from them."""

    def median(name: str) -> float:
        return float(statistics.median(getattr(r, name) for r in rounds))

    wall, fragment = median("wall_s"), 4 * case.parameters
    rate = links.payload_rate(case.link)
    wire = median("sent") * case.peers
    shares = [r.busy_share for r in rounds if r.busy_share is not None]
    return {
        "wall_s": wall,
        "wall_s_min": min(r.wall_s for r in rounds),
        "wall_s_max": max(r.wall_s for r in rounds),
        "whole_s": median("whole_s"),
        "sent_bytes": median("sent"),
        "received_bytes": median("received"),
        "payload_bytes": median("payload"),
        "bytes_per_parameter": median("payload") / (2 * (case.peers - 1) / case.peers * case.parameters),
        "payload_gbit_per_s": median("payload") * 8 / wall / 1e9,
        "link_share": None if rate is None else median("payload") * 8 / wall / rate,
        "busy_share": statistics.median(shares) if shares else None,
        "cpu_s": median("cpu_s"),
        "cpu_s_per_wire_gb": median("cpu_s") / (wire / 1e9),
        "cores": median("cpu_s") / wall,
        **(_memory(rounds, fragment) if median("peak_rss") else dict.fromkeys(RSS)),
        "error": max(r.error for r in rounds),
    }


RSS = (
    "idle_rss_by_tenth",
    "idle_rss_per_float32",
    "peak_rss_per_float32",
    "exchange_rss_per_float32",
    "rss_growth_per_float32",
)


def _memory(rounds: Sequence[Round], fragment: float) -> dict[str, Any]:
    """Of the largest peer: bytes at each tenth of the rounds; in units of the exchanged parameters in float32 before,
    at most, what an exchange adds, and what all rounds added."""
    return {
        "idle_rss_by_tenth": [int(rounds[(len(rounds) - 1) * tenth // 10].idle_rss) for tenth in range(11)],
        "idle_rss_per_float32": statistics.median(r.idle_rss for r in rounds) / fragment,
        "peak_rss_per_float32": max(r.peak_rss for r in rounds) / fragment,
        "exchange_rss_per_float32": max(r.peak_rss - r.idle_rss for r in rounds) / fragment,
        "rss_growth_per_float32": (rounds[-1].idle_rss - rounds[len(rounds) // 5].idle_rss) / fragment,
    }


COLUMNS = (
    ("wall s", "wall_s", ".3f"),
    ("min", "wall_s_min", ".3f"),
    ("max", "wall_s_max", ".3f"),
    ("MB sent", "sent_mb", ".1f"),
    ("B/param", "bytes_per_parameter", ".3f"),
    ("Gbit/s", "payload_gbit_per_s", ".2f"),
    ("% link", "link_share", ".0%"),
    ("% busy", "busy_share", ".0%"),
    ("CPU s", "cpu_s", ".2f"),
    ("CPU s/GB", "cpu_s_per_wire_gb", ".2f"),
    ("+RSS/f32", "exchange_rss_per_float32", ".2f"),
    ("RSS/f32", "peak_rss_per_float32", ".2f"),
    ("error", "error", ".1e"),
    ("x p2pdiloco", "times_p2pdiloco", ".2f"),
)


def table(results: Sequence[tuple[Case, dict[str, Any]]]) -> str:
    """For people; the last column is how many times as long as p2pdiloco's first case on the same link it took."""
    ours: dict[str, float] = {}
    for case, found in results:
        if case.system == "p2pdiloco":
            ours.setdefault(case.link, found["wall_s"] or 0.0)
    rows = {}
    for case, found in results:
        times = found["wall_s"] / ours[case.link] if ours.get(case.link) and found["wall_s"] else None
        rows[f"{case.link} {case.name}"] = {**found, "sent_mb": found["sent_bytes"] / 1e6, "times_p2pdiloco": times}
    return bench.table("link, system", COLUMNS, rows)


def all_cases(peers: int, parameters: int) -> list[Case]:
    """The issue's table."""
    wanted = {
        "1gbit": ["p2pdiloco int4", "gloo bf16", "hivemind uint8", "torchft fp32", "p2pdiloco bf16", "raw int4"],
        "2.5gbit": ["p2pdiloco int4", "gloo bf16", "torchft fp32", "p2pdiloco bf16", "raw int4"],
        "200mbit": ["p2pdiloco int4", "gloo bf16", "torchft fp32", "p2pdiloco bf16", "raw int4"],
        "lo": [
            *("p2pdiloco int4", "gloo bf16", "hivemind uint8", "hivemind fp16", "torchft fp32", "p2pdiloco bf16"),
            "raw int4",
        ],
    }
    return [
        Case(system, codec, link, peers, parameters)
        for link, names in wanted.items()
        for system, codec in (name.split() for name in names)
    ]


def main() -> int:
    """The command line."""
    options = _options()
    peers, parameters = options.peers, int(options.parameters)
    if options.all:
        cases = [case for case in all_cases(peers, parameters) if options.only in (None, case.link)]
        cases = [case for case in cases if case.system in options.among]
    else:
        system = SYSTEMS[options.system]
        codec = options.codec or system.codecs[0]
        if codec not in system.codecs:
            print(f"{options.system} has the codecs {', '.join(system.codecs)}, not {codec}", file=sys.stderr)
            return 2
        cases = [Case(options.system, codec, options.link, peers, parameters, options.merge)]
    results = []
    rows = []
    try:
        for case, rounds in measure(
            cases, options.rounds, options.passes, is_first=options.first, is_verbose=options.verbose
        ):
            found = figures(case, rounds)
            results.append((case, found))
            rows.append(bench.write(options, "wire/exchange", case._asdict(), found))
    except (BenchmarkError, links.LinkError, environments.SetupError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if results:
            print(table(results))
        if rows and options.plot:
            plots.exchange(options.plot, rows)
    return 0


def _options() -> argparse.Namespace:
    parser = bench.parser(__doc__)
    parser.add_argument("--all", action="store_true", help="the whole table; with --only LINK one link of it")
    parser.add_argument("--only", choices=links.RATES, help="with --all: only this link")
    parser.add_argument("--among", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="with --all: only these systems")
    parser.add_argument("--system", choices=SYSTEMS, default="p2pdiloco", help="system to measure")
    parser.add_argument(
        "--codec", help="p2pdiloco: int4, int8, bf16; hivemind: uint8, fp16, fp32; torchft: fp32; gloo: bf16, fp32"
    )
    parser.add_argument("--link", choices=links.RATES, default="lo", help="link to measure; all but lo need root")
    parser.add_argument("--peers", type=int, default=2, help="number of peers; with 2 on two cores each has its own")
    parser.add_argument("--parameters", type=float, default=100e6, help="parameters of the model")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the warm-up")
    parser.add_argument("--first", action="store_true", help="warm up for one round only: a run's first exchanges")
    parser.add_argument("--passes", type=int, default=1, help="split the rounds into passes over all systems")
    parser.add_argument("--merge", choices=["rda", "direct"], default="rda", help="merge rule of p2pdiloco")
    parser.add_argument("--verbose", action="store_true", help="show the peers' standard error")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
