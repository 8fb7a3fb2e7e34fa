"""A short chaos run, start to end: real processes killed and stopped, real connections cut and spoilt, the verdict."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p2pdiloco.chaos.evidence import read_evidence
from p2pdiloco.chaos.happenings import Status
from p2pdiloco.chaos.judge import judge
from p2pdiloco.chaos.plan import Fault, Kind, Plan, Schedule
from p2pdiloco.chaos.runner import Runner
from p2pdiloco.chaos.swarm import Member, Swarm, marked
from p2pdiloco.chaos.timeline import draw
from p2pdiloco.protocol.manifest import (
    DataConfig,
    EvaluationConfig,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
)

GONE_S = 20.0
POLL_S = 0.05


def corpus(folder: Path) -> Path:
    folder.mkdir()
    for index in range(12):
        (folder / f"{index}.txt").write_text(" ".join(f"peer {index} holds {n % 97} tokens" for n in range(400)))
    return folder


def run_config(folder: Path) -> RunConfig:
    return RunConfig(
        name="tiny",
        model=ModelConfig(width=32, depth=1, heads=2, context=32),
        data=DataConfig(kind="files", path=str(corpus(folder / "corpus")), pattern="*.txt", held_out_share=0.3),
        inner=InnerConfig(steps=1_000_000, batch=32, warmup=5),
        schedule=ScheduleConfig(fragments=2, sync_every=8, overlap=4, max_shard=8192),
        outer=OuterConfig(momentum=0.3),
        evaluation=EvaluationConfig(every=0),
    )


def faults(*given: tuple[float, Kind, str, float]) -> tuple[Fault, ...]:
    return tuple(
        Fault(number=number, at=at, kind=kind, peers=(peer,), duration_s=duration_s)
        for number, (at, kind, peer, duration_s) in enumerate(given, start=1)
    )


@pytest.mark.timeout(300)
def test_a_swarm_keeps_its_promises_through_faults(tmp_path: Path) -> None:
    plan = Plan(name="short", peers=3, seconds=8.0, settle_s=6.0, calm_s=2.5, run=run_config(tmp_path))
    planned = faults(
        (0.5, "kill", "B", 1.0),
        (1.0, "corrupt", "A", 0.0),
        (2.0, "learner", "C", 0.0),
        (3.0, "stop", "A", 2.0),
        (5.0, "cut", "C", 3.0),
    )
    schedule = Schedule(seed=0, plan=plan, faults=planned)
    told: list[Status] = []
    runner = Runner(schedule, tmp_path / "out", told.append)
    asyncio.run(runner.run())
    assert runner.remaining() == []
    evidence = read_evidence(tmp_path / "out")
    verdicts = judge(evidence)
    assert [f"{verdict.name}: {verdict.sentence}" for verdict in verdicts if not verdict.is_kept] == []
    assert {fault.kind for fault in evidence.faults} == {fault.kind for fault in planned}
    assert {status.phase for status in told} >= {"starting", "faults", "quiet", "leaving"}
    draw(evidence, verdicts, tmp_path / "timeline.png")


def test_a_swarm_whose_runner_is_killed_is_reaped_even_when_stopped(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    reaper = subprocess.Popen(
        [sys.executable, "-m", "p2pdiloco.chaos.reaper", swarm.mark], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        member = Member("still", ["bootstrap", "--listen", "/ip4/127.0.0.1/tcp/0"], tmp_path / "still", swarm.mark)
        os.kill(member.process.pid, signal.SIGSTOP)
        assert [process.pid for process in marked(swarm.mark)] == [member.process.pid]
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
