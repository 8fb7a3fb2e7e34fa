"""One folder a run, whatever the order of commands: real processes, killed, resumed, started twice, finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from swarm import advance, children_of, ended, log_lines, printed, swarm_in, until, wait_gone, write_config
from waiting import wait_until

from p2pdiloco.demo.local_swarm import Member, Swarm
from p2pdiloco.peer.checkpoint import load

REPAIR = 2


def saved(member: Member) -> list[int]:
    """Tokens of each shard in its checkpoint."""
    folder = member.run_folder()
    found = None if folder is None else load(folder / "checkpoint")
    return [] if found is None else [proof.state.head.tokens for proof in found.shards]


def run_folders(member: Member) -> list[str]:
    return sorted(path.parent.name for path in member.folder.glob("*/checkpoint"))


def complaint(member: Member) -> str:
    """What a command that must be repaired says."""
    assert ended(member) == REPAIR, log_lines(member)
    return next(line for line in log_lines(member) if line.startswith("p2pdiloco: "))


def again(swarm: Swarm, *command: str) -> Member:
    """The next life of peer A, which must not begin behind what the last one has saved, nor elsewhere."""
    before, folders = saved(swarm["A"]), run_folders(swarm["A"])
    member = swarm.launch("A", command, "--checkpoint-s", "1")

    def commits() -> list[dict[str, Any]]:
        """Of this life; what the last ones wrote stands in the same file."""
        return [commit for commit in member.view.commits if commit["time"] > member.began_unix]

    until(member, commits, what="new versions")
    assert all(commit["tokens"] > before[commit["shard"]] for commit in commits())
    assert run_folders(member) == folders
    return member


def kill(member: Member) -> None:
    """SIGKILL, once there is a checkpoint."""
    wait_until(lambda: saved(member), what=f"a checkpoint of {member.name}")
    children = children_of(member)
    member.kill()
    wait_gone(children)


@pytest.mark.timeout(300)
def test_start_resume_and_start_go_on_from_each_others_state_and_nobody_disturbs(tmp_path: Path) -> None:
    config = str(write_config(tmp_path, inner_steps=1_000_000))
    with swarm_in(tmp_path) as swarm:
        address = swarm.start_bootstrap()
        start = ("start", config, "--bootstrap", address)
        ann = swarm.launch("A", start, "--checkpoint-s", "1")
        advance(ann, 2)
        wait_until(lambda: saved(ann), what="a checkpoint")
        assert len(run_folders(ann)) == 1

        held = {path.name for path in ann.folder.iterdir()} | {"directory.json"}  # which A itself writes after a while
        second = Member("A2", [*start, "--identity", str(tmp_path / "other.key")], ann.folder, swarm.mark)
        assert f"is in use by process {ann.process.pid}" in complaint(second)
        assert "--state" in complaint(second)
        assert {path.name for path in ann.folder.iterdir()} <= held, "it writes nothing"
        other = swarm.launch("B", ["start", str(write_config(tmp_path, inner_steps=999)), "--bootstrap", address])
        told = complaint(other)
        assert f"p2pdiloco join {address} --run {run_folders(ann)[0]}" in told
        assert "--name tiny-2" in told
        write_config(tmp_path, inner_steps=1_000_000)
        assert ann.is_running

        kill(ann)
        kill(again(swarm, "resume", str(ann.folder), "--bootstrap", address))
        kill(again(swarm, *start))
        last = again(swarm, "resume", str(ann.folder), "--bootstrap", address)
        kill(last)


@pytest.mark.timeout(200)
def test_a_finished_run_is_said_to_be_finished(tmp_path: Path) -> None:
    config = str(write_config(tmp_path, inner_steps=20))
    with swarm_in(tmp_path) as swarm:
        assert ended(swarm.launch("A", ["start", config])) == 0
        before = saved(swarm["A"])
        for command in (["start", config], ["resume", str(swarm["A"].folder)]):
            member = swarm.launch("A", command)
            assert ended(member) == 0, log_lines(member)
            assert "has finished all 20 steps; its model is in" in str(printed(member, "ended: "))
            assert saved(member) == before
            assert len(run_folders(member)) == 1
