"""What is told, and what is not."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
from collections.abc import Iterator

import pytest

from p2pdiloco.runtime import logs


@pytest.fixture
def told() -> Iterator[io.StringIO]:
    names = (logs.ROOT, *logs.FOREIGN)
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in names}
    stream = io.StringIO()
    logs.configure(stream=stream)
    yield stream
    logging.captureWarnings(False)
    for name, (handlers, propagate) in before.items():
        logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, propagate


async def _left_behind(waits: str) -> None:
    """A task that waits for what nobody else holds, and nobody holds it."""
    task = asyncio.create_task(asyncio.Event().wait() if waits == "event" else asyncio.Queue[int]().get())
    await asyncio.sleep(0)
    del task
    gc.collect()


def test_what_a_search_of_the_directory_leaves_behind_is_not_told_but_a_task_of_ours_is(told: io.StringIO) -> None:
    asyncio.run(_left_behind("event"))
    assert told.getvalue() == ""
    asyncio.run(_left_behind("queue"))
    assert "Task was destroyed" in told.getvalue()
