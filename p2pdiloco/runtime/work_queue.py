"""A thread that does what it is given, in order, for an event loop.

An executor's futures, locks and wake-ups cost more than much of what is done here (docs/lab-notes.md); an exchange has
hundreds of jobs.

Rules of this file:
1. What ends while the loop is busy is told in one go, in the order in which it ended.
2. Nothing of a job is held once it has ended: others wait for its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Job = tuple["asyncio.Future[Any]", Callable[[], Any]]


class WorkQueue:
    """Within the running event loop. ``begin`` is called on the thread first, which starts with the first job."""

    def __init__(self, name: str, begin: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        """With what each has returned, or raised."""
        self._is_told = False
        """The loop is about to look at what has ended."""
        self._thread = threading.Thread(target=self._run, args=(begin,), name=name)
        self._is_closed = False

    def do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """What ``work`` returns, or raises; cancelled, it is not begun any more.

        Raises:
            RuntimeError: after ``close``.
        """
        if self._is_closed:
            raise RuntimeError(f"the queue of {self._thread.name} is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((future, work))
        if self._thread.ident is None:
            self._thread.start()
        return future

    def close(self) -> None:
        """What waits is cancelled; what runs ends without effect."""
        self._is_closed = True
        with contextlib.suppress(Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job[0].cancel()
        self._jobs.put(None)

    def _run(self, begin: Callable[[], None]) -> None:
        begin()
        while self._has_done_one():
            if not self._is_told:
                self._is_told = True
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    self._loop.call_soon_threadsafe(self._tell)

    def _has_done_one(self) -> bool:
        job = self._jobs.get()
        if job is None:
            return False
        future, work = job
        if not future.cancelled():
            try:
                self._ended.append((future, work(), None))
            except BaseException as error:  # noqa: BLE001 (whoever waits for it hears of it)
                self._ended.append((future, None, error))
        return True

    def _tell(self) -> None:
        self._is_told = False  # what ends from now on is told again
        while self._ended:
            future, result, error = self._ended.popleft()
            if future.cancelled():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
