"""Training scripts in tests: what their peers wrote, and how one is held until another is there."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from waiting import wait_until

from p2pdiloco.swarm.credentials import MemberFiles

START_S = 240.0
"""Everything that starts torch several times, on a busy machine."""
FOUND = ("--found", "--access", "open")
"""For a script that founds a run which others join by its name."""
QUICKLY = ("--step-s", "0.01")
"""Steps that take long enough for a turn to come between them."""
END_S = 400.0
"""A whole run."""


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What the peer of this state folder has logged, of one kind."""
    path = next(folder.glob("*/metrics.jsonl"), None)
    lines = [] if path is None else path.read_text().splitlines()
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the last one is being written
        if event["event"] == kind:
            found.append(event)
    return found


def report(folder: Path) -> dict[str, Any]:
    """What the peer has written at its end."""
    return dict(json.loads(next(folder.glob("*/report.json")).read_text()))


def until_founded(folder: Path) -> None:
    """Wait for the run that the script of this state folder founds."""
    wait_until(lambda: events(folder, "started"), START_S, "the run")


def invite_of(folder: Path) -> str:
    """The invite that the founder of this state folder keeps and shows; empty if there is none yet."""
    return next((invite for path in folder.glob("*/members") if (invite := MemberFiles(path.parent).invite())), "")


def until_ready(folder: Path, lives: int = 1) -> None:
    """Wait until the script of this state folder has met its node, in its ``lives``-th life."""
    wait_until(lambda: len(events(folder, "learner-ready")) >= lives, START_S, f"life {lives} of {folder}")


def until_trained(folder: Path) -> None:
    """Wait until the script of this state folder has made a step: what it then logs first is what a beginner's model
    is like, whatever a busy machine does to it between meeting its node and training."""
    wait_until(lambda: events(folder, "progress"), START_S, f"a step of {folder}")


def until_merged(folder: Path, of: Path) -> None:
    """Wait until the peer of ``folder`` has seen progress of the present learner of ``of`` merged."""

    def is_merged() -> bool:
        ready = events(of, "learner-ready")
        return bool(ready) and any(ready[-1]["learner"] in one["contributors"] for one in events(folder, "commit"))

    wait_until(is_merged, START_S, f"a version with progress of {of}")


def kill_node(folder: Path) -> float:
    """SIGKILL to the node of the script of this state folder; Unix time."""
    os.kill(int((folder / "node.pid").read_text()), signal.SIGKILL)
    return time.time()


def heed_interrupts() -> None:
    """For ``preexec_fn``: shells start what runs in the background with interrupts ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def held(root: int, mark: str) -> Iterator[None]:
    """Stop the processes at and below ``root`` whose command line has ``mark``, so that a run does not end before
    another script, on a busy machine, has begun."""
    parent = psutil.Process(root)
    processes = [p for p in (parent, *parent.children(recursive=True)) if any(mark in part for part in p.cmdline())]
    processes = [p for p in processes if "torch.distributed.run" not in p.cmdline() and "p2pdiloco" not in p.cmdline()]
    assert processes
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()
