"""Group of background tasks: each is named and referenced, and none outlives its owner.

Rules of this file:
1. A task that ends by itself (``spawn``: a dial, a request) and fails is logged with its traceback. Other tasks
   continue.
2. A task that lasts as long as its owner (``keep``) and fails is logged and started again after a pause, which doubles
   with each failure. ``troubles`` names it until it has run for SOUND_S. The owner shows that in status, metrics and
   alerts.
3. Leaving the group cancels the tasks that still run and waits for them. Those that go on are named in the log and
   cancelled again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self

from p2pdiloco.timing import Backoff
from p2pdiloco.util import logs

log = logs.get("tasks")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Shortest and longest pause before a failed task is started again."""
SOUND_S = 60.0
"""A task that has run for so long has recovered, and its next failure counts as the first."""
UNWILLING_S = 10.0
"""A task that runs for so long after it was cancelled is cancelled again."""
LONGEST_REASON = 200
"""Maximum characters of an error in ``troubles``."""


class Tasks:
    """Task group: ``async with Tasks() as tasks: tasks.spawn(work(), name="work")``. Groups may share ``troubles``."""

    def __init__(self, troubles: dict[str, str] | None = None) -> None:
        self.troubles: dict[str, str] = {} if troubles is None else troubles
        """Failed tasks that are started again, by name: a sentence for people."""
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    async def __aenter__(self) -> Self:
        self._closed = False
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._closed = True
        while self._running:
            for task in self._running:
                task.cancel()
            _, unwilling = await asyncio.wait(set(self._running), timeout=UNWILLING_S)
            if unwilling:
                names = sorted(task.get_name() for task in unwilling)
                log.warning("tasks go on though they were cancelled", tasks=", ".join(names))

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run ``work`` until it ends or the group closes. After that, the new task is cancelled at once."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        if self._closed:
            task.cancel()
        return task

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> asyncio.Task[None]:
        """Run ``work()`` until the group closes, again whenever it fails. The task ends if ``work()`` returns."""
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
