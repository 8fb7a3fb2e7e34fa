"""Threads that do what they are given, in order, for an event loop.

An executor's futures, locks and wake-ups cost more than much of what is done here: some 13 microseconds a job of the
event loop's time, and an exchange has hundreds of jobs (benchmarks/notes.md).

Rules of this file:
1. Of several threads each has its part of the work, by ``key``: what has the same key is done in order. What has none
   is done when all threads have done what came before, and before any of them goes on.
2. What ends while the loop is busy is told in one go, in the order in which it ended, whichever thread it was.
3. Nothing of a job is held once it has ended: others wait for its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class _Job(NamedTuple):
    future: asyncio.Future[Any] | None
    """None: another thread's job has this one wait at the gate."""
    work: Callable[[], Any]
    gate: threading.Barrier | None = None
    """Where all threads meet before the job, and after it."""


class WorkQueue:
    """Within the running event loop. ``begin`` is called on each thread first; they start with the first job."""

    def __init__(self, name: str, begin: Callable[[], None], threads: int = 1) -> None:
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._jobs = [SimpleQueue[_Job | None]() for _ in range(threads)]
        self._threads = [threading.Thread(target=self._run, args=(begin, jobs), name=name) for jobs in self._jobs]
        self._gates: weakref.WeakSet[threading.Barrier] = weakref.WeakSet()
        self._ended: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        """With what each has returned, or raised."""
        self._is_told = False
        """The loop is about to look at what has ended."""
        self._has_begun = False
        self._is_closed = False

    def do(self, work: Callable[[], T], key: int | None = None) -> asyncio.Future[T]:
        """What ``work`` returns, or raises; cancelled, it is not begun any more.

        Raises:
            RuntimeError: after ``close``.
        """
        if self._is_closed:
            raise RuntimeError(f"the queue of {self._name} is closed")
        if not self._has_begun:
            self._has_begun = True
            for thread in self._threads:
                thread.start()
        future: asyncio.Future[T] = self._loop.create_future()
        if key is not None or len(self._jobs) == 1:
            self._jobs[(key or 0) % len(self._jobs)].put(_Job(future, work))
            return future
        gate = threading.Barrier(len(self._jobs))
        self._gates.add(gate)
        first, *others = self._jobs
        first.put(_Job(future, work, gate))
        for jobs in others:
            jobs.put(_Job(None, _nothing, gate))
        return future

    def close(self) -> None:
        """What waits is cancelled; nobody hears of what runs."""
        self._is_closed = True
        for jobs in self._jobs:
            with contextlib.suppress(Empty):
                while (job := jobs.get_nowait()) is not None:
                    if job.future is not None:
                        job.future.cancel()
            jobs.put(None)
        for gate in list(self._gates):
            gate.abort()

    async def ended(self) -> None:
        """After ``close``: until what runs has ended, too."""
        for thread in self._threads:
            if thread.is_alive():
                await asyncio.to_thread(thread.join)

    def _run(self, begin: Callable[[], None], jobs: SimpleQueue[_Job | None]) -> None:
        begin()
        while self._has_done_one(jobs):
            pass

    def _has_done_one(self, jobs: SimpleQueue[_Job | None]) -> bool:
        job = jobs.get()
        if job is None:
            return False
        try:
            if job.gate is not None:
                job.gate.wait()
            if job.future is not None and not job.future.cancelled():
                self._do(job.future, job.work)
            if job.gate is not None:
                job.gate.wait()
        except threading.BrokenBarrierError:
            pass  # closed: nobody waits for it
        return True

    def _do(self, future: asyncio.Future[Any], work: Callable[[], Any]) -> None:
        try:
            self._ended.append((future, work(), None))
        except BaseException as error:  # noqa: BLE001 (whoever waits for it hears of it)
            self._ended.append((future, None, error))
        if not self._is_told:
            self._is_told = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._tell)

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


def _nothing() -> None:
    """What a thread does that another's job has wait."""
