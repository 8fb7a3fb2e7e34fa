"""Time to a held-out loss with unequal learners, dying peers and borrowed machines.

    python -m benchmarks.wan.hardware --json out/wan/hardware.jsonl --plot out/wan/hardware.png

Six sites have links as fast as those of ``home-lines``; four of them train in every scenario, the model is that of
``task``. Step times are paced.

- ``equal``: all have the same step time.
- ``1:1:2:4``: two have that step time, one twice and one four times as long.
- ``churn``: equal; every ``--kill-s`` seconds all processes of one site, never the first, get SIGKILL and are started
  again on the same folder.
- ``scavenging``: equal; in the second third of the time two more peers train.

The loss is that of the global parameters at site 0, which is never killed; the fixed loss is the same for all
scenarios. Speed is a scenario's time to the loss over that of ``equal``; tokens are those that all learners made until
then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import bench
from benchmarks.netbed.namespaces import TestbedError
from benchmarks.netbed.testbed import Testbed
from benchmarks.wan import figures, plots, sites, task

TRAINERS = 4
SITES = 6
LINE = ("50mbit", "1gbit")
ROUND_TRIP_MS = 24.0
SPEEDS = {"1:1:2:4": (1.0, 1.0, 2.0, 4.0)}
LONG = 10**6


def config_of(options: argparse.Namespace, folder: Path, slowness: float = 1.0) -> dict[str, Any]:
    """Of one worker."""
    return {
        "system": "p2pdiloco",
        "step_s": options.step_s * slowness,
        "snapshot_every": options.snapshot_every,
        "folder": str(folder),
        "sync_every": 24,
        "fragments": 24,
        "overlap": 2,
        "codec": "int4",
    }


def kill_in_round(series: sites.Series, options: argparse.Namespace, folder: Path) -> int:
    """Until the time is over; how often."""
    killed = 0
    while series.elapsed() < options.seconds - options.kill_s:
        time.sleep(options.kill_s)
        site = 1 + killed % (TRAINERS - 1)
        series.lose(site)
        series.come(site, {}, LONG, options.seconds)
        killed += 1
    return killed


def borrow(series: sites.Series, options: argparse.Namespace, folder: Path) -> int:
    """Two more in the second third."""
    third = options.seconds / 3
    time.sleep(max(0.0, third - series.elapsed()))
    for site in range(TRAINERS, SITES):
        series.come(site, config_of(options, folder), LONG, options.seconds)
    time.sleep(max(0.0, 2 * third - series.elapsed()))
    for site in range(TRAINERS, SITES):
        series.lose(site)
    return SITES - TRAINERS


def nothing(series: sites.Series, options: argparse.Namespace, folder: Path) -> int:
    """Leave them alone."""
    return 0


SCENARIOS: dict[str, Callable[[sites.Series, argparse.Namespace, Path], int]] = {
    "equal": nothing,
    "1:1:2:4": nothing,
    "churn": kill_in_round,
    "scavenging": borrow,
}


def measure(name: str, made: Testbed, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One scenario."""
    configs = [config_of(options, folder, slowness) for slowness in SPEEDS.get(name, (1.0,) * TRAINERS)]
    with sites.Series(made, configs, folder / "logs") as series:
        series.go(LONG, options.seconds)
        events = SCENARIOS[name](series, options, folder)
        series.finish(options.seconds)
        workers = [*series.workers, *series.former]
    words = [w for worker in workers for w in worker.of("step")]
    curve = [(w["at"], w["number"], w["whole"]) for w in workers[0].of("evaluated")]
    return {
        "curve": curve,
        "steps_at": sorted(w["at"] for w in words),
        "lowest": min(loss for _, _, loss in curve),
        "blocked_s": max(sum(w["blocked"] for w in worker.of("step")) for worker in workers),
        "events": events,
        "tokens_per_s": len(words) * task.step_tokens() / max(w["at"] for w in words),
        "late_share": sum(worker.of("step")[-1]["late"] for worker in workers if worker.of("step")) / len(words),
    }


def judged(results: dict[str, dict[str, Any]], wanted: float | None) -> float:
    """Each scenario's time to the loss: by default the lowest that all reach, a hundredth up."""
    loss = max(one["lowest"] for one in results.values()) * 1.01 if wanted is None else wanted
    for one in results.values():
        one["to_loss_s"] = figures.time_to(loss, [(at, value) for at, _, value in one["curve"]])
        reached = one.pop("steps_at")
        if one["to_loss_s"] is not None:
            one["tokens_to_loss"] = sum(at <= one["to_loss_s"] for at in reached) * task.step_tokens()
    base = results.get("equal", {}).get("to_loss_s")
    for one in results.values():
        one["times_equal"] = one["to_loss_s"] / base if base and one["to_loss_s"] else None
    return loss


COLUMNS = (
    ("s to loss", "to_loss_s", ".0f"),
    ("x equal", "times_equal", ".2f"),
    ("tokens to loss", "tokens_to_loss", ",.0f"),
    ("tokens/s", "tokens_per_s", ".0f"),
    ("lowest loss", "lowest", ".3f"),
    ("kills or guests", "events", ".0f"),
    ("most blocked, s", "blocked_s", ".3f"),
    ("late steps", "late_share", ".1%"),
)


def main() -> int:
    """The command line."""
    options = _options()
    pairs = {(a, b): ROUND_TRIP_MS for a in range(SITES) for b in range(a + 1, SITES)}
    toml = sites.topology_toml("wan-hardware", [LINE] * SITES, pairs)
    results: dict[str, dict[str, Any]] = {}
    try:
        with sites.stage(options, toml) as (made, folder):
            for name in options.scenarios:
                results[name] = measure(name, made, options, folder / name.replace(":", "-"))
                print(f"{name}: lowest loss {results[name]['lowest']:.3f}", file=sys.stderr, flush=True)
    except (sites.BenchmarkError, TestbedError) as error:
        print(error, file=sys.stderr)
        return 1
    loss = judged(results, options.loss)
    for name, one in results.items():
        bench.write(options, "wan/hardware", {"scenario": name, "loss": loss}, one)
    print(f"\nTime to a held-out loss of {loss:.3f} nats, {options.step_s:g} s a step\n")
    print(bench.table("scenario", COLUMNS, results))
    if options.plot:
        plots.hardware(options.plot, results, loss)
    return 0


def _options() -> argparse.Namespace:
    parser = bench.parser(__doc__, rows="scenario", has_keep=True)
    parser.add_argument("--scenarios", nargs="*", choices=SCENARIOS, default=list(SCENARIOS), help="scenarios to run")
    parser.add_argument("--step-s", type=float, default=0.5, help="step time of the emulated accelerator")
    parser.add_argument("--seconds", type=float, default=240.0, help="duration of a scenario")
    parser.add_argument("--kill-s", type=float, default=30.0, help="seconds between two kills")
    parser.add_argument("--loss", type=float, help="fixed held-out loss (default: the lowest that all reach + 1 %%)")
    parser.add_argument("--snapshot-every", type=int, default=10, help="steps between two snapshots")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
