"""Worker threads that run jobs in order for an event loop.

An exchange has hundreds of short jobs. The futures, locks and wake-ups of the standard library's executor would cost
about 13 microseconds of the event loop's time for each, more than many of the jobs take (benchmarks/notes.md).

Rules of this file:
1. With several threads, a job's ``key`` selects its thread, so jobs with the same key run in order. A job without a key
   is a barrier: it runs after all earlier jobs on all threads, and before any later one.
2. Results that arrive while the loop is busy are delivered together, in the order in which jobs ended on any thread.
3. A finished job is not referenced any more, because others wait for its memory.
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
    """None: this thread only waits at the gate for another thread's job."""
    work: Callable[[], Any]
    gate: threading.Barrier | None = None
    """Barrier at which all threads meet before and after the job."""


class WorkQueue:
    """Queue of jobs, created inside the running event loop.

    Each thread first calls ``begin``. The threads start with the first job.
    """

    def __init__(self, name: str, begin: Callable[[], None], threads: int = 1) -> None:
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._jobs = [SimpleQueue[_Job | None]() for _ in range(threads)]
        self._threads = [threading.Thread(target=self._run, args=(begin, jobs), name=name) for jobs in self._jobs]
        self._gates: weakref.WeakSet[threading.Barrier] = weakref.WeakSet()
        self._ended: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        """Finished jobs, with their results or exceptions."""
        self._is_told = False
        """Whether a call of ``_tell`` is scheduled."""
        self._has_begun = False
        self._is_closed = False

    def do(self, work: Callable[[], T], key: int | None = None) -> asyncio.Future[T]:
        """Run ``work`` on a thread and return a future of its result. A job cancelled before its start does not run.

        Raises:
            RuntimeError: the queue is closed.
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
        """Cancel waiting jobs. Results of running jobs are discarded."""
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
        """Wait, after ``close``, until running jobs have ended, too."""
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
            pass  # the queue was closed: nothing waits for this job
        return True

    def _do(self, future: asyncio.Future[Any], work: Callable[[], Any]) -> None:
        try:
            self._ended.append((future, work(), None))
        except BaseException as error:  # noqa: BLE001 (it is raised where the future is awaited)
            self._ended.append((future, None, error))
        if not self._is_told:
            self._is_told = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for the result
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._is_told = False  # before the loop below: a job that ends during it schedules another call
        while self._ended:
            future, result, error = self._ended.popleft()
            if future.cancelled():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def _nothing() -> None:
    """Do nothing: the job of a thread that waits at a gate."""
