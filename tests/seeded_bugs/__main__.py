"""``python -m tests.seeded_bugs``: plant each bug, and see whether the tests that it names fail. tests/README.md tells
more.
"""

from __future__ import annotations

import argparse
import sys
import time
from random import Random

from tests.seeded_bugs import peer, protocol
from tests.seeded_bugs.inject import plant, planted, source_of
from tests.seeded_bugs.judge import Job, Verdict, import_slow, judge

BUGS = peer.BUGS + protocol.BUGS
LIMIT_S = 60.0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.seeded_bugs", description=__doc__)
    parser.add_argument("names", nargs="*", help="of bugs; default: all")
    parser.add_argument("--sample", type=int, default=0, help="so many of them; 0: all")
    parser.add_argument("--seed", type=int, help="of the sample; default: a fresh one, which is printed")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    import_slow()
    wanted = [bug for bug in BUGS if not arguments.names or bug.name in arguments.names]
    if 0 < arguments.sample < len(wanted):
        seed = int(time.time()) % 1_000_000 if arguments.seed is None else arguments.seed
        print(f"sample's seed {seed}", flush=True)
        wanted = Random(seed).sample(wanted, arguments.sample)
    for bug in wanted:
        planted(bug, source_of(bug.module))  # here, because a judge that cannot plant it ends, and an end is a kill
    jobs = [Job(bug.name, lambda bug=bug: plant(bug), bug.killed_by, LIMIT_S) for bug in wanted]  # type: ignore[misc]
    alive = _judge(jobs, arguments.jobs)
    if alive and len(alive) < len(jobs) // 20:  # alone now: what a busy machine hid, and what a test drew otherwise
        again = [job for job, _ in alive]
        print(f"{len(again)} not killed; judged again, one at a time:", flush=True)
        alive = _judge(again, 1)
    print(f"{len(jobs)} planted, {len(alive)} not killed")
    for job, verdict in alive:
        print(f"  NOT KILLED: {job.name} ({verdict.fate}, {verdict.seconds:.1f} s) {verdict.by}")
    return 1 if alive or not jobs else 0


def _judge(jobs: list[Job], processes: int) -> list[tuple[Job, Verdict]]:
    """Those that lived; each is told."""
    alive = []
    for job, verdict in judge(jobs, processes):
        if verdict.fate != "killed":
            alive.append((job, verdict))
        print(f"{job.name:<64} {verdict.fate:<9} {verdict.seconds:5.1f} s  {verdict.by}", flush=True)
    return alive


if __name__ == "__main__":
    sys.exit(main())
