"""Held-out loss of a chaos run, compared with a calm run at the same number of merged tokens.

    python -m tests.chaos --plan half-hour --seed 7 --out out/storm
    python -m benchmarks.churn.storm out/storm --json out/storm.jsonl --plot out/storm.png

Reads the chaos run's folder, then repeats the run with as many peers and no faults until it has merged as many tokens.
Both losses are the global model's on the same held-out windows, read from a straight line through the last evaluations,
because a single evaluation is noisy. The calm run's peers share the machine as the others did.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import bench
from benchmarks.plots import figure
from p2pdiloco.demo.local_swarm import Swarm

TAIL = 8
"""Evaluations that the line goes through."""
POLL_S = 1.0
LINE_S = 30.0
PATIENCE_S = 3600.0
TARGET = 0.015

Point = tuple[int, float]
"""Merged tokens, held-out loss."""


def curve(folder: Path) -> list[Point]:
    """Every evaluation that any peer below ``folder`` took note of, by tokens."""
    found: dict[int, float] = {}
    for path in folder.glob("peer-*/*/metrics.jsonl"):
        for line in path.read_bytes().splitlines():
            try:
                event = json.loads(line)
            except ValueError:  # torn by a kill or a full disk
                continue
            if event.get("event") == "evaluation":
                found[event["tokens"]] = event["loss"]
    return sorted(found.items())


def loss_at(points: Sequence[Point], tokens: int) -> float:
    """By a line through the ``TAIL`` evaluations nearest to ``tokens``.

    Raises:
        ValueError: fewer than two.
    """
    near = sorted(points, key=lambda point: abs(point[0] - tokens))[:TAIL]
    if len(near) < 2:
        raise ValueError(f"{len(near)} evaluations are too few to compare")
    slope, intercept = statistics.linear_regression([t for t, _ in near], [loss for _, loss in near])
    return slope * tokens + intercept


def calm(config: Path, peers: int, tokens: int, folder: Path) -> list[Point]:
    """The same run without faults, until an evaluation stands beyond ``tokens``."""
    swarm = Swarm(folder)
    told_at = 0.0
    try:
        address = swarm.start_bootstrap()
        swarm.start_founder("A", config, address)
        for name in "BCDEFGHIJKLMNOPQRSTUVWXYZ"[: peers - 1]:
            swarm.join(name, address)
        deadline = time.monotonic() + PATIENCE_S
        while not (points := curve(folder)) or points[-1][0] < tokens:
            if time.monotonic() > deadline:
                raise SystemExit(f"the calm run did not get to {tokens:,} tokens: see {folder}")
            if time.monotonic() - told_at > LINE_S:
                told_at = time.monotonic()
                print(f"  calm run: {points[-1][0] if points else 0:,} of {tokens:,} tokens", flush=True)
            time.sleep(POLL_S)
    finally:
        swarm.stop()
        swarm.kill_leftovers()
    return curve(folder)


def plot(path: Path, curves: dict[str, Sequence[Point]], title: str) -> None:
    """Both curves."""
    with figure(path, size=(8, 4.5), title=title) as axes:
        for name, points in curves.items():
            axes.plot([t / 1e6 for t, _ in points], [loss for _, loss in points], label=name, linewidth=1.6)
        axes.set(xlabel="merged tokens, millions", ylabel="held-out loss, nats a byte")
        axes.legend()


def compare(storm: Sequence[Point], still: Sequence[Point]) -> dict[str, Any]:
    """Both losses at the storm's last tokens."""
    tokens = storm[-1][0]
    storm_loss, calm_loss = loss_at(storm, tokens), loss_at(still, tokens)
    return {
        "tokens": tokens,
        "storm_loss": round(storm_loss, 4),
        "calm_loss": round(calm_loss, 4),
        "gap": round(storm_loss / calm_loss - 1.0, 5),
    }


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure, print, write; exit status 1 beyond the target."""
    parser = bench.parser(__doc__)
    parser.add_argument("storm", type=Path, help="folder of a finished chaos run")
    options = parser.parse_args(None if arguments is None else list(arguments))
    plan = json.loads((options.storm / "schedule.json").read_bytes())["plan"]
    storm = curve(options.storm)
    if not storm:
        parser.error(f"{options.storm} has no evaluations: its plan must have evaluation.every")
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-calm-") as folder:
        still = calm(options.storm / "run.toml", plan["peers"], storm[-1][0], Path(folder))
    figures = compare(storm, still)
    print(json.dumps(figures, indent=1))
    bench.write(options, "churn/storm", {"plan": plan["name"], "peers": plan["peers"]}, figures)
    if options.plot is not None:
        title = f"plan {plan['name']}: {figures['gap']:+.1%} at {figures['tokens'] / 1e6:.1f}M tokens"
        plot(options.plot, {"with faults": storm, "without": still}, title)
    return int(figures["gap"] > TARGET)


if __name__ == "__main__":
    sys.exit(main())
