"""A peer on somebody's machine: when it rests, and when it goes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pdiloco.cli.main import main
from p2pdiloco.node import resource_guard
from p2pdiloco.node.resource_guard import BUSY_LOOKS, IDLE_LOOKS, CpuContention, ResourceGuard, Used, pause, toggle
from p2pdiloco.peer.options import MachineOptions
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.swarm.run_index import folder_of


def looks(others: CpuContention, *theirs: float) -> list[bool]:
    """What is thought after looks between which the machine had 4 s of processor time, of which others took so much
    and the peer all the rest but one second."""
    said, all_s, idle_s, ours_s = [], 0.0, 0.0, 0.0
    others.look(Used(0.0, 0.0, 0.0))
    for theirs_s in theirs:
        all_s, idle_s, ours_s = all_s + 4.0, idle_s + 1.0, ours_s + 3.0 - theirs_s
        said.append(others.look(Used(all_s, idle_s, ours_s)))
    return said


def test_others_are_busy_after_a_moment_and_not_any_more_after_a_while() -> None:
    assert looks(CpuContention(), *[0.9] * 5) == [False] * 5, "a little is nobody's business"
    assert looks(CpuContention(), *[2.0] * 3) == [False] * (BUSY_LOOKS - 1) + [True] * (4 - BUSY_LOOKS)
    after = looks(CpuContention(), *[2.0] * BUSY_LOOKS, *[0.0] * (IDLE_LOOKS + 1))[BUSY_LOOKS:]
    assert after == [True] * (IDLE_LOOKS - 1) + [False] * 2
    assert not any(looks(CpuContention(), *[2.0, 0.0] * 6)), "short work does not stop it"


class Learner:
    """What a guest asks of its supervision."""

    def __init__(self) -> None:
        self.resting = ""
        self.told: list[str] = []
        self.pid = os.getpid()

    def rest(self, reason: str) -> None:
        self.resting = reason
        self.told.append(reason)

    def look_for_hang(self, passed_s: float) -> None:
        pass


def watched(folder: Path, acts: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """A guest that has looked after each of ``acts``: what its learner was told, and why it left."""
    learner, left = Learner(), []
    monkeypatch.setattr(resource_guard, "LOOK_S", 0.02)
    one = ResourceGuard(folder, MachineOptions(**options), learner, left.append)  # type: ignore[arg-type]

    async def live() -> None:
        looking = asyncio.create_task(one.keep())
        await asyncio.sleep(0.2)
        for act in acts:
            act()
            await asyncio.sleep(0.2)
        looking.cancel()

    asyncio.run(live())
    return learner.told, left


def test_paused_by_its_user_until_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acts = [lambda: toggle(tmp_path), lambda: toggle(tmp_path), lambda: pause(tmp_path, is_paused=True)]
    told, left = watched(tmp_path, acts, monkeypatch)
    assert [bool(reason) for reason in told] == [True, False, True]
    assert "p2pdiloco pause --end" in told[0]
    told, _ = watched(tmp_path, [], monkeypatch)
    assert len(told) == 1, "also in the next life"
    assert left == []


def test_on_battery_it_rests_unless_its_user_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    battery = SimpleNamespace(percent=80, power_plugged=False)
    monkeypatch.setattr(resource_guard.psutil, "sensors_battery", lambda: battery, raising=False)
    told, _ = watched(tmp_path, [lambda: setattr(battery, "power_plugged", True)], monkeypatch)
    assert ["--on-battery" in reason for reason in told] == [True, False]
    battery.power_plugged = False
    assert watched(tmp_path, [], monkeypatch, is_battery_used=True) == ([], [])
    monkeypatch.setattr(resource_guard.psutil, "sensors_battery", lambda: None)
    assert watched(tmp_path, [], monkeypatch) == ([], []), "most machines have none"


def test_a_peer_that_takes_more_memory_than_allowed_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, [why] = watched(tmp_path, [], monkeypatch, most_memory_bytes=1e6)
    assert "--max-memory allows 0.0" in why
    assert watched(tmp_path, [], monkeypatch, most_memory_bytes=1e12) == ([], [])


def test_only_when_idle_asks_for_what_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter(range(1_000_000))
    monkeypatch.setattr(resource_guard, "_used", lambda family: Used(float(next(spent)), 0.0, 0.0))
    told, _ = watched(tmp_path, [], monkeypatch, only_when_idle=True)
    assert ["--only-when-idle" in reason for reason in told] == [True]
    assert watched(tmp_path, [], monkeypatch) == ([], [])


def test_the_command_leaves_a_note_that_peers_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = SimpleNamespace(run=RunId("ab" * 20), config=SimpleNamespace(name="story"))
    monkeypatch.setattr("p2pdiloco.swarm.run_index.manifests_here", lambda state: [run])
    folder = folder_of(tmp_path, run.run)
    folder.mkdir()
    assert main(["pause", "--state", str(tmp_path)]) == 0
    assert (folder / resource_guard.PAUSED).exists()
    assert "story" in capsys.readouterr().out
    assert main(["pause", "--end", "--state", str(tmp_path)]) == 0
    assert not (folder / resource_guard.PAUSED).exists()
    monkeypatch.undo()
    assert main(["pause", "--state", str(tmp_path / "none")]) == 2
