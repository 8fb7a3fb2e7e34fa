"""``python -m tests.chaos``: Run a swarm on this machine and do to it what a plan says: kill, stop and starve
processes, cut, slow and spoil connections, kill everyone and resume. Then judge, from what the peers wrote, whether
every promise was kept, and draw the timeline. The last line is a JSON object; exit status 1 if a promise was broken.

The plan ``liars`` (``liars.py``) runs a swarm for each attack of members that lie, and writes a JSON object for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from p2pdiloco.cli.argument_types import at_least, between, file
from p2pdiloco.cli.errors import FAILED, INTERRUPTED, REPAIR, CommandError, as_command_errors
from p2pdiloco.cli.main import program
from p2pdiloco.demo.local_swarm import SwarmError
from p2pdiloco.util.logs import printable
from tests.chaos.checks import Verdict, goodput, judge
from tests.chaos.event_log import Status
from tests.chaos.evidence import Evidence, EvidenceError, read_evidence
from tests.chaos.faults import process_limit_problem
from tests.chaos.liars import MERGES, is_liars_plan, read_liars_plan, run_plan
from tests.chaos.runner import Runner
from tests.chaos.schedule import Plan, PlanError, draw_schedule, find_plan, read_plan

LINE_S = 5.0
"""Between two progress lines where standard output is not a terminal."""
SIGNS = {"training": "#", "starting": "+", "stopped": "=", "down": "."}


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    return program("python -m tests.chaos", __doc__, add_arguments, run, argv)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the program's arguments."""
    sub.add_argument(
        "--plan",
        default="quick",
        metavar="PLAN",
        help="TOML file, or quick, half-hour, peer-hour, blackout, hostile, liars (default: quick)",
    )
    sub.add_argument("--attacks", metavar="A,B", help="plan liars: only these attacks, lies joined by +")
    sub.add_argument(
        "--merge", choices=sorted(MERGES), help="plan liars: merge rule, instead of that of a run of this size"
    )
    sub.add_argument("--peers", type=at_least(2, 26), metavar="N", help="instead of the plan's")
    sub.add_argument("--together", type=at_least(2, 4096), metavar="N", help="learners that are merged without groups")
    sub.add_argument("--liars", type=at_least(1, 12), metavar="N", help="plan liars: how many of the peers lie")
    sub.add_argument(
        "--seconds",
        type=between(1, 86400, "seconds"),
        metavar="T",
        help="in which faults come, instead of the plan's",
    )
    sub.add_argument(
        "--seed", type=at_least(0, 2**63 - 1), default=1, metavar="S", help="of the schedule (default: %(default)s)"
    )
    sub.add_argument("--out", type=Path, default=Path("out/chaos"), metavar="DIR", help="default: %(default)s")
    sub.add_argument("--json", type=file, metavar="FILE", help="write the JSON objects there, too")


async def run(arguments: argparse.Namespace) -> int:
    """Schedule, run, judge, draw."""
    with as_command_errors(PlanError):
        path = find_plan(arguments.plan)
        if is_liars_plan(path):
            if arguments.together is not None or arguments.seconds is not None:
                raise CommandError(f"--plan {arguments.plan}: it takes neither --together nor --seconds", REPAIR)
            for number in (signal.SIGINT, signal.SIGTERM):  # the peers die with this process, or the reaper kills them
                asyncio.get_running_loop().add_signal_handler(number, os._exit, INTERRUPTED)
            return await asyncio.to_thread(_liars, path, arguments)
        plan = read_plan(path, peers=arguments.peers, seconds=arguments.seconds, together=arguments.together)
        out = _fresh_folder(arguments.out.resolve())
        schedule = draw_schedule(plan, arguments.seed)
        print(f"plan {plan.name}, seed {schedule.seed}: {len(schedule.faults)} faults in {plan.seconds:.0f} s to")
        print(f"{plan.peers} peers in {len(plan.regions)} regions; {out / 'schedule.json'}", flush=True)
        if any(fault.kind == "no-process" for fault in schedule.faults) and (problem := process_limit_problem()):
            print(f"no-process is left out: {problem}", flush=True)
        runner = Runner(schedule, out, _Screen(plan).show)
        task = asyncio.create_task(runner.run(), name="chaos")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            print(f"\ninterrupted; {len(runner.remaining())} processes left")
            return INTERRUPTED
        except SwarmError as error:
            raise CommandError(str(error), FAILED) from error
        return await asyncio.to_thread(_judge, out, arguments.json)


