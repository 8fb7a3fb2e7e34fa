"""Exports a node's metrics to the targets of ``--log-to``, each by a process (``observability/exporters.py``).

Rules of this file:
1. A process that reads too slowly misses lines. One that ends is reported in the log and not restarted. Training
   continues in both cases.
2. When the node ends, each process has a bounded time to flush its data.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from p2pdiloco.observability.exporters import COMPLAINT, Numbers
from p2pdiloco.observability.prometheus import METRICS, unlabelled
from p2pdiloco.observability.snapshot import RunSnapshot
from p2pdiloco.util import logs
from p2pdiloco.util.tasks import Tasks

log = logs.get("log-to")

COMMAND = (sys.executable, "-P", "-m", "p2pdiloco.observability.exporters")
EVERY_S = 10.0
# Number of unread bytes in a process's input from which lines are skipped.
MOST_WAITING = 256 << 10
LONGEST = 4096
END_S = 10.0
COUNTERS = tuple(metric.name for metric in METRICS if metric.kind == "counter")


class MetricsExport:
    """Context manager that sends a snapshot to each target every ``every_s`` seconds, and a last one at the end."""

    def __init__(
        self,
        targets: Sequence[str],
        take_snapshot: Callable[[], RunSnapshot],
        every_s: float = EVERY_S,
        troubles: dict[str, str] | None = None,
    ) -> None:
        """
        Args:
            targets: values of ``--log-to``.
            take_snapshot: returns the current state of the node.
            troubles: receives problems of the tasks, see ``Tasks``.
        """
        self._targets = targets
        self._take_snapshot = take_snapshot
        self._every_s = every_s
        self._processes: list[asyncio.subprocess.Process] = []
        self._tasks = Tasks(troubles)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for target in self._targets:
            try:
                process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    target,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,  # Ctrl+C must reach only the node
                )
            except OSError as error:
                log.warning(
                    "metrics are not exported to this target: its process could not be started",
                    target=target,
                    reason=error.strerror,
                )
                continue
            self._processes.append(process)
            self._tasks.keep(partial(self._report_complaints, target, process), name=f"log to {target}")
        if self._processes:
            self._tasks.keep(self._send_regularly, name="send metrics")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._send()
            await asyncio.gather(*(self._finish(process) for process in self._processes))
        finally:
            for process in self._processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            await self._tasks.__aexit__(kind, error, trace)

    async def _finish(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)

    async def _send_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            self._send()

    def _send(self) -> None:
        data = b""
        for process in self._processes:
            assert process.stdin is not None
            pipe = process.stdin.transport
            if not pipe.is_closing() and pipe.get_write_buffer_size() < MOST_WAITING:
                data = data or msgspec.json.encode(numbers_of(self._take_snapshot())) + b"\n"
                process.stdin.write(data)

    async def _report_complaints(self, target: str, process: asyncio.subprocess.Process) -> None:
        """Log the warnings of a process, and the last line of its standard error if it fails."""
        assert process.stderr is not None
        rest = last = b""
        while piece := await process.stderr.read(LONGEST):
            *whole, rest = (rest + piece)[-LONGEST:].split(b"\n")
            for line in filter(None, whole):
                last = line
                if line.startswith(COMPLAINT):
                    log.warning(line.removeprefix(COMPLAINT).decode(errors="replace"))
        if await process.wait():
            why = (rest or last).decode(errors="replace").strip() or f"status {process.returncode}"
            log.warning(f"metrics are no longer exported to {target}: {why}")


def numbers_of(snapshot: RunSnapshot) -> Numbers:
    """Return the finite metrics of ``snapshot``."""
    values = {
        name: float(value) for name, value in unlabelled(snapshot).items() if value is not None and math.isfinite(value)
    }
    return Numbers(
        run=snapshot.title.run,
        name=snapshot.title.name,
        peer=snapshot.title.me,
        at=time.time(),
        step=snapshot.course.step,
        values=values,
        counters=tuple(name for name in COUNTERS if name in values),
    )
