"""Time to a fixed held-out loss of five systems with the same training over the same throttled links.

    python -m benchmarks.wan.speed --json out/wan/speed.jsonl --plot out/wan/speed.png

1. Four sites, one worker each. Model, batches, inner optimizer and step time are the same for all (``task``); the links
   are as slow for this model as those of the paper's 12B run (``ratio``).
2. A system that cannot make all steps before ``--cap-s`` (data parallel: ``--ddp-s``) is measured for that long. If it
   has not reached the loss by then, its time is a lower bound. Data parallel's time is extrapolated, and marked: the
   steps that it needs without a network (``task.reference``, same seed and batches, float32 gradients) times its
   measured step time.
3. The loss is that of the system's global model or of worker 0's own, whichever is lower at that moment, on a straight
   line between two snapshots.
4. Tokens per second are counted after the first exchange (DDP: after its first step), utilization over the whole time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import bench
from benchmarks.netbed.namespaces import TestbedError
from benchmarks.netbed.topology import Topology
from benchmarks.wan import figures, plots, ratio, sites, task

SETTINGS: dict[str, dict[str, object]] = {
    "ddp": {"bucket_mb": 4, "gradients": "float32"},
    "ddp-bf16": {"bucket_mb": 4, "gradients": "bf16"},
    "diloco": {"sync_every": 100, "outer_lr": 0.7, "outer_momentum": 0.9},
    "torchft": {
        "sync_every": 100,
        "fragments": 2,
        "overlap": 45,
        "alpha": 0.5,
        "outer_lr": 0.7,
        "outer_momentum": 0.5,
    },
    "hivemind": {"sync_every": 24, "codec": "uint8", "matchmaking_s": 3.0},
    "p2pdiloco": {
        "sync_every": 24,
        "fragments": 24,
        "overlap": 2,
        "codec": "int4",
    },
}
LABELS = {
    "ddp": "data parallel (torch DDP, gloo, float32)",
    "ddp-bf16": "data parallel (torch DDP, gloo, bf16)",
    "diloco": "DiLoCo, synchronous, float32",
    "torchft": "torchft Streaming DiLoCo, float32",
    "hivemind": "hivemind.Optimizer, local updates, 8 bit",
    "p2pdiloco": "p2pdiloco, int4",
}


def topology(step_s: float, name: str = "wan-speed") -> tuple[str, Topology]:
    """The four regions, slowed down."""
    regions, scale = ratio.regions(), ratio.scale(task.PARAMETERS, step_s)
    lines = [(sites.rate_text(s.up_bps * scale), sites.rate_text(s.down_bps * scale)) for s in regions.sites]
    trips = {pair: route.round_trip_s * 1e3 for pair, route in regions.paths.items()}
    return sites.topology_toml(name, lines, trips), regions


def settings_of(system: str, options: argparse.Namespace) -> dict[str, object]:
    """A system's own, with what the user tunes."""
    settings = dict(SETTINGS[system])
    if options.outer and system in ("diloco", "torchft"):
        settings["outer_lr"], settings["outer_momentum"] = options.outer
    return settings


