"""Line protocol between ``benchmarks.wire.exchange`` and its peers: one JSON object per line over stdin and stdout.

Only the standard library, because the baselines' peers run in environments of their own.

1. A peer gets ``connect`` (all addresses), then ``prepare``, ``go`` and ``check`` for each round, and answers each; the
   end of its input ends it.
2. Standard output carries answers only: whatever libraries print goes to standard error.
3. Times are CLOCK_MONOTONIC in seconds, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from p2pdiloco.util.process import die_with_parent

Message = dict[str, Any]

_answers: TextIO | None = None


def begin() -> Message:
    """Take standard output over, die with the parent, and return the configuration from the command line."""
    global _answers
    _answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    die_with_parent(signal.SIGKILL)
    config: Message = json.loads(sys.argv[1])
    return config


def live(serve: Callable[[Message], None]) -> None:
    """A peer's whole program: do what the configuration says, and end without waiting for any thread."""
    config = begin()
    try:
        serve(config)
    except Exception as error:  # noqa: BLE001
        print(f"{config.get('role', 'peer')} {config.get('index', '')}: {error!r}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def answer(**fields: object) -> None:
    """Send one line."""
    assert _answers is not None
    _answers.write(json.dumps(fields) + "\n")
    _answers.flush()


def commands() -> Iterator[Message]:
    """What the parent says, until it closes the pipe."""
    for text in sys.stdin:
        yield json.loads(text)


def counters(interface: str) -> Message:
    """Bytes of the interface so far, and this process's present memory."""
    folder = f"/sys/class/net/{interface}/statistics"
    return {"sent": _number(f"{folder}/tx_bytes"), "received": _number(f"{folder}/rx_bytes"), "rss": memory("VmRSS")}


def forget_peak() -> None:
    """Start measuring the peak of this process's memory anew (Linux)."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def memory(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process in bytes; shared memory counts."""
    with open("/proc/self/status", encoding="ascii") as file:
        for text in file:
            if text.startswith(field + ":"):
                return int(text.split()[1]) * 1024
    return 0


def _number(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except OSError:
        return 0
