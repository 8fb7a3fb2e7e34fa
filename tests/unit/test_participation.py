"""One part of this process in a run a folder, and none when it ends."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pdiloco import participation

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from p2pdiloco import participation

def leave():
    print("left", flush=True)
    if sys.argv[1] == "interrupted":
        raise KeyboardInterrupt

participation.begin(Path("a"), leave)
participation.begin(Path("b"), leave)
participation.end(Path("b"))
if os.fork() == 0:
    sys.exit()
os.wait()
print("waited", flush=True)
if sys.argv[1] == "fails":
    raise ValueError("mine")
if sys.argv[1] == "terminated":
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"1")  # what comes before a fork is over is nobody's
        time.sleep(60)
    os.read(reading, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        print("closed", flush=True)
participation.end(Path("a"))
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
participation.begin(Path("a"), leave)
"""


def test_who_takes_part_again_leaves_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left: list[str] = []

    def leave() -> None:
        left.append("first")
        participation.end(tmp_path)

    participation.begin(tmp_path, leave)
    participation.begin(tmp_path / "other", lambda: left.append("other"))
    participation.begin(tmp_path / ".." / tmp_path.name, lambda: left.append("second"))
    assert left == ["first"]
    assert "takes part with" in caplog.text
    participation.end(tmp_path)
    caplog.clear()
    participation.begin(tmp_path, lambda: left.append("third"))
    assert left == ["first"]
    for place in (tmp_path, tmp_path / "other"):
        participation.end(place)
        participation.end(place)
    assert not caplog.records


@pytest.mark.parametrize(("how", "status"), [("ends", 0), ("fails", 1), ("interrupted", 0), ("terminated", 143)])
def test_what_still_takes_part_at_the_end_leaves_and_a_forked_process_does_not(
    tmp_path: Path, how: str, status: int
) -> None:
    command = [sys.executable, "-c", SCRIPT, how]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    closed = "closed\n" * (how == "terminated")
    assert (ended.returncode, ended.stdout) == (status, f"waited\n{closed}left\n"), ended.stderr
    assert ended.stderr.count("leaves in order") == 1
    assert "KeyboardInterrupt" not in ended.stderr


def test_what_another_process_began_is_nobodys_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    participation.begin(tmp_path, lambda: left.append("parent's"))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    participation.begin(tmp_path, lambda: left.append("child's"))
    logging.getLogger("p2pdiloco").debug("nothing was left")
    assert left == []
    participation.end(tmp_path)
