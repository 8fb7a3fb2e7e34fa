"""A node and the learner that takes no commands: its own is killed, a user's training script is not."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from p2pdiloco.node import learner_process
from p2pdiloco.node.learner_process import LearnerProcess
from p2pdiloco.node.run_creation import read_config
from p2pdiloco.swarm.run_index import ConfigError
from p2pdiloco.util.process import ProcessHandle
from p2pdiloco.wire import learner_ipc

pytestmark = pytest.mark.heavy


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux's")
@pytest.mark.parametrize("is_script", [True, False])
def test_only_the_nodes_own_learner_is_killed_when_it_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_script: bool
) -> None:
    monkeypatch.setattr(learner_process, "COMMANDS", 3)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    async def flood() -> None:
        learner = LearnerProcess(
            [],
            memory_fd=-1,
            heard=lambda _: None,
            ended=lambda *_: None,
            log_path=tmp_path / "log",
            socket_name="nobody",
            manifest=b"run" if is_script else None,
            patience_s=1.0,
        )
        learner._process = ProcessHandle(child.pid)
        for step in range(4):
            learner.send(learner_ipc.AdoptStep(step=step))

    try:
        asyncio.run(flood())
        if is_script:
            child.communicate(b"\n", timeout=20)
            assert child.returncode == 0, "it went on"
        else:
            assert child.wait(20) == -9
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("said", [learner_ipc.encode(learner_ipc.Rested()), b"\xff\xff\xff\xff nonsense"])
def test_a_learner_whose_words_cannot_be_handled_is_ended_and_its_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """Before, the task that reads them ended in silence, and the peer waited for its learner for ever."""
    program = f"import os, sys, time; os.write(int(sys.argv[2]), {said!r}); time.sleep(60)"
    monkeypatch.setattr(learner_process, "COMMAND", (sys.executable, "-c", program))

    def heard(_: learner_ipc.FromLearner) -> None:
        raise KeyError("a defect of the node")

    async def live() -> tuple[str, int]:
        told: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        memory = os.memfd_create("vectors")
        async with LearnerProcess(
            [],
            memory_fd=memory,
            heard=heard,
            ended=lambda reason, status: told.set_result((reason, status)),
            log_path=tmp_path / "log",
            socket_name="p2pdiloco-nobody-is-here",
            patience_s=1.0,
        ):
            os.close(memory)
            return await asyncio.wait_for(told, 20.0)

    reason, status = asyncio.run(live())
    assert "its message could not be handled" in reason
    assert status == -9


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux's")
def test_the_end_of_a_learner_is_told_though_no_descriptor_is_free() -> None:
    """Before, the task that waits for it ended in silence, and the peer never had a learner again."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def wait() -> list[int]:
        process = ProcessHandle(child.pid, is_own=True)
        await asyncio.sleep(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
        try:
            process.send_signal(signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(process.wait(), process.wait()), 20.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)

    assert asyncio.run(wait()) == [-9, -9]
    assert child.stdin is not None
    child.stdin.close()


def badness(pid: int) -> int:
    """What the kernel adds when it chooses whom to kill."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("is_for_memory", [True, False])
def test_a_learner_is_the_first_that_the_kernel_kills_for_memory_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_for_memory: bool
) -> None:
    """Before, the kernel killed the node, which is larger, and nothing was told. Here the test kills."""
    monkeypatch.setattr(learner_process, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    kills = iter([7, 8] if is_for_memory else [7, 7])
    monkeypatch.setattr(learner_process, "memory_kills", lambda: next(kills))

    async def live() -> tuple[str, int]:
        told: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        memory = os.memfd_create("vectors")
        async with LearnerProcess(
            [],
            memory_fd=memory,
            heard=lambda _: None,
            ended=lambda reason, status: told.set_result((reason, status)),
            log_path=tmp_path / "log",
            socket_name="p2pdiloco-nobody-is-here",
            patience_s=1.0,
        ) as learner:
            os.close(memory)
            assert badness(learner.pid) > badness(os.getpid())
            os.kill(learner.pid, signal.SIGKILL)
            return await asyncio.wait_for(told, 20.0)

    asyncio.run(asyncio.sleep(0))
    before = psutil.Process().num_fds()
    reason, status = asyncio.run(live())
    assert status == -9
    assert ("memory ran out" in reason) is is_for_memory
    assert psutil.Process().num_fds() == before, "the link to it is closed"


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux's")
def test_a_script_that_never_comes_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    async def wait() -> None:
        async with LearnerProcess(
            [],
            memory_fd=0,
            heard=lambda _: None,
            ended=lambda *_: None,
            log_path=tmp_path / "log",
            socket_name="p2pdiloco-nobody-is-here",
            manifest=b"run",
            patience_s=0.3,
        ):
            raise AssertionError("there is no script")

    with pytest.raises(TimeoutError, match="no training script was found"):
        asyncio.run(wait())


def test_a_configuration_cannot_ask_for_a_scripts_model(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\nmodel.kind = "external"\n')
    with pytest.raises(ConfigError, match=r"p2pdiloco\.DiLoCo"):
        read_config(path)
