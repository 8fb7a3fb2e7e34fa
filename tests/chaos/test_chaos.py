"""The chaos command, start to end: real processes killed and stopped, real connections cut and spoilt, the verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p2pdiloco.demo.local_swarm import Member, Swarm, marked_processes

GONE_S = 20.0
POLL_S = 0.05


IN_GROUPS = ("--peers", "6", "--together", "3")


@pytest.mark.timeout(600)
@pytest.mark.xdist_group("chaos")
@pytest.mark.parametrize("options", [(), IN_GROUPS], ids=["together", "in groups"])
def test_a_short_chaos_keeps_every_promise(options: tuple[str, ...], tmp_path: Path) -> None:
    """As ``make chaos``: a peer is killed, stopped, cut off or spoilt every four seconds, and once all at once."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tests.chaos", "--plan", "short", *options, "--out", str(out)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = json.loads((out / "verdicts.json").read_text())
    assert summary["faults"] >= 7, "most of the schedule was done"
    assert {name: found["says"] for name, found in summary["verdicts"].items() if not found["kept"]} == {}
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_swarm_whose_runner_is_killed_is_reaped_even_when_stopped(tmp_path: Path) -> None:
    class Command(Member):  # no fork, as other tests of this process have them: it bears its mark from its first moment
        begin = staticmethod(getattr(Member, "by_command", Member.begin))

    swarm = Swarm(tmp_path)
    reaper = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.reaper", swarm.mark], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        member = Command("still", ["bootstrap", "--listen", "/ip4/127.0.0.1/tcp/0"], tmp_path / "still", swarm.mark)
        os.kill(member.process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + GONE_S
        while [process.pid for process in marked_processes(swarm.mark)] != [
            member.process.pid
        ]:  # its environment comes with exec
            assert time.monotonic() < deadline
            time.sleep(POLL_S)
        assert reaper.stdin is not None
        reaper.stdin.close()  # what the kernel does when the runner dies
        assert reaper.wait(GONE_S) == 0
        deadline = time.monotonic() + GONE_S
        while member.is_running:
            assert time.monotonic() < deadline
            time.sleep(POLL_S)
        assert member.status == -signal.SIGKILL
    finally:
        reaper.kill()
        swarm.kill_leftovers()
