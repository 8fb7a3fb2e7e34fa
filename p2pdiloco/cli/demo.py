"""``p2pdiloco demo``: Run a small swarm on this machine for a minute or two: create a run, train it, kill a peer,
let one join late, stop the bootstrap node, finish, and report whether all guarantees held.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import signal
import sys
from pathlib import Path

from p2pdiloco.cli.errors import FAILED, INTERRUPTED, REPAIR, CommandError
from p2pdiloco.demo.local_swarm import Swarm, SwarmError
from p2pdiloco.demo.report import judge, make_report, print_report
from p2pdiloco.demo.scenario import play
from p2pdiloco.node.run_creation import decode_config, find_run, read_config
from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.swarm.run_index import ConfigError
from p2pdiloco.util.files import make_private_folder, write_atomically

RUN = "run.toml"
WRITTEN = {RUN, "bootstrap", "report.json", "loss.png"}
"""Names in a demo's folder, beside its peers' folders."""


async def run(arguments: argparse.Namespace) -> int:
    """Play, evaluate, judge; 0 if everything that it shows came true."""
    _check_replaceable(arguments.out)
    data, config = _run_config(find_run(arguments.config), arguments.steps)
    out = _fresh_folder(arguments.out)
    write_atomically(out / RUN, data)
    loop, is_interrupted = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, is_interrupted.set)
    return await asyncio.to_thread(_show, config, out, arguments.time_limit, is_interrupted)


def _run_config(path: Path, steps: int | None) -> tuple[bytes, RunConfig]:
    """Return the text of the run's file, with so many global steps if they are given, and what it says."""
    config, data = read_config(path), path.read_bytes()
    if steps is None:
        return data, config
    data = re.sub(rb"(?m)^((?:inner\.)?steps) *= *[0-9_]+", rb"\1 = %d" % steps, data)
    try:
        config = decode_config(data, path)
    except ConfigError as error:
        raise ConfigError(f"--steps {steps} does not fit the run: {error}") from error
    if config.inner.steps != steps:
        raise ConfigError(f"{path} has no line such as steps = 400 that --steps could replace: write one into [inner]")
    return data, config


def _check_replaceable(out: Path) -> None:
    """Check that ``out`` is new, or holds nothing but an earlier demo."""
    if out.exists() and not out.is_dir():
        raise CommandError(f"--out {out} is a file: name a folder", REPAIR)
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    others = sorted(name for name in names - WRITTEN if not name.startswith("peer-"))
    if names and (others or RUN not in names):
        found = ", ".join(others[:3]) or "peers without their run's file"
        raise CommandError(f"--out {out} holds something else than a demo ({found}): name another folder", REPAIR)


def _fresh_folder(out: Path) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    make_private_folder(out)
    return out


def _show(config: RunConfig, out: Path, limit_s: float, is_interrupted: asyncio.Event) -> int:
    swarm = Swarm(out)
    try:
        story = play(swarm, config, limit_s, is_interrupted.is_set)
    except SwarmError as error:
        swarm.stop()
        raise CommandError(f"the demo failed: {error}", FAILED) from error
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
