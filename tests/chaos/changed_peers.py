"""Peers that are not as ours are: with a wrong wall clock, or with code that lies (``byzantine``). Their processes
import a ``sitecustomize`` of ours at their start, from one of the folders beside this file."""

from __future__ import annotations

import os
from pathlib import Path

from p2pdiloco.demo.local_swarm import Member, Swarm

SENT_LIES = "sent-lies.txt"
"""In a peer's folder: the lies that have left for another peer."""
_CLOCK, _LIES, _SENT = "P2PDILOCO_SWARM_CLOCK_OFF_S", "P2PDILOCO_SWARM_LIES", "P2PDILOCO_SWARM_LIES_SENT"
_ROOT = Path(__file__).parents[2]


def launch(swarm: Swarm, name: str, command: list[str], *more: str, clock_off_s: float = 0.0, lies: str = "") -> Member:
    """Start a peer whose wall clock is ahead by ``clock_off_s``, or which tells ``lies``, joined by "+"; not both."""
    environment: dict[str, str] = {}
    if lies:
        sent = swarm.out / f"peer-{name}" / SENT_LIES
        environment = _starting_with("changed_code") | {_LIES: lies, _SENT: str(sent)}
    elif clock_off_s:
        environment = _starting_with("wrong_clock") | {_CLOCK: str(clock_off_s)}
    return swarm.launch(name, command, *more, environment=environment, clock_off_s=clock_off_s)


def _starting_with(folder: str) -> dict[str, str]:
    """The import path of a process that runs what is in the folder first."""
    paths = (str(Path(__file__).parent / folder), str(_ROOT), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
