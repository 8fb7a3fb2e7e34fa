"""The world of one simulated process (``peer.host.Host``): it can stand still, die, and have a wrong clock.

Rules of this file:
1. Whatever the process does next begins here: a timer, the end of long work, something that came. So a process that is
   stopped holds all of it, in order, and one that is dead does nothing more.
2. Long work runs at one moment, and its result is there at a later one: between them other things happen.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from p2pdiloco.codec import native
from p2pdiloco.peer.host import Queue, StartLearner
from p2pdiloco.protocol.ids import PeerId, ShardId
from tests.peer_sim.disk import ProcessDied, SimulatedDisk
from tests.peer_sim.learner import StartSimulatedLearner, Vectors
from tests.peer_sim.network import SimulatedLinks
from tests.simulation.clock import Clock

if TYPE_CHECKING:
    from p2pdiloco.peer.peer import Peer
    from tests.peer_sim.world import World

T = TypeVar("T")

WORK_S: dict[Queue, float] = {"tensors": 0.004, "checks": 0.002, "disk": 0.03, "log": 0.004, "audits": 0.02}
"""Typical time of one job."""


def compute(*, with_kernels: bool) -> None:
    """From now on use the C library in this process, if it is there, or torch alone."""
    native.is_used = with_kernels and native.LIBRARY is not None


class Timer:
    """A call that is due later."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """It is not due any more."""
        self.action = None

    def ring(self) -> None:
        """It is due."""
        action, self.action = self.action, None
        if action is not None:
            action()


class Workers:
    """What else a process has: how long jobs take on its queues, and how many learners it began."""

    def __init__(self, tensor_threads: int) -> None:
        self._tensor_threads = tensor_threads
        self._free_at: dict[tuple[Queue, int], float] = {}
        self.slowness: dict[Queue, float] = {}
        """Factors of the typical time."""
        self.held_up_at = float("-inf")
        """When they stood still for the last time, until then."""
        self.learners = 0
        """How often a learner's process was started."""

    def span(self, queue: Queue, now: float, random: Random, shard: ShardId | None) -> tuple[float, float]:
        """When the next job is done, and when that is known. A job for no shard has all threads."""
        typical_s = WORK_S[queue] * self.slowness.get(queue, 1.0)
        threads = range(self._tensor_threads) if shard is None else (shard % self._tensor_threads,)
        free_at = max(self._free_at.get((queue, thread), 0.0) for thread in threads)
        first = max(now, free_at) + typical_s * (0.1 + random.random())
        last = first + typical_s * random.random() * random.random()
        self._free_at.update({(queue, thread): last for thread in threads})
        return first, last


class SimulatedHost:
    """One life of one process. ``vectors``: the memory that node and learner share."""

    peer: Peer

    def __init__(
        self, world: World, name: PeerId, disk: SimulatedDisk, clock: tuple[float, float], vectors: Vectors
    ) -> None:
        self.world = world
        self.name = name
        self.disk = disk
        self.links = SimulatedLinks(self)
        self.version = world.computers[name].version
        """Of the wire, which its release speaks."""
        self.life = world.checks.counted["lives"]
        self.start_learner: StartLearner = StartSimulatedLearner(self, vectors)
        self._clock = Clock(*clock)
        self._draws = Random(f"{name}/{self.life}/audits")
        """Apart from all other chance."""
        self.is_dead = False
        self.is_paused = False
        self._held: deque[Callable[[], None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[Timer, float] = {}
        """Those that are due, and when, by this process's clock."""
        self.workers = Workers(world.computers[name].setting.tensor_threads)

    def serve(self, peer: Peer, begin: Callable[[], None]) -> None:
        """Run ``begin``, and pass what comes from now on to ``peer``."""
        self.peer = peer
        self.do(begin)

    # -- what happens to it --------------------------------------------------------------------------------------------

    def do(self, action: Callable[[], Any]) -> None:
        """The process does something, now or when it goes on."""
        if self.is_dead:
            return
        if self.is_paused:
            self._held.append(action)
            return
        try:
            action()
        except ProcessDied:
            self.world.kill(self.name)

    def pause(self) -> None:
        """SIGSTOP."""
        self.is_paused = True

    def resume(self) -> None:
        """SIGCONT."""
        self.is_paused = False
        self.workers.held_up_at = max(self.workers.held_up_at, self.world.now)
        while self._held and not self.is_paused and not self.is_dead:
            self.do(self._held.popleft())

    def jump(self, seconds: float) -> None:
        """This process's clock is suddenly later: what is due by then is due now."""
        self._clock.offset_s += seconds
        for timer, when in list(self._timers.items()):
            self._set(timer, when)

    def die(self) -> None:
        """SIGKILL. What the dead process's coroutines still do has no effect."""
        self.is_dead = True
        self._held.clear()
        self._timers.clear()
        for task in list(self._tasks):
            task.cancel()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """As ``spawn``, for what the process did not ask for itself."""
        if self.is_dead:
            work.close()
        else:
            self.spawn(work, name=name)

    # -- peer.host.Host ------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """By this process's clock."""
        return self._clock.at(self.world.now)

    def call_at(self, when: float, action: Callable[[], None]) -> Timer:
        """``action`` at time ``when``."""
        timer = Timer(action)
        self._timers[timer] = when
        self._set(timer, when)
        return timer

    def _set(self, timer: Timer, when: float) -> None:
        def ring() -> None:
            self._timers.pop(timer, None)
            timer.ring()

        self.world.at(self._clock.when(when), lambda: self.do(ring))

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_at(self.now() + seconds, lambda: None if done.done() else done.set_result(None))
        await done

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run ``work`` beside the rest."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name[-6:]}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> asyncio.Task[None]:
        """As ``spawn``: here a failure is found, and not lived with."""
        return self.spawn(work(), name=name)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self.is_dead:
            return
        if isinstance(error, ProcessDied):
            self.world.kill(self.name)
        else:
            self.world.checks.failed(f"{task.get_name()} ended with {error!r}", error)

    def work(self, queue: Queue, work: Callable[[], T], shard: ShardId | None = None) -> asyncio.Future[T]:
        """Run ``work`` after all that came before on the same queue, for its shard."""
        world = self.world
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        first, last = self.workers.span(queue, world.now, world.random, shard)
        outcome: list[T | Exception] = []

        def run() -> None:
            compute(with_kernels=world.computers[self.name].setting.has_compiler)
            try:
                outcome.append(work())
            except Exception as error:  # noqa: BLE001 (an executor passes on whatever it is)
                outcome.append(error)

        def tell() -> None:
            if done.done():
                return
            if isinstance(outcome[0], Exception):
                done.set_exception(outcome[0])
            else:
                done.set_result(outcome[0])

        # A stopped process holds both, in this order.
        world.at(first, partial(self.do, run))
        world.at(last, partial(self.do, tell))
        return done

    def draw(self) -> float:
        """From 0 to 1."""
        return self._draws.random()

    def draw_name(self) -> str:
        """12 characters that nobody else will draw."""
        return f"{self.world.random.getrandbits(48):012x}"
