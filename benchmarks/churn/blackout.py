"""Work that is lost when all peers are killed at once and the run is resumed from their disks.

    python -m benchmarks.churn.blackout --json out/blackout.jsonl

The peers are real processes with journals. All nodes and learners get SIGKILL at the same moment; then one peer resumes
from all folders and trains again.

- A learner's progress at its death is the last step in its node's journal, plus the steps that its step time allows
  until the kill, because journals are synced once a second. This is an upper bound.
- What survives is the learner's mark in the resumed run's checkpoint, averaged over all shards, because fragments are
  merged at different times.
- The default overlap is long enough for four learners on two cores. With ``--overlap 2`` and steps of 0.1 s, many
  contributions miss their version and wait for the next one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import bench
from benchmarks.churn.processes import toml, until
from p2pdiloco.demo.local_swarm import Member, Swarm
from p2pdiloco.peer.checkpoint import best_of, load_all
from p2pdiloco.protocol.events import LearnerStarted, Stepped
from tests.machine_sim import recorder
from tests.machine_sim.journal import read_journal

SYNC_EVERY = 24
BATCH = 32
CONFIG: dict[str, Any] = {
    "name": "blackout",
    "model": {"width": 64, "depth": 2, "heads": 2, "context": 64},
    "inner": {"steps": 1_000_000, "batch": BATCH, "warmup": 5},
    "schedule": {"fragments": 4, "sync_every": SYNC_EVERY, "max_shard": 16384},
    "evaluation": {"every": 0},
}
STEP_TOKENS = BATCH * 64


def trained(member: Member, killed_at: float) -> tuple[str, float]:
    """A killed peer's learner, and the steps that it had made, by its journal. ``killed_at``: monotonic time.

    Raises:
        SystemExit: it had no learner.
    """
    learner, last, last_at = None, None, 0.0
    folder = member.run_folder()
    assert folder is not None
    for entry in read_journal(folder / "journal.bin")[1]:
        match entry.event:
            case LearnerStarted():
                learner = entry.event.learner
            case Stepped():
                last, last_at = entry.event, entry.now
            case _:
                pass
    if learner is None or last is None:
        raise SystemExit(f"{member.name} had not trained: see {folder}")
    return str(learner), last.steps + max(0.0, killed_at - last_at) / last.step_time_s


def trains(members: list[Member], tokens: int) -> bool:
    """Whether all have trained so many in this life."""
    for member in members:
        member.refresh()
    return all(m.view.trained_at >= m.began_unix and m.view.tokens >= tokens for m in members)


def once(peers: int, seconds: float, checkpoint_s: float, overlap: int, folder: Path) -> list[dict[str, float]]:
    """One blackout; what each learner lost, in steps."""
    os.environ.update(recorder.environment())
    swarm = Swarm(folder, ["--checkpoint-s", f"{checkpoint_s:g}"])
    config = folder / "run.toml"
    config.write_text(toml(CONFIG | {"schedule": CONFIG["schedule"] | {"overlap": overlap}}))
    try:
        address = swarm.start_bootstrap()
        names = [chr(ord("A") + index) for index in range(peers)]
        members = [swarm.start_founder(names[0], config, address)]
        members += [swarm.join(name, address) for name in names[1:]]
        until(lambda: trains(members, STEP_TOKENS), "all train")
        time.sleep(seconds)
        nodes = [psutil.Process(member.process.pid) for member in members]
        family = [process for node in nodes for process in (node, *node.children(recursive=True))]
        killed_at = time.monotonic()
        for process in family:
            process.kill()
        for member in members:
            member.kill()
        ends = [trained(member, killed_at) for member in members]
        folders = [folder / f"peer-{name}" for name in names]
        left = _marks(folders)
        again = swarm.launch(names[0], ["resume", *map(str, folders), "--bootstrap", address])
        until(lambda: trains([again], STEP_TOKENS), "the resumed run trains")
    finally:
        swarm.stop()
        swarm.kill_leftovers()
    return [{"trained": steps, "lost": steps - left.get(learner, 0.0)} for learner, steps in ends]


def _marks(folders: list[Path]) -> dict[str, float]:
    """Each learner's merged steps, the mean over the shards of the best state that is left."""
    shards = best_of(load_all(folders)).shards
    found: dict[str, float] = {}
    for proof in shards:
        for learner, mark in proof.state.marks:
            found[str(learner)] = found.get(str(learner), 0.0) + mark.steps / len(shards)
    return found


def main() -> int:
    """Measure, print, write; exit status 1 if a learner lost more than H steps."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--peers", type=int, default=4, help="number of peers")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; figures are medians")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of training before the kill")
    parser.add_argument("--checkpoint-s", type=float, default=60.0, help="--checkpoint-s of the peers")
    parser.add_argument("--overlap", type=int, default=6, help="schedule.overlap, in steps")
    options = parser.parse_args()
    lost = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-blackout-") as folder:
            found = once(options.peers, options.seconds + number, options.checkpoint_s, options.overlap, Path(folder))
        print(
            f"round {number}: " + ", ".join(f"{f['lost']:.1f} of {f['trained']:.0f} steps" for f in found), flush=True
        )
        lost += [f["lost"] for f in found]
    figures = {"lost_steps_median": statistics.median(lost), "lost_steps_most": max(lost), "sync_every": SYNC_EVERY}
    print(json.dumps(figures))
    bench.write(options, "churn/blackout", {}, figures)
    return int(max(lost) > SYNC_EVERY)


if __name__ == "__main__":
    sys.exit(main())
