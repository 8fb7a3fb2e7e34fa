"""Tells a node's numbers to programs that draw experiments (``--log-to``), each in a process of its own.

Rules of this file:
1. A process that is slow misses lines, one that ends is told of in the log and not started again: training goes on.
2. At the node's end it has a bounded time to hand over what it holds.
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
from p2pdiloco.observability.prometheus import NAMES, single
from p2pdiloco.observability.snapshot import RunSnapshot
from p2pdiloco.util import logs
from p2pdiloco.util.tasks import Tasks

log = logs.get("log-to")

COMMAND = (sys.executable, "-P", "-m", "p2pdiloco.observability.exporters")
EVERY_S = 10.0
MOST_WAITING = 256 << 10
"""Bytes that a process has not read: what comes then is left out."""
LONGEST = 4096
END_S = 10.0
COUNTERS = tuple(metric.name for metric in NAMES if metric.kind == "counter")


class MetricsExport:
    """``async with MetricsExport(targets, look)``: of pictures of ``look``, now and then, and of the last one."""

    def __init__(
        self,
        targets: Sequence[str],
        look: Callable[[], RunSnapshot],
        every_s: float = EVERY_S,
        troubles: dict[str, str] | None = None,
    ) -> None:
        """``troubles``: see ``Tasks``."""
        self._targets = targets
        self._look = look
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
                    start_new_session=True,  # a terminal's Ctrl+C is the node's alone
                )
            except OSError as error:
                log.warning("nothing is logged there", target=target, reason=error.strerror)
                continue
            self._processes.append(process)
            self._tasks.keep(partial(self._hear, target, process), name=f"log to {target}")
        if self._processes:
            self._tasks.keep(self._keep, name="tell exporters")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._tell()
            await asyncio.gather(*(self._end(process) for process in self._processes))
        finally:
            for process in self._processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            await self._tasks.__aexit__(kind, error, trace)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            self._tell()

    def _tell(self) -> None:
        data = b""
        for process in self._processes:
            assert process.stdin is not None
            pipe = process.stdin.transport
            if not pipe.is_closing() and pipe.get_write_buffer_size() < MOST_WAITING:
                data = data or msgspec.json.encode(line_of(self._look())) + b"\n"
                process.stdin.write(data)

    async def _hear(self, target: str, process: asyncio.subprocess.Process) -> None:
        """What it complains of; of a library's words the last, when it ends before us."""
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
            log.warning(f"nothing is logged to {target} any more: {why}")


def line_of(picture: RunSnapshot) -> Numbers:
    """What is told of it."""
    values = {
        name: float(value) for name, value in single(picture).items() if value is not None and math.isfinite(value)
    }
    return Numbers(
        run=picture.title.run,
        name=picture.title.name,
        peer=picture.title.me,
        at=time.time(),
        step=picture.course.step,
        values=values,
        counters=tuple(name for name in COUNTERS if name in values),
    )
