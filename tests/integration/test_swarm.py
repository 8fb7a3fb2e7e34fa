"""Whole swarms: real processes, a real DHT, real sockets; kills, restarts and leaving in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swarm import (
    START_S,
    advance,
    children_of,
    contributes,
    contributors,
    ended,
    is_alive,
    is_unblocked,
    learner_of,
    learners_held,
    log_lines,
    printed,
    report_of,
    swarm_in,
    until,
    wait_gone,
    write_config,
)
from waiting import wait_until

from p2pdiloco.demo.local_swarm import Member
from p2pdiloco.peer.checkpoint import load
from p2pdiloco.protocol.events import Stepped
from p2pdiloco.protocol.ids import LearnerId
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.util.process import SAME_S
from tests.machine_sim import recorder
from tests.machine_sim.journal import effects_crc, read_journal


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Member]]:
    """Three peers that have trained one run to its end, with journals; one with several threads for tensors."""
    folder = tmp_path_factory.mktemp("complete")
    config = write_config(folder, inner_steps=200, schedule_sync_every=8, schedule_fragments=4)
    with pytest.MonkeyPatch.context() as patches, swarm_in(folder) as swarm:
        patches.setenv(recorder.VARIABLE, "1")
        address = swarm.start_bootstrap()
        founder = swarm.start_founder("A", config, address)
        with (
            learners_held(founder),
            learners_held(swarm.join("B", address), swarm.join("C", address, "--merge-threads", "3")),
        ):
            until(founder, lambda: founder.view.live == 3, what="three live peers")
        for member in swarm.members:
            assert ended(member, 2 * START_S) == 0, log_lines(member)
        yield swarm.members


def test_a_run_ends_with_one_model_and_every_token_in_it(complete: list[Member]) -> None:
    reports = [report_of(member) for member in complete]
    founder = complete[0]
    assert [report["digests"] for report in reports] == [reports[0]["digests"]] * 3
    assert [report["heads"] for report in reports] == [reports[0]["heads"]] * 3
    assert sum(report["tokens_trained"] for report in reports) == reports[0]["tokens_merged"]
    assert [report["tokens_unmerged"] for report in reports] == [0, 0, 0]
    assert all(is_unblocked(report) for report in reports)
    assert all(report["tokens_trained"] > 0 for report in reports)
    assert {peer for commit in founder.view.commits for peer in contributors(commit)} == {m.view.peer for m in complete}
    assert {report["ending"]["reason"] for report in reports} == {"the run is complete"}


def test_what_a_person_sees_is_free_of_noise(complete: list[Member]) -> None:
    for member in complete:
        for line in log_lines(member):
            assert "Traceback" not in line
            assert "never retrieved" not in line
            assert " - " not in line[:40], f"nobody speaks: {line}"
            assert " warning " not in line[:40] or " alone " in line, line
        assert any(" node progress step=" in line for line in log_lines(member))


def test_journals_replay_to_the_same_effects(complete: list[Member]) -> None:
    for member in complete:
        config, entries = read_journal(run_folder(member) / "journal.bin")
        machine = Machine(config)
        steps = 0
        for entry in entries:
            assert effects_crc(machine.handle(entry.event, entry.now)) == entry.effects_crc
            steps += isinstance(entry.event, Stepped)
        assert steps
        assert [head.id for head in machine.view.known_heads] == report_of(member)["heads"]


def run_folder(member: Member) -> Path:
    folder = member.run_folder()
    assert folder is not None
    return folder


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_hash_seed_changes_no_decision(complete: list[Member], seed: str) -> None:
    journal = run_folder(complete[0]) / "journal.bin"
    command = [sys.executable, "-m", "tests.machine_sim.replay", "--check", str(journal)]
    done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "replay to the same effects" in done.stdout


@pytest.mark.long  # the short chaos has all of it, but for leaving at once
@pytest.mark.timeout(400)
def test_kills_restarts_and_leaving(tmp_path: Path) -> None:
    """One long run, whose members come and go in every way there is."""
    config = write_config(tmp_path, inner_steps=1_000_000, schedule_sync_every=8)
    with swarm_in(tmp_path) as swarm:
        address = swarm.start_bootstrap()
        ann = swarm.start_founder("A", config, address)
        bob, cid = swarm.join("B", address), swarm.join("C", address)
        for other in (bob, cid):
            until(
                ann, lambda other=other: contributes(ann, other, 0), what=f"{other.name}'s contributions at the founder"
            )

        late = swarm.join("D", address)
        _a_learner_is_killed(bob, ann)
        until(ann, lambda: contributes(ann, late, 0), what="the late joiner's contributions")
        _a_node_is_killed(bob, ann)
        swarm.bootstrap.kill()
        gone = [_leaves_in_order(cid, signal.SIGTERM)]
        advance(ann, 2)
        version = ann.view.version
        again = swarm.join("C", address)
        gone.append(_leaves_in_order(late, signal.SIGINT))
        until(ann, lambda: contributes(ann, again, version), what="the returned peer's contributions")
        _leaves_at_once(again)
        advance(ann, 3)
        gone.append(_leaves_in_order(ann, signal.SIGTERM))
        _holds_all_tokens(ann, gone)


def _a_learner_is_killed(member: Member, watcher: Member) -> None:
    """The peer starts it again, and goes on under the new life's name."""
    learner = learner_of(member)
    assert learner is not None
    learner.kill()
    until(member, lambda: learner_of(member) not in (None, learner), what="another learner")
    watcher.refresh()
    version = watcher.view.version
    until(watcher, lambda: contributes(watcher, member, version + 1), what="the new learner's contributions")


def _a_node_is_killed(member: Member, watcher: Member) -> None:
    """Nothing of it remains, and nobody waits for it."""
    children = children_of(member)
    assert {"p2pd" in child.name() for child in children} == {True, False}
    member.kill()
    wait_gone(children)
    advance(watcher, 3)


def _leaves_in_order(member: Member, number: signal.Signals) -> dict[str, Any]:
    """All that it has trained is merged, its state on its disk, and its children gone; its report."""
    children = children_of(member)
    os.killpg(member.process.pid, number)  # as a terminal does at Ctrl+C
    member.process.send_signal(number)  # and as a wrapper does, which forwards it
    assert ended(member) == 0, log_lines(member)
    assert not any("daemon died" in line or "the learner ended unexpectedly" in line for line in log_lines(member))
    assert not any(map(is_alive, children))
    report = report_of(member)
    assert report["ending"]["reason"] == number.name
    assert str(printed(member, "  model folder")).endswith(str(run_folder(member)))
    assert report["tokens_unmerged"] == 0
    assert is_unblocked(report)
    assert load(run_folder(member) / "checkpoint") is not None
    return report


def _holds_all_tokens(member: Member, gone: list[dict[str, Any]]) -> None:
    """The chains at ``member``'s end have merged every token of those who left in order."""
    checkpoint = load(run_folder(member) / "checkpoint")
    assert checkpoint is not None
    for proof in checkpoint.shards:
        marks = dict(proof.state.marks)
        for report in gone:
            assert marks[LearnerId(report["learner"])].tokens == report["tokens_trained"]


def _leaves_at_once(member: Member) -> None:
    children, learner = children_of(member), learner_of(member)
    assert learner is not None
    learner.suspend()  # otherwise its peer has left in order before the second signal
    member.process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    wait_until(lambda: time.monotonic() > sent + SAME_S, 10.0, "the time in which a signal is the same one")
    member.process.send_signal(signal.SIGINT)
    assert ended(member) == 1
    assert not any(map(is_alive, children))
    assert "left at once" in log_lines(member)[-1]
