"""A nursery for background tasks: each is named and referenced, and none outlives its owner.

Rules of this file:
1. A task that fails is logged with its traceback; it takes nothing else down.
2. Leaving the nursery cancels what still runs and waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from p2pdiloco.runtime import logs

log = logs.get("tasks")


class Tasks:
    """``async with Tasks() as tasks: tasks.spawn(work(), name="work")``."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    async def __aenter__(self) -> Self:
        self._closed = False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(set(self._running))

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run ``work`` until it ends or the nursery closes. Once it has closed, the new task is cancelled at once."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        if self._closed:
            task.cancel()
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.failure("task failed", error, task=task.get_name())
