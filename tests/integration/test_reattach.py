"""A node is killed; its learner trains on, and the node's next life takes it over. A learner hangs; its node starts
another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest
from swarm import (
    START_S,
    advance,
    contributes,
    ended,
    is_alive,
    learner_of,
    log_lines,
    report_of,
    swarm_in,
    until,
    wait_gone,
    write_config,
)
from waiting import wait_until

from p2pdiloco.demo.local_swarm import Member
from p2pdiloco.util import status_pipe
from p2pdiloco.util.process import die_with_parent

IMPATIENT = (
    "import sys; from p2pdiloco.peer import learner_supervisor; learner_supervisor.HUNG_S = 6.0; "
    "from p2pdiloco.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")
@pytest.mark.timeout(300)
def test_the_learner_of_a_killed_node_is_taken_over_by_the_next(tmp_path: Path) -> None:
    config = write_config(tmp_path, inner_steps=1_000_000, schedule_sync_every=8)
    with swarm_in(tmp_path) as swarm:
        address = swarm.start_bootstrap()
        ann = swarm.start_founder("A", config, address)
        bob = swarm.join("B", address, "--reattach-s", "60")
        until(ann, lambda: contributes(ann, bob, 0), what="contributions")
        learner = learner_of(bob)
        assert learner is not None
        bob.kill()
        advance(ann, 3)
        assert is_alive(learner)
        used = learner.cpu_times().user
        advance(ann, 3)
        assert learner.cpu_times().user > used, "it trains"

        ann.refresh()
        version = ann.view.version
        again = swarm.join("B", address)
        until(ann, lambda: contributes(ann, again, version), what="contributions of the learner that was taken over")
        assert learner_of(again) is None, "it started none of its own"
        assert is_alive(learner)
        assert any("trained on while the node was away" in line for line in log_lines(again))
        swarm.stop()
        assert [ended(member) for member in (ann, again)] == [0, 0], log_lines(again)
        assert not is_alive(learner)
        assert report_of(again)["tokens_unmerged"] == 0


def begin_impatient(
    arguments: Sequence[str], log: IO[bytes], environment: dict[str, str], status_fd: int
) -> subprocess.Popen[bytes]:
    """A node that waits for a silent learner for seconds only."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", IMPATIENT, *arguments, status_pipe.OPTION, str(status_fd)],
        pass_fds=(status_fd,),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="SIGSTOP does not keep others from starting there")
@pytest.mark.timeout(300)
def test_a_learner_that_hangs_is_ended_and_another_one_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can still run says where it was when it is ended."""
    monkeypatch.setattr(Member, "begin", staticmethod(begin_impatient))
    config = write_config(tmp_path, inner_steps=1_000_000)
    with swarm_in(tmp_path) as swarm:
        ann = swarm.start_founder("A", config, swarm.start_bootstrap())
        advance(ann, 2)
        hung = learner_of(ann)
        assert hung is not None
        hung.suspend()
        wait_until(lambda: not is_alive(hung), START_S, "the end of the learner that hangs")
        advance(ann, 2)
        second = learner_of(ann)
        assert second is not None
        assert any("the learner hangs (no step for 6 s" in line for line in log_lines(ann))
        folder = ann.run_folder()
        assert folder is not None
        assert '"event": "learner-hung"' in (folder / "metrics.jsonl").read_text()
        second.terminate()
        wait_gone([second])
        assert "most recent call first" in (folder / "learner.log").read_text()
        swarm.stop()
        assert ended(ann) == 0, log_lines(ann)
