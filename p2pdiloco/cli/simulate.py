"""``p2pdiloco simulate``: Drive the very protocol of real peers through a simulated world of faults, one world a seed.
The last line is a JSON object; exit status 1 on a violation. With --mutants: plant each known bug and name the first
seed that finds it; exit status 1 if one survives. With --whole: whole peers, the real program but for clock, threads,
sockets, disks and processes, slower by a hundred times."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from p2pdiloco.cli.complaints import FAILED, REPAIR, Complaint
from p2pdiloco.peersim import report as whole
from p2pdiloco.simulation.mutants import MUTANTS
from p2pdiloco.simulation.planted import BUGS
from p2pdiloco.simulation.report import find_mutants, look_for_garbage_seldom, simulate
from p2pdiloco.simulation.scenarios import transcript

MUTANT_SEEDS = range(1000)
"""Those of the normal test run."""
BATCH = 250
"""Seeds between two progress lines."""
WHOLE_BATCH = 25
"""The same, of whole peers, for each process."""


async def run(arguments: argparse.Namespace) -> int:
    """Run and report."""
    if not arguments.whole:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _end_at_once)  # what the loop has for them waits for a loop that waits for the seeds
    seeds = parse_seeds(arguments.seeds) if arguments.fresh is None else fresh_seeds(arguments.fresh)
    if arguments.story:
        print(transcript(arguments.story), end="")
        return 0
    if arguments.whole:
        if arguments.mutants:
            return await _whole_mutants(
                seeds, arguments.jobs, pieces=arguments.piece, record=arguments.record, is_json=arguments.json
            )
        return await _whole(seeds, arguments.jobs, is_json=arguments.json)
    if arguments.mutants:
        return _mutants(arguments.jobs, is_json=arguments.json)
    return _seeds(seeds, arguments.scenario, arguments.jobs, is_json=arguments.json)


def _end_at_once(*_: object) -> NoReturn:
    """Nothing is written that would have to be finished. The pool's thread would tell of the workers that it misses."""
    threading.excepthook = lambda _: None
    for process in multiprocessing.active_children():
        process.kill()
    raise KeyboardInterrupt


def parse_seeds(text: str) -> range:
    """``A-B`` or ``A``.

    Raises:
        Complaint: neither.
    """
    found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    if found is None or (found[2] is not None and int(found[2]) < int(found[1])):
        raise Complaint(f"--seeds {text}: give a range such as 0-999, or one number, of at most 18 digits", REPAIR)
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def fresh_seeds(count: int) -> range:
    """Seeds that nobody has run before; told, so that they can be run again."""
    first = int.from_bytes(os.urandom(5), "big")
    print(f"seeds {first}-{first + count - 1}", file=sys.stderr)
    return range(first, first + count)


async def _whole(seeds: range, jobs: int, *, is_json: bool) -> int:
    total = {"seeds": 0, "violations": 0, "commits": 0, "contributions": 0, "forks": 0, "lives": 0, "faults": 0}
    happened: Counter[str] = Counter()
    began, most = time.perf_counter(), WHOLE_BATCH * jobs
    for first in range(seeds.start, seeds.stop, most):
        async for outcome in whole.outcomes(range(first, min(first + most, seeds.stop)), jobs=jobs):
            total["seeds"] += 1
            for key in ("commits", "contributions", "forks", "lives", "faults"):
                total[key] += getattr(outcome, key)
            happened.update(outcome.happened)
            if outcome.violations:
                total["violations"] += 1
                repeat = f"p2pdiloco simulate --whole --seeds {outcome.seed}"
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
    names = [bug.name for bug in BUGS if bug.module.startswith(whole.DRIVEN)][part - 1 :: of]
    survivors = []
    async for found in whole.hunt(names, seeds, jobs=jobs):
        if found.seed is None:
            survivors.append(found.name)
        if record is not None:
            _record(record, found)
        if not is_json:
            first = "SURVIVED" if found.seed is None else f"seed {found.seed:>4}"
            print(f"{found.name:<62} {first:<10} {found.sentence[:90]}", flush=True)
    print(json.dumps({"mutants": len(names), "survivors": sorted(survivors)}))
    return FAILED if survivors else 0


def _record(path: Path, found: whole.BugFound) -> None:
    """Into the file that has all that were hunted so far."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known[found.name] = {"seed": found.seed, "tried": found.tried, "sentence": found.sentence}
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def parse_pieces(text: str) -> tuple[int, int]:
    """``K/N``.

    Raises:
        Complaint: it is not, or there is no such piece.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise Complaint(f"--piece {text}: give one of several, such as 1/4", REPAIR)
    return int(found[1]), int(found[2])


def _batches(seeds: range) -> Iterator[range]:
    for first in range(seeds.start, seeds.stop, BATCH):
        yield range(first, min(first + BATCH, seeds.stop))


def _seeds(seeds: range, scenario: str, jobs: int, *, is_json: bool) -> int:
    total: dict[str, float] = {"seeds": 0, "events": 0, "violations": 0, "tokens_lost": 0}
    seconds = 0.0
    look_for_garbage_seldom()
    for batch in _batches(seeds):
        report = simulate(batch, scenario, jobs=jobs)
        seconds += report.seconds
        for key, value in report.summary().items():
            if key in total:
                total[key] += value
        for violation in report.violations:
            print(f"seed {violation.seed}: {violation.sentence}\n  repeat: {violation.command}", file=sys.stderr)
        if not is_json and len(seeds) > BATCH:
            print(
                f"{total['seeds']:>7,} seeds  {total['events']:>13,} events  {total['violations']} violations",
                flush=True,
            )
    total["events_per_second"] = round(total["events"] / seconds) if seconds else 0
    print(json.dumps(total))
    return FAILED if total["violations"] or total["tokens_lost"] else 0


def _mutants(jobs: int, *, is_json: bool) -> int:
    found = find_mutants(MUTANT_SEEDS, jobs=jobs)
    if not is_json:
        for mutant in found:
            first = "SURVIVED" if mutant.seed is None else f"seed {mutant.seed:>4}"
            print(f"{mutant.mutant:<42} {first:<10} {mutant.sentence[:90]}")
    survivors = [mutant.mutant for mutant in found if mutant.seed is None]
    print(json.dumps({"mutants": len(MUTANTS), "survivors": survivors}))
    return FAILED if survivors else 0
