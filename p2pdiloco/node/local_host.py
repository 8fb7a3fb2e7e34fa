"""The real host of one peer: event loop, threads, disk, sockets and the learner process.

``peer/host.py`` defines the interface; simulations implement it without a machine.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

import torch

from p2pdiloco.node.learner_process import LearnerProcess
from p2pdiloco.peer.host import Queue, StartLearner
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.transport.transport import Transport
from p2pdiloco.util.executor import WorkQueue
from p2pdiloco.util.files import LOCAL
from p2pdiloco.util.process import bound_heap
from p2pdiloco.util.tasks import Tasks

T = TypeVar("T")

# Maximum number of threads for tensors by default. On two cores, two threads are 1.74 times as fast as one; more were
# not measured (benchmarks/notes.md).
MOST_THREADS = 4


def usual_threads() -> int:
    """Return the default number of tensor threads: half of the cores. The learner and the event loop need the rest."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores // 2))


class LocalHost:
    """Host of a peer on this machine. Use as ``async with LocalHost(...) as host``.

    links: connections to other peers.
    memory_fd: memory that node and learner share.
    learner_log: file for the learner's output.
    tensor_threads: threads for work on the global state; 0: by the number of cores.
    """

    def __init__(self, links: Transport, memory_fd: int, learner_log: Path, tensor_threads: int = 0) -> None:
        self.links = links
        self._loop = asyncio.get_running_loop()
        bound_heap()
        # torch gets one thread each, so that several peers on a machine, or the learner, do not compete for the cores.
        begin, threads = partial(torch.set_num_threads, 1), tensor_threads or usual_threads()
        self._queues = {
            queue: WorkQueue(queue, begin, threads if queue == "tensors" else 1) for queue in get_args(Queue)
        }
        self._tasks = Tasks()
        # Problems of the tasks started by ``keep``. Other components may add theirs.
        self.troubles = self._tasks.troubles
        self.disk = LOCAL
        self.start_learner: StartLearner = partial(LearnerProcess, memory_fd=memory_fd, log_path=learner_log)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all tasks and running work, so that nothing touches the files and the shared memory afterwards."""
        await self._tasks.__aexit__(None, None, None)
        for queue in self._queues.values():
            queue.close()
        for queue in self._queues.values():
            await queue.ended()

    def now(self) -> float:
        """Return the event loop's time in seconds."""
        return self._loop.time()

    def call_at(self, when: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        """Call ``action`` at time ``when``, unless the returned handle is cancelled before."""
        return self._loop.call_at(when, action)

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``."""
        await asyncio.sleep(seconds)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run ``work``, which ends by itself, as a task."""
        return self._tasks.spawn(work, name=name)

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> asyncio.Task[None]:
        """Run ``work()`` as a task until the peer ends, and restart it whenever it fails."""
        return self._tasks.keep(work, name=name)

    def work(self, queue: Queue, work: Callable[[], T], shard: ShardId | None = None) -> asyncio.Future[T]:
        """Run ``work`` on a thread of ``queue``; work of one ``shard`` always runs on the same thread."""
        return self._queues[queue].do(work, shard)

    def draw(self) -> float:
        """Return a random number from 0 to 1, from the system."""
        return random.SystemRandom().random()

    def draw_name(self) -> str:
        """Return a random name of 12 hexadecimal digits."""
        return os.urandom(6).hex()
