"""Shared parts of the churn benchmarks with real processes: the run's file, and waiting with a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

WAIT_S = 150.0


def toml(table: Mapping[str, object], prefix: str = "") -> str:
    """Dotted keys, which is all that a run's file needs."""
    lines = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        lines.append(toml(value, f"{name}.") if isinstance(value, dict) else f"{name} = {json.dumps(value)}\n")
    return "".join(lines)


def until(condition: Callable[[], bool], what: str) -> None:
    """Look every tenth of a second.

    Raises:
        SystemExit: it does not come true.
    """
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {WAIT_S:.0f} s: {what}")
        time.sleep(0.1)
