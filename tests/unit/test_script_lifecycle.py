"""One part of this process in a run a folder, and none when it ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from p2pdiloco import script_lifecycle

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from p2pdiloco import script_lifecycle

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, and some who run tests, ignore it

def leave():
    print("left", flush=True)
    if odd := {"interrupted": KeyboardInterrupt, "told again": SystemExit, "broken": ValueError}.get(sys.argv[1]):
        raise odd

script_lifecycle.begin(Path("a"), leave)
script_lifecycle.begin(Path("b"), leave)
script_lifecycle.end(Path("b"))
if os.fork() == 0:
    sys.exit()
os.wait()
print("waited", flush=True)
if sys.argv[1] == "fails":
    raise ValueError("mine")
if number := {"terminated": signal.SIGTERM, "hung up": signal.SIGHUP}.get(sys.argv[1]):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"1")  # what comes before a fork is over is nobody's
        while True:  # a signal that comes just before one long sleep would wait for its end
            time.sleep(0.05)
    os.read(reading, 1)
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    try:
        os.kill(os.getpid(), number)
        time.sleep(60)
    finally:
        print("closed", flush=True)
script_lifecycle.end(Path("a"))
assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
script_lifecycle.begin(Path("a"), leave)
"""


def test_who_takes_part_again_leaves_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left: list[str] = []

    def leave() -> None:
        left.append("first")
        script_lifecycle.end(tmp_path)

    script_lifecycle.begin(tmp_path, leave)
    script_lifecycle.begin(tmp_path / "other", lambda: left.append("other"))
    script_lifecycle.begin(tmp_path / ".." / tmp_path.name, lambda: left.append("second"))
    assert left == ["first"]
    assert "takes part with" in caplog.text
    script_lifecycle.end(tmp_path)
    caplog.clear()
    script_lifecycle.begin(tmp_path, lambda: left.append("third"))
    assert left == ["first"]
    for place in (tmp_path, tmp_path / "other"):
        script_lifecycle.end(place)
        script_lifecycle.end(place)
    assert not caplog.records


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("ends", 0),
        ("fails", 1),
        ("interrupted", 0),
        ("told again", 0),
        ("broken", 0),
        ("terminated", 143),
        ("hung up", 129),
    ],
)
def test_what_still_takes_part_at_the_end_leaves_and_a_forked_process_does_not(
    tmp_path: Path, how: str, status: int
) -> None:
    command = [sys.executable, "-c", SCRIPT, how]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    closed = "closed\n" * (how in ("terminated", "hung up"))
    assert (ended.returncode, ended.stdout) == (status, f"waited\n{closed}left\n"), ended.stderr
    assert ended.stderr.count("contributes its progress and shuts down") == 1
    assert not any(word in ended.stderr for word in ("KeyboardInterrupt", "SystemExit", "atexit"))
    assert ("could not shut down gracefully" in ended.stderr) is (how == "broken")


def test_what_another_process_began_is_nobodys_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    script_lifecycle.begin(tmp_path, lambda: left.append("parent's"))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    script_lifecycle.begin(tmp_path, lambda: left.append("child's"))
    logging.getLogger("p2pdiloco").debug("nothing was left")
    assert left == []
    script_lifecycle.end(tmp_path)


def test_what_was_not_begun_is_told_once_at_a_step_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others' hooks come after it: torch goes from one to the next."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    steps: list[int] = []
    owners = [torch.nn.Linear(1, 1) for _ in range(2)]
    for owner in owners:
        optimizer.register_step_post_hook(script_lifecycle.alone(owner))
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
    script_lifecycle.begin(tmp_path, lambda: None)
    optimizer.step()
    assert not caplog.records, "something else of this process takes part"
    script_lifecycle.end(tmp_path)
    del owner, owners[0]
    for _ in range(2):
        optimizer.step()
    assert [record.getMessage() for record in caplog.records] == [
        f"{script_lifecycle.NOT_BEGUN}. This script trains alone"
    ]
    assert (len(steps), float(parameter)) == (6, -3.0)


def test_a_rank_of_several_keeps_sigterm_and_so_does_who_has_a_handler(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        for handler, heeds, heard in (
            (signal.SIG_DFL, False, False),
            (print, True, False),
            (signal.SIG_DFL, True, True),
        ):
            signal.signal(signal.SIGTERM, handler)  # type: ignore[arg-type]
            script_lifecycle.begin(tmp_path, lambda: None, heeds_sigterm=heeds)
            assert (signal.getsignal(signal.SIGTERM) is not handler) is heard
            script_lifecycle.end(tmp_path)
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


TWICE = """
import os, signal, sys
from pathlib import Path
from p2pdiloco import script_lifecycle
from p2pdiloco.util.process import SAME_S

first, second = (getattr(signal, name) for name in sys.argv[1:3])
at = 0.0
script_lifecycle.time.monotonic = lambda: 1000.0 + at
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

def leave():
    global at
    os.kill(os.getpid(), second)
    print("left", flush=True)
    at = SAME_S
    os.kill(os.getpid(), second)
    print("not told again", flush=True)

script_lifecycle.begin(Path("a"), leave)
os.kill(os.getpid(), first)
"""


@pytest.mark.parametrize(
    ("signals", "status"),
    [("SIGINT SIGINT", -signal.SIGINT), ("SIGINT SIGTERM", -signal.SIGINT), ("SIGTERM SIGTERM", 143)],
)
def test_a_signal_that_comes_again_within_a_second_is_the_same_one(tmp_path: Path, signals: str, status: int) -> None:
    command = [sys.executable, "-c", TWICE, *signals.split()]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (status, "left\n"), ended.stderr
