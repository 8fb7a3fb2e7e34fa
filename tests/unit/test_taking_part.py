"""One part of this process in a run a folder, and none when it ends."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pdiloco import taking_part

SCRIPT = """
import os, sys
from pathlib import Path
from p2pdiloco import taking_part

def leave():
    print("left", flush=True)
    if sys.argv[1] == "interrupted":
        raise KeyboardInterrupt

taking_part.begin(Path("a"), leave)
taking_part.begin(Path("b"), leave)
taking_part.end(Path("b"))
if os.fork() == 0:
    sys.exit()
os.wait()
print("waited", flush=True)
if sys.argv[1] == "fails":
    raise ValueError("mine")
"""


def test_who_takes_part_again_leaves_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left: list[str] = []

    def leave() -> None:
        left.append("first")
        taking_part.end(tmp_path)

    taking_part.begin(tmp_path, leave)
    taking_part.begin(tmp_path / "other", lambda: left.append("other"))
    taking_part.begin(tmp_path / ".." / tmp_path.name, lambda: left.append("second"))
    assert left == ["first"]
    assert "takes part with" in caplog.text
    taking_part.end(tmp_path)
    caplog.clear()
    taking_part.begin(tmp_path, lambda: left.append("third"))
    assert left == ["first"]
    for place in (tmp_path, tmp_path / "other"):
        taking_part.end(place)
        taking_part.end(place)
    assert not caplog.records


@pytest.mark.parametrize(("how", "status"), [("ends", 0), ("fails", 1), ("interrupted", 0)])
def test_what_still_takes_part_at_the_end_leaves_and_a_forked_process_does_not(
    tmp_path: Path, how: str, status: int
) -> None:
    command = [sys.executable, "-c", SCRIPT, how]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (status, "waited\nleft\n")
    assert ended.stderr.count("leaves in order") == 1
    assert "KeyboardInterrupt" not in ended.stderr


def test_what_another_process_began_is_nobodys_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    taking_part.begin(tmp_path, lambda: left.append("parent's"))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    taking_part.begin(tmp_path, lambda: left.append("child's"))
    logging.getLogger("p2pdiloco").debug("nothing was left")
    assert left == []
    taking_part.end(tmp_path)
