"""A peer's host as it is: threads and files."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import cast

import pytest

from p2pdiloco.node import local_host
from p2pdiloco.node.local_host import LocalHost
from p2pdiloco.transport.transport import Transport


def test_a_host_leaves_nothing_behind_that_still_writes(tmp_path: Path) -> None:
    began, gate = threading.Event(), threading.Event()

    def write() -> None:
        began.set()
        gate.wait(5.0)
        (tmp_path / "late").write_bytes(b"")

    async def story() -> None:
        async with LocalHost(cast(Transport, None), -1, tmp_path / "learner.log") as host:
            host.work("disk", write)
            await asyncio.to_thread(began.wait)
            asyncio.get_running_loop().call_later(0.05, gate.set)
        assert (tmp_path / "late").exists()

    try:
        asyncio.run(story())
    finally:
        gate.set()


def test_a_host_bounds_the_heap_before_its_threads_allocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()
    monkeypatch.setattr(local_host, "bound_heap", lambda: threads.append(threading.active_count()))

    async def story() -> None:
        async with LocalHost(cast(Transport, None), -1, tmp_path / "learner.log"):
            assert threads == [before]

    before = threading.active_count()
    asyncio.run(story())
