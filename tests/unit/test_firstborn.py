"""The fork of a node that becomes its first learner."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from pathlib import Path

import pytest

from p2pdiloco.node import learner_process
from tests.property import forked

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux's"),
]


def node(output: Path, use: str) -> None:
    """A node's process: its status is that of its first learner, which tells what it was given."""
    from p2pdiloco import learner

    def learn(words: list[str]) -> int:
        sizes = {word: os.fstat(int(value)).st_size for word, value in zip(words[:4:2], words[1:4:2], strict=True)}
        print(sizes, words[4:], os.getsid(0) == os.getpid(), flush=True)
        return 7

    learner.main = learn  # type: ignore[assignment]
    learner_process.bear()
    first = learner_process.take()
    assert first is not None
    assert learner_process.take() is None, "there is one"
    if use == "become":
        with open(output, "ab") as told, open(__file__, "rb") as link, open(os.__file__, "rb") as memory:
            process = first.become(["--name", "x"], link.fileno(), memory.fileno(), told.fileno())
        assert first.ours.fileno() < 0, "the node keeps no end of it"
        status = asyncio.run(process.wait())
    else:
        first.ours.close()
        status = os.waitstatus_to_exitcode(os.wait()[1])
    os._exit(status)


def test_the_firstborn_becomes_the_learner_that_it_is_told_to_be(tmp_path: Path) -> None:
    process = forked.Process(node, tmp_path / "log", "become")
    assert process.wait(30) == 7
    sizes = {"--socket-fd": Path(__file__).stat().st_size, "--memory-fd": Path(os.__file__).stat().st_size}
    assert (tmp_path / "log").read_text() == f"{sizes} ['--name', 'x'] True\n"


def test_who_is_not_needed_ends(tmp_path: Path) -> None:
    assert forked.Process(node, tmp_path / "log", "dismiss").wait(30) == 0


@pytest.mark.parametrize("what", ["fork", "socketpair"])
def test_a_machine_without_a_process_or_descriptor_has_no_firstborn(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The node starts its learner later, and nothing stays open."""

    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(*{"fork": (os, "fork"), "socketpair": (socket, "socketpair")}[what], refuse)
    learner_process.bear()
    assert learner_process.take() is None
    assert os.listdir("/proc/self/fd") == before
