"""A nursery for background tasks: each is named and referenced, and none outlives its owner.

Rules of this file:
1. A task that ends by itself (``spawn``: a dial, a question) and fails is logged with its traceback; it takes nothing
   else down.
2. A task that lasts as long as its owner (``keep``) and fails is logged, and started again after a pause that doubles,
   as often as it fails. ``troubles`` says so until it has run for SOUND_S: its owner shows that in status, metrics and
   alerts.
3. Leaving the nursery cancels what still runs and waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from p2pdiloco.timing import Backoff
from p2pdiloco.util import logs

log = logs.get("tasks")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a task that failed is started again."""
SOUND_S = 60.0
"""A task that has run for so long is no longer in trouble, and its next failure counts as the first."""
LONGEST_REASON = 200
"""Letters of an error, in ``troubles``."""


class Tasks:
    """``async with Tasks() as tasks: tasks.spawn(work(), name="work")``. Several may share their ``troubles``."""

    def __init__(self, troubles: dict[str, str] | None = None) -> None:
        self.troubles: dict[str, str] = {} if troubles is None else troubles
        """What failed and is started again, by the task's name: a sentence for people."""
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

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> asyncio.Task[None]:
        """Run ``work()`` until the nursery closes, and again whenever it fails. It is over if it returns."""
        return self.spawn(self._run_again(work, name), name=name)

    async def _run_again(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

        def recovered() -> None:
            backoff.reset()
            if self.troubles.pop(name, None) is not None:
                log.info("a task that had failed runs again", task=name)

        while True:
            sound = loop.call_later(SOUND_S, recovered)
            try:
                await work()
            except Exception as error:  # noqa: BLE001 (whatever it is, the task must not end in silence)
                pause_s = backoff.next_s()
                log.failure("task failed, starting it again", error, task=name, pause_s=pause_s)
                self.troubles[name] = (
                    f"the task {name} of this peer failed and is started again ({repr(error)[:LONGEST_REASON]}): "
                    "please report it with the log"
                )
            else:
                self.troubles.pop(name, None)
                return
            finally:
                sound.cancel()
            await asyncio.sleep(pause_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.failure("task failed", error, task=task.get_name())
