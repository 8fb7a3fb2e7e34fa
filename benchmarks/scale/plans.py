"""Predictions of ``p2pdiloco plan`` beside throttled runs: bytes per step and compute utilization.

    python -m benchmarks.scale.plans

Nothing is measured here. The measurements are those of ``python -m benchmarks.wan.utilisation``: 3.3M parameters, H =
24, int4, all rounds kept.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from benchmarks import bench
from benchmarks.wan import task
from p2pdiloco.cli.plan import wanted_of
from p2pdiloco.planner import PeerLines, make_plan
from p2pdiloco.protocol.manifest import RunConfig

ALLOWED = 0.15


class Measured(NamedTuple):
    """A throttled run; ``mbps``: of the slowest line."""

    name: str
    peers: int
    step_s: float
    mbps: float
    utilisation: float
    bytes_a_step: float


RUNS = (
    Measured("four-us-regions", 4, 0.5, 1000, 0.990, 92_600),
    Measured("home-lines", 4, 0.5, 50, 0.985, 98_200),
    Measured("one-bad-site", 4, 0.5, 20, 0.987, 101_200),
    Measured("50 Mbit/s, 60 ms", 4, 0.5, 50, 0.989, 97_600),
    Measured("10 Mbit/s, 60 ms, 1 % lost", 4, 0.5, 10, 0.983, 105_700),
    Measured("transatlantic, 1 s a step", 4, 1.0, 500, 0.997, 85_100),
    Measured("eight-datacenters, 4 s a step", 8, 4.0, 1000, 0.986, 133_500),
)
COLUMNS = (
    ("kB a step", "measured_kb", ".1f"),
    ("plan", "planned_kb", ".1f"),
    ("error", "bytes_error", "+.0%"),
    ("computes", "measured_utilisation", ".1%"),
    ("plan ", "planned_utilisation", ".0%"),
    ("error ", "utilisation_error", "+.1%"),
)


def compared(run: Measured) -> dict[str, float]:
    """One row."""
    wanted = wanted_of(RunConfig(name="wan", model=task.MODEL), run.peers, run.step_s)
    assert wanted.parameters == task.PARAMETERS
    lines = PeerLines(up_bits_per_s=1e6 * run.mbps, down_bits_per_s=1e6 * run.mbps)
    plan = make_plan(wanted, lines)
    computes = plan.utilisation["p2pdiloco"]
    return {
        "measured_kb": run.bytes_a_step / 1e3,
        "planned_kb": plan.bytes_a_step / 1e3,
        "bytes_error": plan.bytes_a_step / run.bytes_a_step - 1,
        "measured_utilisation": run.utilisation,
        "planned_utilisation": computes,
        "utilisation_error": computes / run.utilisation - 1,
        "rounds_kept": plan.rounds_kept,
    }


def main() -> None:
    """Print."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.scale.plans", description="predictions of plan beside throttled runs"
    ).parse_args()
    print(bench.table("run", COLUMNS, {run.name: compared(run) for run in RUNS}))


if __name__ == "__main__":
    main()
