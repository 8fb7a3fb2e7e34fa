"""A thread's jobs: in order, told on the loop, nothing held."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator

import pytest

from p2pdiloco.runtime.work_queue import WorkQueue


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
