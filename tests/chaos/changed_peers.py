"""Peers that are not as ours are: with a wrong wall clock, or with code that lies (``byzantine``). Their processes
import a ``sitecustomize`` of ours at their start, from one of the folders beside this file."""

from __future__ import annotations

from pathlib import Path

from p2pdiloco.demo.local_swarm import Member, Swarm
from tests.machine_sim import recorder

SENT_LIES = "sent-lies.txt"
"""In a peer's folder: the lies that have left for another peer."""
_CLOCK, _LIES, _SENT = "P2PDILOCO_SWARM_CLOCK_OFF_S", "P2PDILOCO_SWARM_LIES", "P2PDILOCO_SWARM_LIES_SENT"
_HERE = Path(__file__).parent


def launch(
    swarm: Swarm,
    name: str,
    command: list[str],
    *more: str,
    clock_off_s: float = 0.0,
    lies: str = "",
    is_recorded: bool = False,
) -> Member:
    """Start a peer.

    Args:
        clock_off_s: how far its wall clock is ahead.
        lies: what it tells, joined by "+"; not together with ``clock_off_s``.
        is_recorded: it writes a journal (``tests/machine_sim/recorder.py``).
    """
    environment = {recorder.VARIABLE: "1"} if is_recorded else {}
    folder = recorder.FOLDER if is_recorded else None
    if lies:
        folder = _HERE / "changed_code"
        environment |= {_LIES: lies, _SENT: str(swarm.out / f"peer-{name}" / SENT_LIES)}
    elif clock_off_s:
        folder = _HERE / "wrong_clock"
        environment |= {_CLOCK: str(clock_off_s)}
    if folder is not None:
        environment["PYTHONPATH"] = recorder.import_path(folder)
    return swarm.launch(name, command, *more, environment=environment, clock_off_s=clock_off_s)
