"""``python -m tests.peer_sim``: Run whole peers, the real program but for clock, threads, sockets, disks and processes,
in simulated worlds of faults, one world a seed. The last line is a JSON object; exit status 1 on a violation."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from p2pdiloco.cli.main import program
from tests.peer_sim import report
from tests.simulation.command_line import Tally, add_seeds, seeds_of

WHOLE_BATCH = 25
"""Seeds between two progress lines, for each process."""
COUNTED = ("commits", "contributions", "forks", "lives", "faults")


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    return program("python -m tests.peer_sim", __doc__, add_arguments, run, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program's arguments."""
    add_seeds(parser)


async def run(arguments: argparse.Namespace) -> int:
    """Run and report."""
    jobs = arguments.jobs
    tally = Tally("python -m tests.peer_sim", seeds_of(arguments), WHOLE_BATCH * jobs, is_json=arguments.json)
    happened: Counter[str] = Counter()
    began = time.perf_counter()
    for seeds in tally.batches():
        async for outcome in report.outcomes(seeds, jobs=jobs):
            tally.count({"seeds": 1, "violations": bool(outcome.violations)})
            tally.count({key: getattr(outcome, key) for key in COUNTED})
            happened.update(outcome.happened)
            until_found = sum(outcome.caught.get(owner, count) for owner, count in outcome.wrong.items())
            happened.update({"wrong-commits": until_found, "owners-found": len(outcome.caught)} if until_found else {})
            if outcome.violations:
                tally.failed(outcome.seed, outcome.violations[0])
    return tally.end(happened=dict(sorted(happened.items())), seconds=round(time.perf_counter() - began, 1))


if __name__ == "__main__":
    sys.exit(main())
