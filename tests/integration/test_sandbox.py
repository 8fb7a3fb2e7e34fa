"""Training scripts in sandboxes like containers: a read-only root, 64 MB of /dev/shm, process 1, no capabilities, and
two with the same path on the host's network."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from scripts import END_S, START_S
from waiting import wait_until

ROOT = Path(__file__).parents[2]
# Arguments: the folder that can be written, then the command.
SANDBOX = """
set -e
mount --make-rprivate /
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -o remount,bind,ro /
mount -t tmpfs tmpfs "$0"
! touch /tmp/written 2>/dev/null
mkdir "$0/tmp"
export TMPDIR="$0/tmp" HOME="$0"
cd /
exec setpriv --bounding-set -all --inh-caps -all --no-new-privs "$@"
"""
OWN_PROCESSES = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


def boxed(place: Path, *command: str) -> list[str]:
    """The command in a sandbox."""
    return [*OWN_PROCESSES, "bash", "-c", SANDBOX, str(place), *command]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("needs util-linux")
    place = tmp_path / "place"
    place.mkdir()
    if subprocess.run(boxed(place, "true"), capture_output=True).returncode:
        pytest.skip("needs root, to mount file systems in a namespace")
    return place


def test_two_scripts_of_one_path_start_and_leave_in_order(place: Path, tmp_path: Path) -> None:
    """Each founds a run of its own; neither meets the other's node."""
    script = str(ROOT / "peers" / "own_script.py")
    command = [sys.executable, script, "--state", str(place / "state"), "--run", "boxed", "--found", "--step-s", "0.02"]
    logs = [tmp_path / f"{name}.log" for name in "ab"]
    boxes = []
    try:
        for log in logs:
            with open(log, "wb") as output:
                boxes.append(
                    subprocess.Popen(
                        boxed(place, *command, "--steps", "100000"),
                        stdout=output,
                        stderr=output,
                        env={**os.environ, "PYTHONPATH": str(ROOT)},
                    )
                )
        for box, log in zip(boxes, logs, strict=True):
            wait_until(
                lambda box=box, log=log: box.poll() is not None or "the invite is in" in log.read_text(),
                START_S,
                f"{log}",
            )  # type: ignore[misc]
        for box, log in zip(boxes, logs, strict=True):
            assert box.poll() is None, log.read_text()
            psutil.Process(box.pid).children()[0].send_signal(signal.SIGTERM)
        assert [box.wait(END_S) for box in boxes] == [128 + signal.SIGTERM] * 2, [log.read_text() for log in logs]
        assert all("Traceback" not in log.read_text() for log in logs)
    finally:
        for box in boxes:
            box.kill()  # and with it all that is in it
            box.wait()


def test_a_machine_without_a_folder_for_temporary_files_is_told_what_to_do(place: Path) -> None:
    command = [sys.executable, "-m", "p2pdiloco", "start", "stdlib-tiny", "--state", str(place / "state")]
    without = ["env", "TMPDIR=/nowhere", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(boxed(place, *without), capture_output=True, text=True, timeout=START_S, env=environment)
    assert done.returncode == 2, done.stderr
    assert "set TMPDIR to a folder that can be written" in done.stderr
    assert "Traceback" not in done.stderr
