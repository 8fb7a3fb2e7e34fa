"""What the learner is asked to copy, and how much of it is in memory at once.

Rules of this file:
1. A fragment's copy takes memory from the question for it until all that is given of it is encoded. Of twice as many
   fragments as are due at a step there are copies at once, of more only if they are small (``KEPT`` parameters). So
   where every fragment has a turn at once, as when a learner has stopped, their copies follow each other.
2. Questions that wait keep their order. Another life of the learner has other questions.
3. Memory that a device has locked stays anyway: then nothing waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.vector_memory import KEPT
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import FragmentId


class Snapshots:
    """Of one life of a learner; ``ask`` tells it of a question."""

    def __init__(self, driver: Driver, ask: Callable[[ef.Snapshot], None]) -> None:
        self._driver = driver
        self._ask = ask
        self._at_once = 2 * -(-len(driver.state.layout.fragments) // driver.machine.view.sync_every)
        self._waiting: deque[ef.Snapshot] = deque()
        self._under_way: set[FragmentId] = set()

    def want(self, question: ef.Snapshot) -> None:
        """The machine asks."""
        self._waiting.append(question)
        self._go_on()

    def taken(self, event: ev.Snapshotted) -> None:
        """The learner has answered."""
        shifts = self._driver.state.shifts
        self._driver.job(lambda: shifts.snapshot_taken(event.fragment), lambda _: self._encode(event))

    def _encode(self, event: ev.Snapshotted) -> None:
        """What is to be encoded is asked for now, and the next job comes after all of that."""
        shifts = self._driver.state.shifts
        self._driver.feed(event)
        self._driver.job(lambda: shifts.snapshot_over(event.fragment), lambda _: self._over(event.fragment))

    def _over(self, fragment: FragmentId) -> None:
        self._under_way.discard(fragment)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._has_room(self._waiting[0].fragment):
            question = self._waiting.popleft()
            self._under_way.add(question.fragment)
            self._pass_on(question)

    def _has_room(self, fragment: FragmentId) -> bool:
        layout, shifts = self._driver.state.layout, self._driver.state.shifts
        if shifts.memory.is_pinned:
            return True
        if fragment in self._under_way:
            return False
        shards = (shard for one in (fragment, *self._under_way) for shard in layout.fragments[one])
        return len(self._under_way) < self._at_once or sum(layout.shards[s].elements for s in shards) <= KEPT

    def _pass_on(self, question: ef.Snapshot) -> None:
        shifts = self._driver.state.shifts
        self._driver.job(lambda: shifts.snapshot_asked(question.fragment), lambda _: self._ask(question))
