"""Bytes that a peer with 10 million parameters writes to its disk with the default options.

    python -m benchmarks.churn.disk [--config stdlib-10m] [--minutes 8] [--json out/disk.json]

Two peers train one run. The figures are the kernel's counters for the node and its children (write_bytes and
cancelled_write_bytes in ``/proc/PID/io``) and the growth of the logs. The first minute does not count. Checkpoints come
at intervals that the budget sets (``--write-gb``; 12 minutes for this model), so a short run has one or none: they are
left out of the extrapolation, and the budget is added instead.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks import bench
from p2pdiloco.demo.local_swarm import Member, Swarm
from p2pdiloco.peer.disk_budget import DiskBudget

WARM_S = 60.0
DAY_S = 86400.0
BUDGET = 20e9
LOGS = ("metrics*.jsonl", "learner*.log")


def written(member: Member) -> float:
    """Bytes, until now, of the processes that are there."""
    total = 0.0
    node = psutil.Process(member.process.pid)
    for process in (node, *node.children(recursive=True)):
        try:
            lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
        except OSError:
            continue
        counts = dict(line.split(": ") for line in lines)
        total += int(counts["write_bytes"]) - int(counts["cancelled_write_bytes"])
    return total


def logged(member: Member) -> float:
    """Bytes of its logs and event logs."""
    folder = member.run_folder()
    files = [] if folder is None else [path for pattern in LOGS for path in folder.glob(pattern)]
    return float(sum(path.stat().st_size for path in [*files, member.log_path]))


def checkpoints(member: Member) -> int:
    """Those that were written."""
    folder = member.run_folder()
    return 0 if folder is None else (folder / "metrics.jsonl").read_text().count('"event": "checkpoint"')


def main() -> int:
    """Measure, print, write; exit status 1 if a day's bytes are over the budget."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--config", default="stdlib-10m", help="shipped configuration")
    parser.add_argument("--minutes", type=float, default=8.0, help="duration of the measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-disk-", dir=Path.cwd()) as folder:
        swarm = Swarm(Path(folder))
        try:
            address = swarm.start_bootstrap()
            ann = swarm.start_founder("A", Path(options.config), address)
            swarm.join("B", address)
            time.sleep(WARM_S)
            began, bytes_before, logs_before = time.monotonic(), written(ann), logged(ann)
            saved_before = checkpoints(ann)
            time.sleep(max(1.0, 60.0 * options.minutes - WARM_S))
            seconds = time.monotonic() - began
            ann.refresh()
            grown, logs, saved = written(ann) - bytes_before, logged(ann) - logs_before, checkpoints(ann) - saved_before
        finally:
            swarm.stop()
            swarm.kill_leftovers()
    figures = {
        "seconds": seconds,
        "written_bytes": grown,
        "log_bytes": logs,
        "checkpoints": saved,
        "step": ann.view.step,
        "logs_gb_a_day": logs * DAY_S / seconds / 1e9,
        "written_gb_a_day": grown * DAY_S / seconds / 1e9,
    }
    every_s = DiskBudget(BUDGET, 10_000_000, 6).checkpoint_s()
    print(
        f"{seconds:.0f} s, to step {ann.view.step}: {grown / 1e6:.1f} MB written, {saved} checkpoints among it (one in "
        f"{every_s:.0f} s is allowed), logs grew by {logs / 1e6:.2f} MB, {figures['logs_gb_a_day']:.2f} GB a day; "
        f"all of it, extrapolated as it is, {figures['written_gb_a_day']:.1f} GB a day"
    )
    bench.write(options, "churn/disk", {}, figures)
    return int(figures["logs_gb_a_day"] * 1e9 + BUDGET > 1.05 * BUDGET)


if __name__ == "__main__":
    sys.exit(main())
