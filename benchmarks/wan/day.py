"""Timeline of a swarm while lines slow down, a path loses packets, a region dies and a newcomer joins.

    python -m benchmarks.wan.day --json out/wan/day.jsonl --plot out/wan/day.png

The "day" takes minutes; ``HAPPENINGS`` lists its events in tenths of the whole, and the testbed's schedule changes
lines and paths. Everybody else trains at full speed, so the timeline shows what the events cost: for each site tokens
per second, bytes sent and presence; for the swarm commits and held-out loss.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import bench
from benchmarks.netbed import testbed, trace, verification
from benchmarks.netbed.namespaces import TestbedError
from benchmarks.netbed.topology import Change
from benchmarks.wan import plots, sites, task
from benchmarks.wan.commits import events
from benchmarks.wan.hardware import LONG, config_of

NAMES = ("west", "central", "south", "east", "cabin")
LINES = (
    ("100mbit", "100mbit"),
    ("50mbit", "100mbit"),
    ("50mbit", "50mbit"),
    ("100mbit", "100mbit"),
    ("5mbit", "20mbit"),
)
TRIPS_MS = {(0, 1): 36, (0, 2): 40, (0, 3): 62, (1, 2): 24, (1, 3): 28, (2, 3): 32, (0, 4): 60, (1, 4): 50, (2, 4): 50}
TRIPS_MS[3, 4] = 70
CHANGES = (
    (0.10, "central's line is down to 3 Mbit/s", {"site": "s1", "up": "3mbit", "down": "3mbit"}),
    (0.25, "central's line is good again", {"site": "s1", "up": "50mbit", "down": "100mbit"}),
    (0.30, "west-east loses 3 %, 150 ms", {"between": ("s0", "s3"), "loss": 0.03, "round_trip_ms": 150.0}),
    (0.45, "west-east is good again", {"between": ("s0", "s3"), "loss": 0.0, "round_trip_ms": 62.0}),
)
"""When, what it is called, what the testbed does."""
LOST_SITE, LOST_AT, BACK_AT = 2, 0.50, 0.65
GUEST, GUEST_AT = 4, 0.70


def changes(seconds: float) -> list[Change]:
    """The schedule."""
    return [Change(at_s=share * seconds, **what) for share, _, what in CHANGES]


def happenings(seconds: float) -> list[tuple[float, str]]:
    """All that is done, for the timeline."""
    told = [(share * seconds, name) for share, name, _ in CHANGES]
    told += [(LOST_AT * seconds, "south is lost (SIGKILL)"), (BACK_AT * seconds, "south is back")]
    return sorted([*told, (GUEST_AT * seconds, "cabin joins, 20 Mbit/s down, 5 up")])


def topology(seconds: float) -> str:
    """Five sites and the schedule."""
    text = sites.topology_toml("wan-day", LINES, TRIPS_MS)
    for change in changes(seconds):
        text += f"[[change]]\nat_s = {change.at_s}\n"
        if change.site is not None:
            text += f'site = "{change.site}"\nup = "{change.up}"\ndown = "{change.down}"\n'
        else:
            assert change.between is not None
            pair = '", "'.join(change.between)
            text += f'between = ["{pair}"]\nloss = {change.loss}\nround_trip_ms = {change.round_trip_ms}\n'
    return text


def live(made: testbed.Testbed, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The day."""
    configs = [config_of(options, folder) for _ in range(GUEST)]
    seconds = options.seconds
    with sites.Series(made, configs, folder / "logs") as series:
        series.go(LONG, seconds)
        began_unix = time.time() - series.elapsed()
        time.sleep(max(0.0, -series.elapsed()))
        stop = threading.Event()
        player = threading.Thread(target=trace.play, args=(made, stop, lambda *_: None), daemon=True)
        player.start()
        time.sleep(max(0.0, LOST_AT * seconds - series.elapsed()))
        series.lose(LOST_SITE)
        time.sleep(max(0.0, BACK_AT * seconds - series.elapsed()))
        series.come(LOST_SITE, {}, LONG, seconds)
        time.sleep(max(0.0, GUEST_AT * seconds - series.elapsed()))
        series.come(GUEST, config_of(options, folder), LONG, seconds)
        series.finish(seconds)
        stop.set()
        player.join()
        workers = [*series.workers, *series.former]
    told = events(folder / "0")
    words = {name: [] for name in NAMES}  # type: dict[str, list[sites.Words]]
    for worker in workers:
        words[NAMES[worker.site]] += worker.of("step")
    return {
        "steps": {name: sorted((w["at"], w["blocked"], w["sent"]) for w in made) for name, made in words.items()},
        "commits": [e["time"] - began_unix for e in told if e["event"] == "commit"],
        "loss": [(w["at"], w["whole"]) for w in workers[0].of("evaluated")],
        "happenings": happenings(seconds),
        "blocked_s": max(sum(w["blocked"] for w in worker.of("step")) for worker in workers),
        "late_share": sum(w.of("step")[-1]["late"] for w in workers if w.of("step")) / sum(map(len, words.values())),
    }


def summary(found: dict[str, Any], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """For each site."""
    rows = {}
    for name, steps in found["steps"].items():
        if not steps:
            continue
        span = sum(b[0] - a[0] for a, b in itertools.pairwise(steps) if b[0] - a[0] < 10 * options.step_s)
        rows[name] = {
            "steps": len(steps),
            "first_s": steps[0][0],
            "absent_s": options.seconds - span,
            "utilisation": (len(steps) - 1) * options.step_s / span if span else None,
            "blocked_s": sum(one[1] for one in steps),
        }
    return rows


COLUMNS = (
    ("steps", "steps", ".0f"),
    ("first step at, s", "first_s", ".1f"),
    ("absent, s", "absent_s", ".1f"),
    ("utilisation while there", "utilisation", ".1%"),
    ("blocked, s", "blocked_s", ".3f"),
)


def main() -> int:
    """The command line."""
    options = _options()
    sites.on_sigterm()
    try:
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-wan-") as temporary:
            made = testbed.up(topology(options.seconds).encode())
            try:
                verification.must_agree(made)
                found = live(made, options, Path(options.keep or temporary))
            finally:
                testbed.down(made.topology.name)
    except (sites.BenchmarkError, TestbedError) as error:
        print(error, file=sys.stderr)
        return 1
    rows = summary(found, options)
    bench.write(options, "wan/day", {}, {**found, "sites": rows})
    print(f"\n{options.seconds:g} s, {task.PARAMETERS / 1e6:.1f}M parameters\n")
    print(bench.table("site", COLUMNS, rows))
    if found["loss"]:
        print(
            f"\nheld-out loss {found['loss'][0][1]:.3f} -> {found['loss'][-1][1]:.3f}, {len(found['commits'])} commits"
        )
    if options.plot:
        plots.day(options.plot, found, options.seconds)
    return 0


def _options() -> argparse.Namespace:
    parser = bench.parser(__doc__, rows="day", has_keep=True)
    parser.add_argument("--step-s", type=float, default=0.5, help="step time of the emulated accelerator")
    parser.add_argument("--seconds", type=float, default=300.0, help="length of the whole timeline")
    parser.add_argument("--snapshot-every", type=int, default=10, help="steps between two snapshots")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