def _liars(path: Path, arguments: argparse.Namespace) -> int:
    """Try the attacks of a plan of liars."""
    attacks = arguments.attacks.split(",") if arguments.attacks else ()
    plan = read_liars_plan(
        path,
        attacks=attacks,
        peers=arguments.peers,
        liars=arguments.liars,
        merge=arguments.merge or "",
        seed=arguments.seed,
    )
    out = _fresh_folder(arguments.out.resolve())
    (out / "schedule.json").write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
    rows = []
    try:
        for row in run_plan(plan, out, lambda line: print(line, flush=True)):
            rows.append(row)
            for problem in row.problems:
                print(f"  BROKEN  {printable(problem)}")
            print(msgspec.json.encode(row).decode(), flush=True)
            if arguments.json is not None:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in rows))
    except SwarmError as error:
        raise CommandError(str(error), FAILED) from error
    return FAILED if any(row.problems for row in rows) else 0


def _fresh_folder(out: Path) -> Path:
    """An earlier run's folder is replaced, nothing else is.

    Raises:
        CommandError: it holds something that is no chaos run.
    """
    if out.exists() and not out.is_dir():
        raise CommandError(f"--out {out} is a file: name a folder", REPAIR)
    if out.exists() and any(out.iterdir()) and not (out / "schedule.json").exists():
        raise CommandError(f"--out {out} holds something else than a chaos run: name another folder", REPAIR)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return out


def _judge(out: Path, json_path: Path | None) -> int:
    print("reading what the peers wrote ...", flush=True)
    try:
        evidence = read_evidence(out)
    except EvidenceError as error:
        raise CommandError(str(error), FAILED) from error
    verdicts = judge(evidence)
    for verdict in verdicts:
        print(f"  {'kept  ' if verdict.is_kept else 'BROKEN'}  {verdict.name:<22} {printable(verdict.sentence)}")
    _draw(evidence, verdicts, out / "timeline.png")
    summary = _summary(evidence, verdicts)
    (out / "verdicts.json").write_text(json.dumps(summary, indent=2) + "\n")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary))
    return 0 if summary["kept"] else FAILED


def _draw(evidence: Evidence, verdicts: list[Verdict], path: Path) -> None:
    try:
        from tests.chaos.timeline import draw

        draw(evidence, verdicts, path)
    except ModuleNotFoundError as error:
        print(f"no timeline: {error}; pip install 'p2pdiloco[plot]'", file=sys.stderr)
    else:
        print(f"  timeline in {path}")


def _summary(evidence: Evidence, verdicts: list[Verdict]) -> dict[str, object]:
    plan = evidence.schedule.plan
    return {
        "kept": all(verdict.is_kept for verdict in verdicts),
        "plan": plan.name,
        "seed": evidence.schedule.seed,
        "peers": plan.peers,
        "seconds": plan.seconds,
        "faults": len(evidence.faults),
        "skipped": evidence.skipped,
        "lives": sum(len(peer.lives) for peer in evidence.peers),
        "versions": max((commit.version for peer in evidence.peers for commit in peer.commits), default=0),
        "goodput": {name: round(share, 4) for name, share in msgspec.structs.asdict(goodput(evidence)).items()},
        "verdicts": {verdict.name: {"kept": verdict.is_kept, "says": verdict.sentence} for verdict in verdicts},
    }


class _Screen:
    """Live progress: one line, redrawn in place on a terminal, a line now and then elsewhere."""

    def __init__(self, plan: Plan) -> None:
        self._seconds = plan.seconds
        self._is_terminal = sys.stdout.isatty()
        self._told: tuple[str, float] = ("", 0.0)
        self._last = ""

    def show(self, status: Status) -> None:
        """Time, each peer (``#`` trains, ``+`` starts, ``=`` is stopped, ``.`` is dead), version, the last fault."""
        alive = sum(state == "training" for _, state in status.peers)
        row = "".join(SIGNS[state] for _, state in status.peers)
        clock = f"{status.seconds:5.0f}/{self._seconds:.0f} s"
        line = f"[{clock}] {status.phase:<11} {row} {alive} train  version {status.version:<5} {status.last}"
        if self._is_terminal:
            print(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
            if status.phase != self._told[0]:
                print(flush=True)
        elif status.phase != self._told[0] or status.last != self._last or status.seconds - self._told[1] >= LINE_S:
            print(line, flush=True)
        else:
            return
        self._told, self._last = (status.phase, status.seconds), status.last


if __name__ == "__main__":
    sys.exit(main())
