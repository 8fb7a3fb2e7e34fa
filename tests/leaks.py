"""Leak checks after tests of transports and learners: file descriptors, shared memory, credits and queued bytes.

Tasks are looked at where a test's event loop is (``act`` of ``unit/troupe.py``, ``run`` of
``integration/test_transport.py``).
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any
from unittest.mock import patch

CHECKED = ("test_transport", "test_training_", "test_peer_learner", "test_node_learner_process", "test_firstborn")
"""Beginnings of the names of modules whose tests are looked at."""
SETTLED = ("test_transport", "test_transport_budget", "test_transport_lanes")
"""Modules of ``integration`` that close every connection: nothing may be queued or granted afterwards."""
DESCRIPTORS, MAPS = Path("/proc/self/fd"), Path("/proc/self/maps")
SHARED = "/memfd:"
"""How memory that processes share is called in the maps."""


@contextmanager
def counted(*, is_settled: bool) -> Iterator[Callable[[], None]]:
    """Count what is there, and yield what fails, when it is called later, if more descriptors or shared memory is.

    is_settled: it also fails if bytes are queued or granted."""
    if not DESCRIPTORS.exists():  # macOS
        yield lambda: None
        return
    _warm_up()
    before, maps = _descriptors(), _shared_maps()

    def check() -> None:
        if _descriptors() - before or _shared_maps() > maps:
            gc.collect()
        assert not (left := _descriptors() - before), f"descriptors are left open: {dict(left)}"
        assert _shared_maps() <= maps, f"shared memory is left mapped: {_shared_maps() - maps} more maps than before"
        assert not wrong, wrong
        if is_settled:
            open_bytes = [queue._open_bytes + queue.queued_bytes for queue in queues]
            assert not any(open_bytes), f"bytes are left in send queues: {open_bytes}"
            granted = [(account.peer, account.outstanding) for granter in granters for account in granter.accounts()]
            assert not granted, f"credit of connections that are gone: {granted}"
            assert not any(granter._served for granter in granters), "peers that are gone keep their turns"

    with _noted() as (queues, wrong, granters):
        yield check


@cache
def _warm_up() -> None:
    """The first event loop of a process opens what all later ones use."""
    import uvloop

    uvloop.run(asyncio.sleep(0))


def _descriptors() -> Counter[str]:
    """How many are open, by what they lead to, without devices, the standard streams, which pytest exchanges, and
    what this process needs to fork others (``property/forked.py``)."""
    found: Counter[str] = Counter()
    lasting = {0, 1, 2, forkserver._forkserver._forkserver_alive_fd, resource_tracker._resource_tracker._fd}  # type: ignore[attr-defined]
    for name in {*os.listdir(DESCRIPTORS)} - {*map(str, lasting)}:
        try:
            leads_to = os.readlink(DESCRIPTORS / name)
        except FileNotFoundError:  # that of the listing
            continue
        kind = leads_to.partition(":")[0]
        if not leads_to.startswith(("/dev/", "/proc/")):
            found[kind if kind in ("socket", "pipe", "anon_inode") else leads_to] += 1
    return found


def _shared_maps() -> int:
    return MAPS.read_text().count(SHARED)


@contextmanager
def _noted() -> Iterator[tuple[list[Any], list[str], list[Any]]]:
    """All send queues and granters that are made meanwhile, and where a queue counts other bytes than it has."""
    from p2pdiloco.net.flow_control import Granter
    from p2pdiloco.net.send_queue import SendQueue

    queues, wrong, granters = list[Any](), list[str](), list[Any]()
    clear = SendQueue.clear

    def noting(kind: type, into: list[Any]) -> Any:
        make = kind.__init__

        def noted(self: Any, *arguments: Any, **options: Any) -> None:
            make(self, *arguments, **options)
            into.append(self)

        return patch.object(kind, "__init__", noted)

    def look_and_clear(self: Any) -> None:
        """When a connection is lost, what it counts as open and queued must be there."""
        counted = self._open_bytes, self.payload_bytes
        there = sum(one.bytes_left for one in self._open), sum(one.bytes_left for one in self._streams.values())
        if counted != there:
            wrong.append(f"{counted} bytes are open and queued by its count, {there} are there")
        clear(self)

    with (
        noting(SendQueue, queues),
        noting(Granter, granters),
        patch.object(SendQueue, "clear", look_and_clear),
    ):
        yield queues, wrong, granters
