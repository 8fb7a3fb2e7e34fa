"""Memory and disk of a peer by component, in bytes per parameter.

    python -m benchmarks.memory [--parameters 30e6] [--rounds 100] [--json out/memory.json]

Two real nodes exchange the whole model round after round, with stand-in learners (``benchmarks.wire.exchange``). Then
they rest and report what they hold, and what a checkpoint takes beyond that. A real learner of about as many parameters
in a process of its own shows what a run adds to it. Memory is PSS, less what the process held before it created a
state. The exit status is 1 if the limits that docs/operating.md states are exceeded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks import bench
from benchmarks.wire.exchange_swarm import BenchmarkError, Case, Swarm

REST_S = 20.0
"""Memory that is not used any more goes after some laps through all shards."""
FIXED_BYTES = 50e6
"""Of a node whatever its model: working memory of threads, sockets' buffers."""
AT_REST = 7.7
CHECKPOINT = 1.0
LEARNER = 1.0
SHARD_BYTES = 12e6
"""A checkpoint's least: the largest shard's 8 MB, and what the allocator rounds up."""
COLUMNS = (("bytes a parameter", "bytes", ".2f"), ("MB", "mb", ".1f"))


def node_figures(parameters: int, rounds: int, folder: str, *, is_verbose: bool) -> dict[str, float]:
    """Of the larger of two nodes.

    Raises:
        BenchmarkError: one of them failed.
    """
    case = Case("p2pdiloco", "int4", "lo", 2, parameters)
    with Swarm(case, 0.0, is_verbose=is_verbose, module="benchmarks.memory.node") as swarm:
        busy = [answer for _ in range(rounds) for answer in swarm.ask_all({"do": "round"})]
        resting = swarm.ask_all({"do": "rest", "seconds": REST_S})
        saved = swarm.ask_all({"do": "save"})
        after = swarm.ask_all({"do": "rest", "seconds": 1.0})
    node = max(resting, key=lambda one: one["shared"] + one["own"])
    return {
        "at_rest": max(one["shared"] + one["own"] for one in resting),
        **{name: node[name] for name in ("shared", "own", "theta", "shift", "snapshot", "momentum", "payloads")},
        "rest_disk": node["disk"],
        "exchange_peak": max(one["peak"] for one in busy),
        "checkpoint_peak": max(one["peak"] for one in saved),
        "checkpoint_s": max(one["seconds"] for one in saved),
        "disk": max(one["disk"] for one in after),
    }


def learner_figures(parameters: int) -> dict[str, float]:
    """Of one learner in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory.learner", "--parameters", str(parameters)]
    told = subprocess.run(command, cwd=bench.ROOT, check=True, capture_output=True, text=True, timeout=600)
    found: dict[str, float] = json.loads(told.stdout.splitlines()[-1])
    return found


def formula(parameters: int) -> float:
    """Bytes that a node holds at rest, at most: parameters and momentum, payloads, and two fragments' updates and
    snapshots."""
    return AT_REST * parameters + FIXED_BYTES


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, record."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--parameters", type=float, default=30e6, help="parameters of the model")
    parser.add_argument("--rounds", type=int, default=100, help="exchanges of the whole model")
    parser.add_argument("--verbose", action="store_true", help="show the peers' output")
    options = parser.parse_args(argv)
    parameters = int(options.parameters)
    try:
        node = node_figures(parameters, options.rounds, "", is_verbose=options.verbose)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    learner = learner_figures(parameters)
    figures = {
        "at_rest_bytes_per_parameter": node["at_rest"] / parameters,
        "checkpoint_peak_bytes_per_parameter": node["checkpoint_peak"] / parameters,
        "learner_extra_bytes_per_parameter": (learner["together"] - learner["alone"]) / learner["parameters"],
        "learner_rest_bytes_per_parameter": (learner["after"] - learner["alone"]) / learner["parameters"],
        **{f"node_{name}": value for name, value in node.items()},
    }
    bench.write(options, "memory", {}, figures)
    print(told(parameters, node, figures))
    limits = {
        "at rest": (node["at_rest"], formula(parameters)),
        "a checkpoint": (node["checkpoint_peak"], max(CHECKPOINT * parameters, SHARD_BYTES)),
        "a learner": (learner["together"] - learner["alone"], LEARNER * learner["parameters"]),
    }
    print()
    for name, (found, limit) in limits.items():
        print(f"{name}: {limit / 1e6:.0f} MB are allowed, {'held' if found <= limit else 'MISSED'}")
    return 0 if all(found <= limit for found, limit in limits.values()) else 1


def told(parameters: int, node: Mapping[str, float], figures: Mapping[str, float]) -> str:
    """A table."""
    rows = {
        "at rest": node["at_rest"],
        "  shared with the learner": node["shared"],
        "    parameters": node["theta"],
        "    shift": node["shift"],
        "    snapshot": node["snapshot"],
        "  own": node["own"],
        "    momentum": node["momentum"],
        "    payloads in memory": node["payloads"],
        "a checkpoint, beyond that": node["checkpoint_peak"],
        "on the disk, before a checkpoint": node["rest_disk"],
        "on the disk": node["disk"],
        "a learner, by taking part": figures["learner_extra_bytes_per_parameter"] * parameters,
        "  at rest": figures["learner_rest_bytes_per_parameter"] * parameters,
    }
    shown = {name: {"bytes": size / parameters, "mb": size / 1e6} for name, size in rows.items()}
    return bench.table("component", COLUMNS, shown)


if __name__ == "__main__":
    raise SystemExit(main())
