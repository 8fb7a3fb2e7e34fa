"""``python -m tests.mutation``: plant bugs, made by a tool or by hand, and see whether the fast tests find them.

    run       sample mutants of packages, print the score and the survivors
    again     judge a run's survivors again, after tests were written
    planted   every bug of tests/seeded_bugs against the tests that must kill it
    check     what CI does: mutants that tests once killed must still die, and a fresh sample is told
    accept    take runs' JSON files into the baseline

tests/README.md tells more.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from random import Random

from tests.mutation import baseline
from tests.mutation.gate import PACKAGES, Result, ScoreCard, judge_again, judge_sample, reach_of
from tests.mutation.reach import SUITES
from tests.mutation.workers import Job, Verdict, import_slow, judge
from tests.seeded_bugs import peer, protocol
from tests.seeded_bugs.inject import plant, planted, source_of

BUGS = peer.BUGS + protocol.BUGS
PLANTED_S = 60.0
FRESH_LEAST = 3


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    sub = parser.add_subparsers(dest="command", required=True)
    run = sub.add_parser("run")
    run.add_argument("--packages", nargs="+", choices=sorted(PACKAGES), default=sorted(PACKAGES))
    run.add_argument("--matching", default="", help="only mutants whose id holds this text")
    run.add_argument("--sample", type=int, default=0, help="of each package; 0: all")
    run.add_argument("--simulator-seeds", type=int, default=60, help="after the tests (protocol only)")
    run.add_argument("--json", type=Path, help="what ``accept`` and ``again`` take")
    run.add_argument("--check", action="store_true", help="fail if a score is below the baseline's")
    again = sub.add_parser("again")
    again.add_argument("file", type=Path, help="a run's JSON, which is brought up to date")
    again.add_argument("--simulator-seeds", type=int, default=60)
    planted = sub.add_parser("planted")
    planted.add_argument("names", nargs="*", help="of bugs; default: all")
    planted.add_argument("--sample", type=int, default=0, help="so many of them; 0: all")
    check = sub.add_parser("check")
    check.add_argument("--again", type=int, default=30, help="killed mutants that are judged again")
    for one in (run, again):
        one.add_argument("--tests", nargs="+", default=SUITES, help="patterns of files (default: unit and property)")
    for one in (run, planted, check):
        one.add_argument("--seed", type=int, help="of the sample; default: a fresh one, which is printed")
    for one in (run, again, planted, check):
        one.add_argument("--jobs", type=int, default=1)
    accept = sub.add_parser("accept")
    accept.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "accept":
        baseline.accept([json.loads(path.read_text()) for path in arguments.files])
        return 0
    import_slow()
    return {"run": _run, "again": _again, "planted": _planted, "check": _check}[arguments.command](arguments)


def _seed(given: int | None) -> int:
    seed = int(time.time()) % 1_000_000 if given is None else given
    print(f"sample's seed {seed}", flush=True)
    return seed


def _run(arguments: argparse.Namespace) -> int:
    seed, cards, is_lower = _seed(arguments.seed), [], False
    known = baseline.read()
    reach = reach_of(
        arguments.packages, arguments.tests, arguments.simulator_seeds if "protocol" in arguments.packages else 0
    )
    for package in arguments.packages:
        card = judge_sample(
            package,
            reach,
            is_wanted=lambda name: arguments.matching in name,
            sample=arguments.sample,
            random=Random(f"{seed} {package}"),
            processes=arguments.jobs,
            say=_say_survivor,
        )
        cards.append(card)
        _say(card)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps({"seed": seed, "cards": [c.as_json() for c in cards]}, indent=1))
        if arguments.check and package in known.packages:
            is_lower |= _is_lower(card, known)
    return 1 if is_lower else 0


def _again(arguments: argparse.Namespace) -> int:
    found = json.loads(arguments.file.read_text())
    packages = [card["package"] for card in found["cards"]]
    reach = reach_of(packages, arguments.tests, arguments.simulator_seeds if "protocol" in packages else 0)
    for card in found["cards"]:
        wanted = card["survived"].keys()
        judged = judge_sample(
            card["package"],
            reach,
            is_wanted=lambda name, wanted=wanted: name in wanted,  # type: ignore[misc]
            sample=0,
            random=Random(0),
            processes=arguments.jobs,
            say=_say_survivor,
        ).as_json()
        card["killed"].update(judged["killed"])
        card["survived"] = judged["survived"]
        dead, alive = len(card["killed"]), len(card["survived"])
        print(f"{card['package']}: {dead} of {dead + alive} killed ({dead / max(1, dead + alive):.1%})", flush=True)
        arguments.file.write_text(json.dumps(found, indent=1))
    return 0


def _is_lower(card: ScoreCard, known: baseline.Baseline) -> bool:
    """Below the baseline by more than the chance of sampling, twice, allows (two standard errors)?"""
    before = known.packages[card.package]
    was, judged = before["score"], len(card.results)
    if not judged:
        return False
    margin = 2 * math.sqrt(max(was * (1 - was), 0.01) * (1 / judged + 1 / max(1, before["judged"])))
    new = [r.mutant.id for r in card.results if not r.is_killed and r.mutant.id not in known.accepted]
    print(f"  baseline {was:.1%}, chance {margin:.1%}; {len(new)} survivors are not in the baseline")
    return card.score < was - margin


def _say_survivor(result: Result) -> None:
    if result.verdict.fate in ("survived", "broken"):
        mutant = result.mutant
        what = result.verdict.by if result.verdict.fate == "broken" else ""
        print(f"{result.file}:{mutant.lines.start}: {mutant.place}: {mutant.change} {what}", flush=True)


def _say(card: ScoreCard) -> None:
    print(
        f"{card.package}: {card.killed} of {len(card.results)} killed ({card.score:.1%}); {card.reached} of "
        f"{card.total} mutants are on lines that fast tests reach ({card.covered:.1%})",
        flush=True,
    )


def _planted(arguments: argparse.Namespace) -> int:
    wanted = [bug for bug in BUGS if not arguments.names or bug.name in arguments.names]
    if 0 < arguments.sample < len(wanted):
        wanted = Random(_seed(arguments.seed)).sample(wanted, arguments.sample)
    for bug in wanted:
        planted(bug, source_of(bug.module))  # here, because a judge that cannot plant it ends, and an end is a kill
    jobs = [Job(bug.name, lambda bug=bug: plant(bug), bug.killed_by, PLANTED_S) for bug in wanted]  # type: ignore[misc]
    alive = _judge_planted(jobs, arguments.jobs)
    if alive and len(alive) < len(jobs) // 20:  # alone now: what a busy machine hid, and what a test drew otherwise
        again = [job for job, _ in alive]
        print(f"{len(again)} not killed; judged again, one at a time:", flush=True)
        alive = _judge_planted(again, 1)
    print(f"{len(jobs)} planted, {len(alive)} not killed")
    for job, verdict in alive:
        print(f"  NOT KILLED: {job.name} ({verdict.fate}, {verdict.seconds:.1f} s) {verdict.by}")
    return 1 if alive or not jobs else 0


def _judge_planted(jobs: list[Job], processes: int) -> list[tuple[Job, Verdict]]:
    """Those that lived; each is told."""
    alive = []
    for job, verdict in judge(jobs, processes):
        if verdict.fate != "killed":
            alive.append((job, verdict))
        print(f"{job.name:<64} {verdict.fate:<9} {verdict.seconds:5.1f} s  {verdict.by}", flush=True)
    return alive


def _check(arguments: argparse.Namespace) -> int:
    seed = _seed(arguments.seed)
    alive, judged, gone = judge_again(baseline.read().killed, arguments.again, Random(seed), arguments.jobs)
    for result in alive:
        print(f"no longer killed: {result.mutant.id}")
    print(f"{judged} of the killed judged again, {len(alive)} live; {gone} are not in the code any more")
    return 1 if alive or judged < FRESH_LEAST else 0


if __name__ == "__main__":
    sys.exit(main())
