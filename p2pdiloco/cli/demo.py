"""``p2pdiloco demo``: Show a swarm on this machine in a minute or two: found a run, train it, kill a peer, let one
join late, kill the bootstrap node, finish, and judge what came of it."""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import signal
import sys
from pathlib import Path

from p2pdiloco.chaos.swarm import Swarm, SwarmError
from p2pdiloco.cli.complaints import FAILED, INTERRUPTED, REPAIR, Complaint, complaining
from p2pdiloco.demo.report import judge, make_report, print_report
from p2pdiloco.demo.stage import play
from p2pdiloco.node.foundation import find_run, read_config
from p2pdiloco.node.kept_runs import ConfigError
from p2pdiloco.protocol.manifest import RunConfig

RUN = "run.toml"


async def run(arguments: argparse.Namespace) -> int:
    """Play, evaluate, judge; 0 if everything that it shows came true."""
    with complaining(repair=(ConfigError,), nobody=()):
        out = _fresh_folder(arguments.out)
        text = find_run(arguments.config).read_text()
        if arguments.steps:
            text = re.sub(r"(?m)^steps *= *\d+", f"steps = {arguments.steps}", text)
        (out / RUN).write_text(text)
        config = read_config(out / RUN)
        loop, is_interrupted = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, is_interrupted.set)
        return await asyncio.to_thread(_show, config, out, arguments.time_limit, is_interrupted)


def _fresh_folder(out: Path) -> Path:
    """An earlier demo's folder is replaced, nothing else is.

    Raises:
        Complaint: it holds something that is no demo.
    """
    if out.exists() and not out.is_dir():
        raise Complaint(f"--out {out} is a file: name a folder", REPAIR)
    if out.exists() and any(out.iterdir()) and not (out / RUN).exists():
        raise Complaint(f"--out {out} holds something else than a demo: name another folder", REPAIR)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return out


def _show(config: RunConfig, out: Path, limit_s: float, is_interrupted: asyncio.Event) -> int:
    swarm = Swarm(out)
    try:
        story = play(swarm, config, limit_s, is_interrupted.is_set)
    except SwarmError as error:
        swarm.stop()
        raise Complaint(f"the demo failed: {error}", FAILED) from error
    finally:
        swarm.kill_leftovers()
    if story is None:
        print(f"stopped; {len(swarm.leftovers())} processes left")
        return INTERRUPTED
    report = make_report(story, config, out)
    print_report(report, out)
    failures = judge(report)
    for failure in failures:
        print(f"not as promised: {failure}", file=sys.stderr)
    return FAILED if failures else 0