def config_of(system: str, options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """A worker's configuration, the same for all of a system's."""
    return {
        "system": system,
        "step_s": options.step_s,
        "batch": options.batch,
        "snapshot_every": options.snapshot_every,
        "folder": f"{folder}/state-{system}",
        **settings_of(system, options),
    }


def measure(system: str, made: Any, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One system's figures.

    Raises:
        BenchmarkError, TestbedError
    """
    configs = [config_of(system, options, folder)] * ratio.PEERS
    is_lockstep = system in task.DATA_PARALLEL
    cap = options.ddp_s if is_lockstep else options.cap_s
    with sites.Series(made, configs, folder / "logs") as series:
        series.train(options.steps, cap)
        return figures.of_series(
            series.workers, options.step_s, task.step_tokens(options.batch), is_lockstep=is_lockstep
        )


def reference_curve(options: argparse.Namespace) -> list[tuple[int, float]]:
    """Held-out loss by step of data parallel without a network."""
    found: list[tuple[int, float]] = []
    every, told = options.snapshot_every, found.append
    task.reference(options.steps, ratio.PEERS, options.batch, every, lambda n, loss: told((n, loss)))
    return found


def judged(
    found: Mapping[str, dict[str, Any]], curve: Sequence[tuple[int, float]], options: argparse.Namespace
) -> tuple[float, dict[str, dict[str, Any]]]:
    """The fixed loss, and each system's time to it. Without ``--loss`` it is the lowest that all systems reached (and
    data parallel in the reference), a hundredth up."""
    wanted = options.loss
    if wanted is None:
        lows = [
            min(loss for _, _, loss in f["curve"])
            for name, f in found.items()
            if name not in task.DATA_PARALLEL and f["curve"]
        ]
        lows += [min(loss for _, loss in curve)] if curve else []
        wanted = max(lows) * 1.01
    out = {}
    for name, one in found.items():
        reached = figures.time_to(wanted, [(at, loss) for at, _, loss in one["curve"]])
        kind = "measured"
        if reached is None and name in task.DATA_PARALLEL and curve:
            steps = figures.time_to(wanted, [(float(n), loss) for n, loss in curve])
            reached = None if steps is None else steps * one["seconds_a_step"]
            kind = "extrapolated"
        elif reached is None:
            reached, kind = one["wall_s"], "at least"
        out[name] = {**one, "to_loss_s": reached, "to_loss_kind": kind}
    ours = out.get("p2pdiloco", {}).get("to_loss_s")
    for one in out.values():
        one["times_p2pdiloco"] = one["to_loss_s"] / ours if ours and one["to_loss_s"] else None
    return wanted, out


ROW, REFERENCE_ROW = "wan/speed", "wan/speed reference"
COLUMNS = (
    ("tokens/s", "tokens_per_s", ".0f"),
    ("utilisation", "utilisation", ".1%"),
    ("s to loss", "to_loss_s", ".0f"),
    ("", "to_loss_kind", "s"),
    ("x p2pdiloco", "times_p2pdiloco", ".2f"),
    ("lowest loss", "lowest", ".3f"),
    ("blocked s", "blocked_s", ".3f"),
    ("MB sent a site", "sent_mb", ".1f"),
    ("kB a step", "sent_kb_a_step", ".1f"),
    ("late steps", "late_share", ".1%"),
    ("steps", "steps", ".0f"),
)


def main() -> int:
    """The command line."""
    options = _options()
    toml, regions = topology(options.step_s)
    least, most = ratio.ratios(regions)
    if options.judge and not options.judge.is_file():
        print(f"{options.judge} is no file: give what an earlier run wrote with --json", file=sys.stderr)
        return 1
    found, curve = _read(options.judge) if options.judge else _measured(toml, options, (least, most))
    if not found:
        return 1
    wanted, results = judged(found, curve, options)
    settings = {
        "loss": wanted,
        "ratios": [least, most],
        "rates_bps": [s.up_bps * ratio.scale(task.PARAMETERS, options.step_s) for s in regions.sites],
    }
    if not options.judge:
        for name, one in results.items():
            bench.write(options, ROW, {**settings, "system": name, **settings_of(name, options)}, one)
        if curve:
            bench.write(options, REFERENCE_ROW, settings, {"curve": curve})
    print(f"\nTime to a held-out loss of {wanted:.3f} nats:\n")
    print(bench.table("system", COLUMNS, {LABELS[name]: one for name, one in results.items()}))
    if options.plot:
        plots.speed(options.plot, {LABELS[name]: one for name, one in results.items()}, curve, wanted)
    return 0 if options.judge or len(found) == len(options.systems) else 1


def _measured(
    toml: str, options: argparse.Namespace, ratios: tuple[float, float]
) -> tuple[dict[str, dict[str, Any]], list[tuple[int, float]]]:
    """Each system's figures, as far as it came; data parallel's reference."""
    found: dict[str, dict[str, Any]] = {}
    print(f"communication to computation of data parallel: {ratios[0]:.0f} to {ratios[1]:.0f}", file=sys.stderr)
    try:
        with sites.stage(options, toml) as (made, folder):
            for system in options.systems:
                found[system] = measure(system, made, options, folder)
                print(f"{system}: {figures.brief(found[system])}", file=sys.stderr, flush=True)
    except (sites.BenchmarkError, TestbedError) as error:
        print(error, file=sys.stderr)
        if found:
            print(f"going on with what was measured: {', '.join(found)}", file=sys.stderr)
    return found, reference_curve(options) if found.keys() & set(task.DATA_PARALLEL) else []


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], list[tuple[int, float]]]:
    """The same of an earlier run's ``--json``; the newest row of each system."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {row["settings"]["system"]: row["figures"] for row in rows if row["benchmark"] == ROW}
    curves = [row["figures"]["curve"] for row in rows if row["benchmark"] == REFERENCE_ROW]
    return found, curves[-1] if curves else []


def _options() -> argparse.Namespace:
    parser = bench.parser(__doc__, rows="system", has_keep=True)
    parser.add_argument("--systems", nargs="*", choices=SETTINGS, default=list(SETTINGS), help="systems to run")
    parser.add_argument("--step-s", type=float, default=0.4, help="step time of the emulated accelerator")
    parser.add_argument("--batch", type=int, default=task.BATCH, help="windows per worker and step")
    parser.add_argument("--steps", type=int, default=400, help="steps of each worker")
    parser.add_argument("--cap-s", type=float, default=600.0, help="time limit of one system, in seconds")
    parser.add_argument("--ddp-s", type=float, default=300.0, help="time limit of DDP, in seconds")
    parser.add_argument("--loss", type=float, help="fixed held-out loss (default: the lowest that all reach + 1 %%)")
    parser.add_argument(
        "--judge",
        type=Path,
        help="measure nothing; evaluate the --json file of an earlier run, e.g. with another --loss",
    )
    parser.add_argument(
        "--outer",
        nargs=2,
        type=float,
        metavar=("RATE", "MOMENTUM"),
        help="outer settings of DiLoCo and torchft, for tuning",
    )
    parser.add_argument("--snapshot-every", type=int, default=10, help="steps between two snapshots")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
