"""What lasts as long as a peer: its learner, and its tasks. What fails is told in log, status, metrics and alerts, and
started again, or it ends the peer with a status and a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from swarm import START_S, advance, contributes, ended, learner_of, printed, swarm_in, until, write_config
from waiting import wait_until

from p2pdiloco.demo.local_swarm import Member
from p2pdiloco.util import status_pipe
from p2pdiloco.util.status_pipe import PageAt

FAILING_PEER_MANAGER = """
import sys
from p2pdiloco.cli.main import main
from p2pdiloco.swarm.peer_manager import PeerManager
from p2pdiloco.util import tasks
tasks.SOUND_S = 20.0
look_up, left = PeerManager._look_up, [2]
async def fail(self, now):
    if left[0]:
        left[0] -= 1
        raise KeyError("a defect")
    await look_up(self, now)
PeerManager._look_up = fail
sys.exit(main())
"""
FAILING_SUPERVISION = """
import sys
from p2pdiloco.cli.main import main
from p2pdiloco.peer.learner_supervisor import LearnerSupervisor
def fail(self, name):
    raise KeyError("a defect")
assert LearnerSupervisor.new_child
LearnerSupervisor.new_child = fail
sys.exit(main())
"""


def with_program(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that are started from now on are processes of this program."""

    def begin(
        arguments: Sequence[str], log: IO[bytes], environment: dict[str, str], status_fd: int
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", program, *arguments, status_pipe.OPTION, str(status_fd)]
        outputs = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": (status_fd,)}
        return subprocess.Popen(command, env=environment, **outputs)

    monkeypatch.setattr(Member, "begin", staticmethod(begin))


def events(member: Member, kind: str) -> list[dict[str, Any]]:
    """Of its event log."""
    folder = member.run_folder()
    told = "" if folder is None else (folder / "metrics.jsonl").read_text()
    lines = map(json.loads, told[: told.rfind("\n") + 1].splitlines())
    return [line for line in lines if line["event"] == kind]


def troubles(member: Member) -> float:
    """As its metrics tell them."""
    address = member.wait_for(PageAt, START_S).url.rstrip("/")
    with urllib.request.urlopen(f"{address}/metrics", timeout=10.0) as answer:
        told = answer.read().decode()
    return sum(float(one.split()[-1]) for one in told.splitlines() if one.startswith("p2pdiloco_troubles"))


def alerts(member: Member, *, are_over: bool) -> list[str]:
    """Of troubles, told or told to be over."""
    return [e["text"] for e in events(member, "alert") if e["kind"] == "trouble" and e["is_over"] is are_over]


def kill_learner_and_block_its_log(member: Member) -> Path:
    """The next life cannot write its log. (A folder without write permission does not stop root.)"""
    wait_until(lambda: learner_of(member), START_S, "a learner")
    learner, folder = learner_of(member), member.run_folder()
    assert learner is not None
    assert folder is not None
    path = folder / "learner.log"
    path.rename(folder / "earlier.log")
    path.mkdir()
    learner.kill()
    return path


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_learner_that_cannot_be_started_is_told_and_tried_again(tmp_path: Path) -> None:
    config = write_config(tmp_path, inner_steps=1_000_000, schedule_sync_every=8)
    with swarm_in(tmp_path) as swarm:
        ann = swarm.start_founder("A", config, swarm.start_bootstrap(), "--page", "0")
        advance(ann, 1)
        assert troubles(ann) == 0
        path = kill_learner_and_block_its_log(ann)
        until(ann, lambda: len(events(ann, "learner-not-started")) >= 2, what="two tries")
        assert "Is a directory" in events(ann, "learner-not-started")[0]["reason"]
        assert printed(ann, "the learner cannot be started; trying again")
        until(ann, lambda: alerts(ann, are_over=False), what="an alert")
        assert "the learner cannot be started: Is a directory" in alerts(ann, are_over=False)[0]
        assert troubles(ann) == 1
        assert learner_of(ann) is None
        path.rmdir()
        until(ann, lambda: len(events(ann, "learner-ready")) == 2, what="another learner")
        advance(ann, 1)
        until(ann, lambda: alerts(ann, are_over=True), what="the alert's end")
        assert troubles(ann) == 0
        ann.process.terminate()
        assert ended(ann) == 0


@pytest.mark.timeout(300)
def test_a_peer_that_ends_without_its_learner_says_so(tmp_path: Path) -> None:
    config = write_config(tmp_path, inner_steps=1_000_000, schedule_sync_every=8)
    with swarm_in(tmp_path) as swarm:
        ann = swarm.start_founder("A", config, swarm.start_bootstrap())
        advance(ann, 1)
        kill_learner_and_block_its_log(ann)
        until(ann, lambda: events(ann, "learner-not-started"), what="a try")
        ann.process.terminate()
        assert ended(ann) == 1
        assert printed(ann, "this peer had no learner at the end: the learner cannot be started: Is a directory")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_task_of_a_node_that_fails_is_told_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, inner_steps=1_000_000, schedule_sync_every=8)
    with swarm_in(tmp_path) as swarm:
        address = swarm.start_bootstrap()
        ann = swarm.start_founder("A", config, address)
        with_program(FAILING_PEER_MANAGER, monkeypatch)
        bob = swarm.join("B", address, "--page", "0")
        until(bob, lambda: alerts(bob, are_over=False), what="an alert")
        assert (
            "the task peer manager of this peer failed and is started again (KeyError('a defect'))"
            in alerts(bob, are_over=False)[0]
        )
        assert troubles(bob) == 1
        until(ann, lambda: contributes(ann, bob, 0), what="both at work")
        assert printed(bob, "task failed, starting it again")
        until(bob, lambda: alerts(bob, are_over=True), what="the alert's end")
        assert troubles(bob) == 0


@pytest.mark.timeout(300)
def test_a_learner_that_nobody_can_look_after_any_more_ends_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, inner_steps=1_000_000, schedule_sync_every=8)
    with swarm_in(tmp_path) as swarm:
        address = swarm.start_bootstrap()
        with_program(FAILING_SUPERVISION, monkeypatch)
        ann = swarm.launch("A", ["start", str(config), "--access", "open", "--bootstrap", address])
        assert ended(ann) == 1
        assert printed(ann, "p2pdiloco: internal error: KeyError('a defect'); please report it with")
