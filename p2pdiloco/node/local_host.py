"""The world as it is, for one peer: an event loop, threads, the machine's disk, sockets, a learner's process.

See ``peer/host.py`` for what each of these promises.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, get_args

import torch

from p2pdiloco.node.learner_process import LearnerProcess
from p2pdiloco.peer.host import Queue, StartLearner
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.transport.transport import Transport
from p2pdiloco.util.executor import WorkQueue
from p2pdiloco.util.files import LOCAL
from p2pdiloco.util.tasks import Tasks

T = TypeVar("T")

MOST_THREADS = 4
"""For tensors. Two are 1.74 times as fast as one on two cores; more were not measured (benchmarks/notes.md)."""


def usual_threads() -> int:
    """For tensors, of a machine like this one: half of its cores; the others are the learner's and the loop's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores // 2))


class LocalHost:
    """``async with LocalHost(...) as host``.

    links: connections to other peers.
    memory_fd: the memory that node and learner share.
    tensor_threads: threads for what touches the global state; 0: by the machine's cores.
    """

    def __init__(self, links: Transport, memory_fd: int, learner_log: Path, tensor_threads: int = 0) -> None:
        self.links = links
        self._loop = asyncio.get_running_loop()
        # One torch thread: several peers on a machine, or a learner beside us, must not fight over the cores.
        begin, threads = partial(torch.set_num_threads, 1), tensor_threads or usual_threads()
        self._queues = {
            queue: WorkQueue(queue, begin, threads if queue == "tensors" else 1) for queue in get_args(Queue)
        }
        self._tasks = Tasks()
        self.disk = LOCAL
        self.start_learner: StartLearner = partial(LearnerProcess, memory_fd=memory_fd, log_path=learner_log)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what was spawned, and what runs: whoever comes next finds the files and the memory left alone."""
        await self._tasks.__aexit__(kind, error, trace)
        for queue in self._queues.values():
            queue.close()
        for queue in self._queues.values():
            await queue.ended()

    def now(self) -> float:
        """The event loop's clock, in seconds."""
        return self._loop.time()

    def call_at(self, when: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        """``action`` at time ``when``, unless it is cancelled."""
        return self._loop.call_at(when, action)

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run ``work``, which ends by itself, beside the rest."""
        return self._tasks.spawn(work, name=name)

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> asyncio.Task[None]:
        """Run ``work()`` beside the rest, until the peer ends, and again whenever it fails."""
        return self._tasks.keep(work, name=name)

    @property
    def troubles(self) -> dict[str, str]:
        """Of what is kept; others may tell theirs here, too. See ``Tasks``."""
        return self._tasks.troubles

    def work(self, queue: Queue, work: Callable[[], T], shard: ShardId | None = None) -> asyncio.Future[T]:
        """Run ``work`` on a thread of the queue, on the one that the ``shard`` has."""
        return self._queues[queue].do(work, shard)

    def draw_name(self) -> str:
        """12 characters that nobody else will draw."""
        return os.urandom(6).hex()
