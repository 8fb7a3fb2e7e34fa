"""``python -m tests.peer_sim``: Run whole peers, the real program but for clock, threads, sockets, disks and processes,
in simulated worlds of faults, one world a seed. The last line is a JSON object; exit status 1 on a violation. With
--mutants: plant each known bug and name the first seed that finds it; exit status 1 if one survives."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from p2pdiloco.cli.argument_types import file
from p2pdiloco.cli.errors import FAILED, REPAIR, CommandError
from p2pdiloco.cli.main import program
from tests.machine_sim.arguments import add_seeds, seeds_of
from tests.peer_sim import report
from tests.seeded_bugs.peer import BUGS

WHOLE_BATCH = 25
"""Seeds between two progress lines, for each process."""


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    return program("python -m tests.peer_sim", __doc__, add_arguments, run, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program's arguments."""
    add_seeds(parser)
    parser.add_argument(
        "--mutants", action="store_true", help="plant each known bug, and name the first seed that finds it"
    )
    parser.add_argument("--piece", default="1/1", metavar="K/N", help="of the bugs every N-th, from the K-th")
    parser.add_argument("--record", type=file, metavar="FILE", help="write what finds each of the bugs, as JSON")


async def run(arguments: argparse.Namespace) -> int:
    """Run and report."""
    seeds = seeds_of(arguments)
    if arguments.mutants:
        return await _whole_mutants(
            seeds, arguments.jobs, pieces=arguments.piece, record=arguments.record, is_json=arguments.json
        )
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


async def _whole_mutants(seeds: range, jobs: int, *, pieces: str, record: Path | None, is_json: bool) -> int:
    """Planted bugs of what whole peers run beside the protocol, and the first of ``seeds`` that finds each. ``pieces``:
    such as 1/4."""
    part, of = parse_pieces(pieces)
    names = [bug.name for bug in BUGS if bug.module.startswith(report.DRIVEN)][part - 1 :: of]
    survivors = []
    async for found in report.hunt(names, seeds, jobs=jobs):
        if found.seed is None:
            survivors.append(found.name)
        if record is not None:
            _record(record, found)
        if not is_json:
            first = "SURVIVED" if found.seed is None else f"seed {found.seed:>4}"
            print(f"{found.name:<62} {first:<10} {found.sentence[:90]}", flush=True)
    print(json.dumps({"mutants": len(names), "survivors": sorted(survivors)}))
    return FAILED if survivors else 0


def _record(path: Path, found: report.BugFound) -> None:
    """Into the file that has all that were hunted so far."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known[found.name] = {"seed": found.seed, "tried": found.tried, "sentence": found.sentence}
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def parse_pieces(text: str) -> tuple[int, int]:
    """``K/N``.

    Raises:
        CommandError: it is not, or there is no such piece.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise CommandError(f"--piece {text}: give one of several, such as 1/4", REPAIR)
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    sys.exit(main())
