"""``python -m tests.peer_sim``: Run whole peers, the real program but for clock, threads, sockets, disks and processes,
in simulated worlds of faults, one world a seed. The last line is a JSON object; exit status 1 on a violation."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence

from p2pdiloco.cli.errors import FAILED
from p2pdiloco.cli.main import program
from tests.machine_sim.arguments import add_seeds, seeds_of
from tests.peer_sim import report

WHOLE_BATCH = 25
"""Seeds between two progress lines, for each process."""


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    return program("python -m tests.peer_sim", __doc__, add_arguments, run, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program's arguments."""
    add_seeds(parser)


async def run(arguments: argparse.Namespace) -> int:
    """Run and report."""
    seeds = seeds_of(arguments)
    return await _whole(seeds, arguments.jobs, is_json=arguments.json)


async def _whole(seeds: range, jobs: int, *, is_json: bool) -> int:
    total = {"seeds": 0, "violations": 0, "commits": 0, "contributions": 0, "forks": 0, "lives": 0, "faults": 0}
    happened: Counter[str] = Counter()
    began, most = time.perf_counter(), WHOLE_BATCH * jobs
    for first in range(seeds.start, seeds.stop, most):
        async for outcome in report.outcomes(range(first, min(first + most, seeds.stop)), jobs=jobs):
            total["seeds"] += 1
            for key in ("commits", "contributions", "forks", "lives", "faults"):
                total[key] += getattr(outcome, key)
            happened.update(outcome.happened)
            until_found = sum(outcome.caught.get(owner, count) for owner, count in outcome.wrong.items())
            happened.update({"wrong-commits": until_found, "owners-found": len(outcome.caught)} if until_found else {})
            if outcome.violations:
                total["violations"] += 1
                repeat = f"python -m tests.peer_sim --seeds {outcome.seed}"
                print(f"seed {outcome.seed}: {outcome.violations[0]}\n  repeat: {repeat}", file=sys.stderr)
        if not is_json and len(seeds) > most:
            print(f"{total['seeds']:>7,} seeds  {total['violations']} violations", flush=True)
    told = {"happened": dict(sorted(happened.items())), "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps({**total, **told}))
    return FAILED if total["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
