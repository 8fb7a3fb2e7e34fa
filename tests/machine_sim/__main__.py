"""``python -m tests.machine_sim``: Drive the protocol of real peers through a simulated world of faults, one world a
seed. The last line is a JSON object; exit status 1 on a violation. With --mutants: plant each known bug and name the
first seed that finds it; exit status 1 if one survives."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from p2pdiloco.cli.errors import FAILED
from p2pdiloco.cli.main import program
from tests.machine_sim.report import find_mutants, look_for_garbage_seldom, option, simulate
from tests.machine_sim.scenarios import STORIES, transcript
from tests.machine_sim.seed_world import MIXED, SCENARIOS
from tests.seeded_bugs.mutants import MUTANTS
from tests.simulation.command_line import Tally, add_seeds, seeds_of

MUTANT_SEEDS = range(1000)
"""Those of the normal test run."""
BATCH = 250
"""Seeds between two progress lines."""


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    return program("python -m tests.machine_sim", __doc__, add_arguments, run, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program's arguments."""
    add_seeds(parser)
    parser.add_argument("--scenario", choices=[MIXED, *SCENARIOS], default=MIXED, help="kinds of faults (default: all)")
    parser.add_argument("--story", choices=sorted(STORIES), help="tell one scripted situation instead of running seeds")
    parser.add_argument(
        "--mutants", action="store_true", help="plant each known bug, and name the first seed that finds it"
    )


async def run(arguments: argparse.Namespace) -> int:
    """Run and report."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_at_once)  # what the loop has for them waits for a loop that waits for the seeds
    seeds = seeds_of(arguments)
    if arguments.story:
        print(transcript(arguments.story), end="")
        return 0
    if arguments.mutants:
        return _mutants(arguments.jobs, is_json=arguments.json)
    return _seeds(seeds, arguments.scenario, arguments.jobs, is_json=arguments.json)


def _end_at_once(*_: object) -> NoReturn:
    """Nothing is written that would have to be finished. The pool's thread would tell of the workers that it misses."""
    threading.excepthook = lambda _: None
    for process in multiprocessing.active_children():
        process.kill()
    raise KeyboardInterrupt


def _seeds(seeds: range, scenario: str, jobs: int, *, is_json: bool) -> int:
    tally = Tally("python -m tests.machine_sim", seeds, BATCH, is_json=is_json)
    seconds = 0.0
    look_for_garbage_seldom()
    for batch in tally.batches():
        report = simulate(batch, scenario, jobs=jobs)
        seconds += report.seconds
        tally.count(report.summary())
        for violation in report.violations:
            tally.failed(violation.seed, violation.sentence, option(scenario))
    return tally.end(events_per_second=round(tally.total["events"] / seconds) if seconds else 0)


def _mutants(jobs: int, *, is_json: bool) -> int:
    found = find_mutants(MUTANT_SEEDS, jobs=jobs)
    if not is_json:
        for mutant in found:
            first = "SURVIVED" if mutant.seed is None else f"seed {mutant.seed:>4}"
            print(f"{mutant.mutant:<42} {first:<10} {mutant.sentence[:90]}")
    survivors = [mutant.mutant for mutant in found if mutant.seed is None]
    print(json.dumps({"mutants": len(MUTANTS), "survivors": survivors}))
    return FAILED if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
