"""Swarms of real processes for tests: a run so small that it takes seconds, and what its peers wrote about it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from forked import begin
from waiting import wait_until

from p2pdiloco.demo.local_swarm import Member, Swarm
from p2pdiloco.protocol.ids import LearnerId, peer_of
from p2pdiloco.training import NAME

Member.by_command = staticmethod(Member.begin)  # type: ignore[attr-defined]
Member.begin = staticmethod(begin)  # type: ignore[method-assign]
START_S = 120.0
"""Everything that starts Python with torch, on a busy machine."""
GONE_S = 20.0
"""How soon what lost its parent must be gone."""
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PEER = ("--listen", LOOPBACK, "--directory-listen", LOOPBACK)
TEXT = "swarm trains one model every peer holds same bits while owners merge what"
WORDS = TEXT.split()


def write_corpus(folder: Path) -> Path:
    """A few small files of text, enough for both splits."""
    folder.mkdir(parents=True)
    words = random.Random(1)
    for index in range(12):
        (folder / f"{index}.txt").write_text(" ".join(words.choice(WORDS) for _ in range(1000)))
    return folder


def write_config(folder: Path, **changes: object) -> Path:
    """A run's TOML file with its corpus beside it; ``changes`` like ``inner_steps=60`` replace single values."""
    values: dict[str, object] = {
        "name": "tiny",
        "access": "open",
        "model.width": 32,
        "model.depth": 1,
        "model.heads": 2,
        "model.context": 32,
        "data.kind": "files",
        "data.path": str(folder / "corpus"),
        "data.pattern": "*.txt",
        "data.held_out_share": 0.3,
        "inner.steps": 60,
        "inner.batch": 64,
        "inner.warmup": 5,
        "schedule.fragments": 2,
        "schedule.sync_every": 4,
        "schedule.overlap": 2,
        "schedule.max_shard": 8192,
        "outer.momentum": 0.3,
        "evaluation.every": 10,
        "evaluation.samples": 16,
    }
    values |= {key.replace("_", ".", 1): value for key, value in changes.items()}
    if not (folder / "corpus").exists():
        write_corpus(folder / "corpus")
    path = folder / "run.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return path


@contextmanager
def swarm_in(folder: Path) -> Iterator[Swarm]:
    """A swarm that is ended in order when the test is over, whatever happened, and leaves no process."""
    swarm = Swarm(folder, ("--data", str(folder / "corpus")) if (folder / "corpus").exists() else ())
    try:
        yield swarm
    except BaseException:
        for member in swarm.members:
            print(f"--- {member.name}, status {member.status}\n" + "\n".join(log_lines(member)[-25:]))
        raise
    finally:
        swarm.stop()
        left = swarm.leftovers()
        swarm.kill_leftovers()
    assert not left
    assert not any(member.is_running for member in swarm.members)


def printed(member: Member, text: str) -> str | None:
    """The first line with ``text`` in what its process told its user."""
    return next((line for line in member.output() if text in line), None)


def log_lines(member: Member) -> list[str]:
    """What it told its user."""
    return member.log_path.read_text().splitlines()


def advance(member: Member, versions: int, timeout_s: float = START_S) -> None:
    """Wait until shard 0 of ``member`` is ``versions`` further than now."""
    member.refresh()
    target = member.view.version + versions
    until(member, lambda: member.view.version >= target, timeout_s, f"version {target} at {member.name}")


def until(member: Member, condition: Any, timeout_s: float = START_S, what: str = "the condition") -> None:
    """Wait for something that ``member``'s event log tells.

    Raises:
        AssertionError: not in time, or ``member`` ended meanwhile.
    """

    def check() -> bool:
        is_running = member.is_running
        member.refresh()
        if condition():
            return True
        assert is_running, f"{member.name} ended with status {member.status} before {what}"
        return False

    wait_until(check, timeout_s, what)


def contributes(member: Member, other: Member, after: int) -> bool:
    """Whether ``member`` has commits of shard 0 after version ``after`` that merge a learner of ``other``."""
    other.refresh()
    return any(other.view.peer in contributors(commit) for commit in member.view.commits if commit["version"] > after)


def contributors(commit: dict[str, Any]) -> dict[str, int]:
    """Peer -> tokens of one commit in the event log."""
    return {str(peer_of(LearnerId(learner))): tokens for learner, tokens in commit["contributors"].items()}


def children_of(member: Member) -> list[psutil.Process]:
    """Its learner and its libp2p daemon."""
    return psutil.Process(member.process.pid).children(recursive=True)


def learner_of(member: Member) -> psutil.Process | None:
    """Its learner's process, if it is there now."""
    found = [child for child in children_of(member) if is_alive(child) and child.name() == NAME]
    return found[0] if found else None


@contextmanager
def learners_held(*members: Member) -> Iterator[None]:
    """Keep the learners from beginning, so that a short run is not over, on a fast machine, before all are there."""
    held = []
    for member in members:
        wait_until(lambda member=member: learner_of(member), START_S, f"the learner of {member.name}")
        learner = learner_of(member)
        assert learner is not None
        learner.suspend()
        held.append(learner)
    try:
        yield
    finally:
        for learner in held:
            learner.resume()


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(processes: Sequence[psutil.Process]) -> None:
    """Wait until none of them is alive."""
    wait_until(lambda: not any(map(is_alive, processes)), GONE_S, f"the end of {processes}")


def ended(member: Member, timeout_s: float = START_S) -> int | None:
    """Wait until its node process has ended; the exit status."""
    wait_until(lambda: not member.is_running, timeout_s, f"the end of {member.name}")
    member.refresh()
    return member.status


def report_of(member: Member) -> dict[str, Any]:
    """What it wrote at its end."""
    report = member.report()
    assert report is not None, f"{member.name} wrote no report"
    return report


def is_unblocked(report: dict[str, Any]) -> bool:
    """Whether its learner waited for nobody. On an overloaded machine the kernel may put a thread to sleep inside a
    call that waits for nothing (its own locks, page faults), and the learner counts that, too; so not exactly 0."""
    return bool(report["blocked_s"] <= 0.01 * report["compute_s"])
