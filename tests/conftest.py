"""What all tests share, and in which order they come.

``pytest -n 2`` (make test) begins with the chaos and light tests beside it, then come those that take longest, by what
was recorded of an earlier run (``python -m tests.durations``), so that no long one is left for the end.
Those that share a dear fixture stay together.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.nodeid import coerce_node_id

from p2pdiloco.util import logs
from tests import leaks

DURATIONS = Path(__file__).parent / "durations.json"
"""Seconds of the slowest tests, by their ids."""
UNKNOWN_S = 30.0
"""Of tests that start processes and are not recorded."""
LEAKS = pytest.StashKey[Callable[[], None]]()
LIGHT = ("tests/unit", "tests/property", "tests/golden")
"""Tests that wait for nothing and start nothing."""
DEAR = ("base", "complete", "found", "report")
"""Fixtures that take long to make."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """What shares a dear fixture, or what only one may use (a mark ``xdist_group``), goes to one worker, as ``--dist
    loadgroup`` tells by an id's end. xdist 3.8 would set that for a mark, but sets what pytest 9.2 does not read."""
    if not hasattr(item.config, "workerinput"):
        return
    mark = item.get_closest_marker("xdist_group")
    dear = [name for name in DEAR if name in getattr(item, "fixturenames", ())]
    for name in [mark.args[0]] if mark else dear:
        item._id = coerce_node_id(f"{item.nodeid}@{name}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there are several workers: the chaos first, which wants the machine, and beside it what wants least of it;
    then the longest."""
    if not hasattr(config, "workerinput"):
        return
    seconds: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}

    def turn(item: pytest.Item) -> tuple[int, float]:
        if item.nodeid.startswith("tests/chaos"):
            return 0, 0.0
        is_light = item.nodeid.startswith(LIGHT) and item.get_closest_marker("heavy") is None
        return (1, 0.0) if is_light else (2, -seconds.get(item.nodeid.partition("@")[0], UNKNOWN_S))

    items.sort(key=turn)


@pytest.fixture(autouse=True)
def gives_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """After tests of transports and learners nothing is left open, mapped, granted or queued."""
    name = request.node.path.stem
    if not name.startswith(leaks.CHECKED):
        yield
        return
    is_integration = request.node.path.parent.name == "integration"
    with leaks.counted(is_settled=is_integration and name in leaks.SETTLED) as check:
        request.node.stash[LEAKS] = check
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Look for leaks when nothing holds the test's fixtures any more."""
    yield
    check = item.stash.get(LEAKS, None)
    if check is not None:
        getattr(item, "funcargs", {}).clear()
        check()


@pytest.fixture
def own_logging() -> Iterator[None]:
    """For tests that call ``main``: it configures logging for its process, which here is everybody's."""
    names = (logs.ROOT, *logs.FOREIGN, "hivemind")
    before = [(x.handlers, x.propagate, x.level) for x in map(logging.getLogger, names)]
    yield
    logging.captureWarnings(False)
    for name, (handlers, propagate, level) in zip(names, before, strict=True):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
