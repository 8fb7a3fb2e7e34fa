"""The schedule of a testbed's changes, played while it runs.

Rules of this file:
1. Times count from the start of playing. What is late is done at once, in order.
2. Playing stops when told to, at the next moment; what was changed stays until ``rewind``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from benchmarks.netbed.testbed import Testbed
from benchmarks.netbed.topology import Change


def play(testbed: Testbed, stop: threading.Event, tell: Callable[[float, Change], None]) -> bool:
    """Put each change in force at its time; False if stopped before the last.

    Raises:
        TestbedError: the testbed went down.
    """
    begin = time.monotonic()
    while testbed.played < len(testbed.topology.changes):
        change = testbed.topology.changes[testbed.played]
        if stop.wait(max(0.0, begin + change.at_s - time.monotonic())):
            return False
        testbed.play_next()
        tell(time.monotonic() - begin, change)
    return True


def sentence(change: Change) -> str:
    """What it changes."""
    subject = change.site if change.between is None else " to ".join(change.between)
    values = {
        "up": change.up,
        "down": change.down,
        "round trip": None if change.round_trip_ms is None else f"{change.round_trip_ms:g} ms",
        "jitter": None if change.jitter_ms is None else f"{change.jitter_ms:g} ms",
        "loss": None if change.loss is None else f"{change.loss:.2%}",
    }
    return f"{subject}: " + ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
