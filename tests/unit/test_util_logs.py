"""What is told, and what is not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from p2pdiloco.peer.host import Host
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.peer.state_client import PartialDownloads
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.util import logs
from p2pdiloco.util.logs import BottomLine


class Terminal(io.StringIO):
    """One that shows what was written as a terminal does."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        rows = [""]
        for piece in re.split(r"(\r|\n|\x1b\[K)", self.getvalue()):
            if piece == "\n":
                rows.append("")
            elif piece == "\r":
                rows[-1] = rows[-1] + "\r"
            elif piece == "\x1b[K":
                rows[-1] = "" if rows[-1].endswith("\r") else rows[-1]
            else:
                rows[-1] += piece
        return rows


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def told(stream: io.StringIO) -> Iterator[io.StringIO]:
    names = (logs.ROOT, *logs.FOREIGN)
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in names}
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


@pytest.mark.parametrize("stream", [Terminal()])
def test_a_downloads_bar_and_the_log_have_lines_of_their_own(told: io.StringIO, tmp_path: Path) -> None:
    assert isinstance(told, Terminal)
    layout, clock = cast(Layout, SimpleNamespace(shards=(0,))), iter(range(100))
    host = cast(Host, SimpleNamespace(now=lambda: float(next(clock))))
    metrics = Metrics(tmp_path / "metrics.jsonl")
    bar = PartialDownloads(layout, 8, tmp_path, metrics, host, stream=told)
    bar.begin([1000])
    log = logs.get("node")
    bar.on_chunk(4000)
    log.info("joined")
    begun, joined, drawn = told.shown()
    assert "downloading the run's state" in begun
    assert joined.endswith("joined")
    assert re.fullmatch(r"\[=+ +\]  50% of .* left", drawn)
    bar.on_chunk(4000)
    bar.end()
    log.info("after")
    *_, bar_, here, after, last = told.shown()
    assert "100% of" in bar_
    assert "the run's state is here" in here
    assert (after.endswith("after"), last) == (True, "")


def test_a_terminal_that_is_gone_has_no_bar_and_ends_nobody() -> None:
    """As of a connection by ssh that was cut: whoever logs goes on."""
    reading, writing = os.pipe()
    line = BottomLine()
    with open(writing, "w", encoding="utf-8") as terminal:
        line.draw("[==  ]", terminal)
        os.close(reading)
        for _ in range(2):
            with line.lifted():
                pass
        line.draw("[=== ]", terminal)
        line.leave()
        with contextlib.suppress(BrokenPipeError):
            terminal.close()


def test_a_bar_that_came_to_no_end_is_cleared() -> None:
    terminal, line = Terminal(), BottomLine()
    line.draw("[==  ]", terminal)
    line.clear()
    with line.lifted():
        terminal.write("ended\n")
    assert terminal.shown() == ["ended", ""]
