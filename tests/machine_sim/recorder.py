"""Records what the machines of real nodes do, in the node's own process: ``install``, before a node is built.

A process whose import path begins with ``recorded`` does so at its start (Python imports the ``sitecustomize`` there).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2pdiloco.util.event_bus import EventBus

if TYPE_CHECKING:
    from p2pdiloco.node.telemetry import MachineStepped, Telemetry

VARIABLE = "P2PDILOCO_SWARM_JOURNAL"
"""If it is set, a node of a test writes a journal."""
JOURNAL = "journal.bin"
FOLDER = Path(__file__).with_name("recorded")
_ROOT = Path(__file__).parents[2]


def environment(folder: Path = FOLDER) -> dict[str, str]:
    """The environment of a process that runs the ``sitecustomize`` in ``folder``, and records."""
    return {"PYTHONPATH": import_path(folder), VARIABLE: "1"}


def import_path(folder: Path) -> str:
    """The import path of a process that runs the ``sitecustomize`` in ``folder`` first."""
    return os.pathsep.join(filter(None, (str(folder), str(_ROOT), os.environ.get("PYTHONPATH"))))


def install() -> None:
    """Record the machine of each node that is built in this process, if ``VARIABLE`` is set."""
    if VARIABLE not in os.environ:
        return
    subscribe = EventBus.subscribe

    def subscribe_and_record(bus: EventBus, kind: type, listener: Callable[[Any], None]) -> None:
        subscribe(bus, kind, listener)
        if kind.__name__ == "MachineStepped":  # the node's telemetry has been built
            subscribe(bus, kind, _recorder(listener.__self__))  # type: ignore[attr-defined]

    EventBus.subscribe = subscribe_and_record  # type: ignore[method-assign,assignment]


def _recorder(telemetry: Telemetry) -> Callable[[MachineStepped], None]:
    from tests.machine_sim.journal import Journal  # which a learner does not load

    peer = telemetry._peer
    journal = Journal(peer.options.folder / JOURNAL, peer.config)
    journal.__enter__()
    atexit.register(journal.close)

    def record(step: MachineStepped) -> None:
        event, effects, now = step
        try:
            journal.record(now, event, effects)
        except OSError:  # a journal with a gap would replay to another state, so it must end here
            journal.close()

    return record
