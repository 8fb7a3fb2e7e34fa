"""Result rows as JSON, one object per line, with everything that is needed to compare runs years later.

A file is only ever appended to. A row has the benchmark, its settings and figures, versions, git commit, machine,
congestion control, and the machine's load when the row was written.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("p2pdiloco", "torch", "numpy", "zstandard", "uvloop", "hivemind", "cryptography")

Row = Mapping[str, Any]


def row(benchmark: str, settings: Mapping[str, object], figures: Mapping[str, object]) -> dict[str, object]:
    """One result with all that it depends on."""
    return {
        "benchmark": benchmark,
        "settings": dict(settings),
        "figures": dict(figures),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_1min": round(os.getloadavg()[0], 2),
        "versions": versions(),
        "commit": commit(),
        "machine": machine(),
    }


def append(path: Path, rows: Iterable[Row]) -> None:
    """Write ``rows`` at the end of ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)


@lru_cache
def versions() -> dict[str, str]:
    """Of Python and of what we depend on, as far as installed."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@lru_cache
def commit() -> str:
    """The git commit of this tree; "-dirty" if files differ from it; "unknown" outside of git."""
    found = _output(["git", "rev-parse", "HEAD"])
    return found + ("-dirty" if _output(["git", "status", "--porcelain"]) else "") if found else "unknown"


@lru_cache
def machine() -> dict[str, object]:
    """What limits a benchmark here."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "kernel": platform.release(),
        "system": platform.system(),
        "congestion_control": _first_line("/proc/sys/net/ipv4/tcp_congestion_control"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
