"""Threads' jobs: in order, told on the loop, nothing held."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from random import Random

import pytest

from p2pdiloco.util.executor import WorkQueue


class Thing:
    """Something that can be watched."""


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a job may wait for; open at the end, so that no thread is left."""
    found = threading.Event()
    yield found
    found.set()


def test_jobs_are_done_in_order_on_one_thread_and_told_on_the_loop() -> None:
    done, told = list[int](), list[int]()

    async def story() -> None:
        queue = WorkQueue("jobs", lambda: done.append(-1))

        def job(number: int) -> str:
            done.append(number)
            return threading.current_thread().name

        def tell(number: int) -> None:
            assert threading.current_thread() is threading.main_thread()
            told.append(number)

        futures = [queue.do(lambda number=number: job(number)) for number in range(20)]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: tell(number))
        assert set(await asyncio.gather(*futures)) == {"jobs"}
        queue.close()

    asyncio.run(story())
    assert done == [-1, *range(20)]
    assert told == list(range(20))


def test_an_error_is_its_own_jobs() -> None:
    async def story() -> None:
        queue = WorkQueue("jobs", lambda: None)
        broken, whole = queue.do(lambda: 1 // 0), queue.do(lambda: 7)
        with pytest.raises(ZeroDivisionError):
            await broken
        assert await whole == 7
        queue.close()

    asyncio.run(story())


def test_what_is_cancelled_or_waits_at_the_end_is_not_begun(gate: threading.Event) -> None:
    done, began = list[str](), threading.Event()

    async def story() -> None:
        queue = WorkQueue("jobs", lambda: None)
        running = queue.do(gate.wait)
        cancelled, after = queue.do(lambda: done.append("cancelled")), queue.do(lambda: done.append("after"))
        cancelled.cancel()
        gate.set()
        await running
        await after
        gate.clear()
        running, waiting = queue.do(lambda: began.set() or gate.wait()), queue.do(lambda: done.append("waiting"))
        await asyncio.to_thread(began.wait)
        queue.close()
        assert waiting.cancelled()
        with pytest.raises(RuntimeError, match="jobs is closed"):
            queue.do(lambda: None)
        gate.set()
        assert await running

    asyncio.run(story())
    assert done == ["after"]


def test_a_job_is_not_held_once_it_has_ended() -> None:
    """Files of payloads go when nobody holds these any more, and the queue may rest for long after."""

    async def story() -> None:
        queue, thing = WorkQueue("jobs", lambda: None), Thing()
        seen = weakref.ref(thing)
        assert await queue.do(lambda thing=thing: thing) is thing
        del thing
        assert await queue.do(lambda: None) is None  # the thread has come back from the first
        assert seen() is None
        queue.close()

    asyncio.run(story())


def test_a_closed_queue_has_ended_once_what_ran_is_over(gate: threading.Event) -> None:
    done, began = list[str](), threading.Event()

    async def story() -> None:
        queue, unused = WorkQueue("jobs", lambda: None), WorkQueue("unused", lambda: None)
        queue.do(lambda: (began.set(), gate.wait(), done.append("written")))
        await asyncio.to_thread(began.wait)
        for closed in (queue, unused):
            closed.close()
        asyncio.get_running_loop().call_later(0.05, gate.set)
        for closed in (queue, unused):
            await closed.ended()
        assert done == ["written"]

    asyncio.run(story())


def test_a_job_may_end_after_its_loop(gate: threading.Event) -> None:
    began, threads = threading.Event(), list[threading.Thread]()

    def job() -> None:
        threads.append(threading.current_thread())
        began.set()
        gate.wait()

    async def story() -> None:
        queue = WorkQueue("jobs", lambda: None)
        queue.do(job)
        await asyncio.to_thread(began.wait)
        queue.close()

    asyncio.run(story())
    gate.set()
    threads[0].join()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_order_of_what_has_a_key_and_of_what_has_none_is_kept(threads: int) -> None:
    """Whatever was asked for before and has the key, or none, is over, and told; nothing of what was asked for later
    has begun."""
    random, begun, over, told = Random(threads), set[int](), set[int](), list[int]()
    keys = [None if random.random() < 0.3 else random.randrange(5) for _ in range(400)]

    def related(number: int) -> list[int]:
        mine = keys[number]
        return [i for i, key in enumerate(keys) if mine is None or key is None or key == mine]

    def busy(seconds: float) -> None:
        time.sleep(seconds)

    def job(number: int) -> None:
        assert all(i in over for i in related(number) if i < number), "one before it is not over"
        assert not any(i in begun for i in related(number) if i > number), "one after it has begun"
        begun.add(number)
        busy(random.random() * 1e-4)  # so that others may be wrong
        over.add(number)

    async def story() -> None:
        queue, futures = WorkQueue("jobs", lambda: None, threads), list[asyncio.Future[None]]()
        for number, key in enumerate(keys):
            futures.append(queue.do(lambda number=number: job(number), key))
            futures[-1].add_done_callback(lambda _, number=number: told.append(number))
            if random.random() < 0.05:
                busy(0.002)
                await asyncio.sleep(0)
        await asyncio.gather(*futures)
        queue.close()

    asyncio.run(story())
    assert len(over) == len(keys)
    place = {number: i for i, number in enumerate(told)}
    assert all(place[i] < place[number] for number in place for i in related(number) if i < number)


def test_what_has_different_keys_is_done_at_the_same_time() -> None:
    async def story() -> None:
        meeting = threading.Barrier(2)
        with contextlib.closing(WorkQueue("jobs", lambda: None, 2)) as queue:
            found = await asyncio.gather(*(queue.do(lambda: meeting.wait(10.0), key) for key in (0, 1)))
        assert sorted(found) == [0, 1]

    asyncio.run(story())


def test_work_that_is_called_off_holds_nobody_up(gate: threading.Event) -> None:
    async def story() -> None:
        with contextlib.closing(WorkQueue("jobs", lambda: None, 2)) as queue:
            running = [queue.do(gate.wait, key) for key in (0, 1)]
            called_off = queue.do(lambda: None)
            called_off.cancel()
            gate.set()
            await asyncio.gather(*running)
            rest = asyncio.gather(*(queue.do(lambda: 7, key) for key in (0, 1)))
            assert await asyncio.wait_for(rest, 10.0) == [7, 7]

    asyncio.run(story())


def test_who_closes_leaves_no_thread_behind(gate: threading.Event) -> None:
    """Also where some have come to a gate, and another is busy."""
    done = list[str]()

    async def story() -> None:
        queue = WorkQueue("closed", lambda: None, 3)
        queue.do(gate.wait, 1)
        queue.do(lambda: done.append("for all"))
        while not any(one.n_waiting == 2 for one in queue._gates):  # noqa: ASYNC110 (a thread tells nobody)
            await asyncio.sleep(0.001)
        queue.close()
        gate.set()

    asyncio.run(story())
    for thread in threading.enumerate():
        if thread.name == "closed":
            thread.join(5.0)
            assert not thread.is_alive()
    assert not done
