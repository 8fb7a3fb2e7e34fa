"""All peers of a run die at once; it goes on from what lies on their disks."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from swarm import (
    START_S,
    advance,
    children_of,
    contributes,
    ended,
    log_lines,
    printed,
    swarm_in,
    until,
    wait_gone,
    write_config,
)
from waiting import wait_until

from p2pdiloco.cli.errors import INTERRUPTED, NOBODY_THERE
from p2pdiloco.demo.local_swarm import Member, Swarm
from p2pdiloco.peer.checkpoint import best_of, load_all
from p2pdiloco.util.status_pipe import Invited


def states(member: Member) -> list[Path]:
    """Its checkpoints on the disk."""
    folder = member.run_folder()
    return [] if folder is None else sorted((folder / "checkpoint").glob("state-*.json"))


def knows_others(member: Member) -> bool:
    """Whether its next life knows where others of the directory were, and has a state."""
    path = member.folder / "directory.json"
    return bool(states(member)) and path.exists() and path.read_text().count("peer") >= 2


@pytest.mark.long  # test_a_run_wakes_up_without_its_bootstrap has it, and less to begin with
@pytest.mark.timeout(300)
def test_a_run_whose_peers_all_died_goes_on(tmp_path: Path) -> None:
    config = write_config(tmp_path, inner_steps=1_000_000, schedule_sync_every=8)
    with swarm_in(tmp_path) as swarm:
        address = swarm.start_bootstrap()
        ann = swarm.start_founder("A", config, address, "--checkpoint-s", "1")
        bob = swarm.join("B", address, "--checkpoint-s", "1")
        until(ann, lambda: contributes(ann, bob, 0), what="both at work")
        advance(ann, 3)
        for member in (ann, bob):
            wait_until(lambda member=member: len(states(member)) >= 2, what=f"checkpoints of {member.name}")  # type: ignore[misc]
        children = [child for member in (ann, bob) for child in children_of(member)]
        for member in (ann, bob):
            member.kill()
        swarm.bootstrap.kill()
        wait_gone(children)

        folders = [member.folder for member in (ann, bob)]
        left = best_of(load_all(folders))
        cid = swarm.launch("C", ["resume", *map(str, folders)])
        address = cid.wait_for(Invited, START_S).invite
        until(cid, lambda: cid.view.commits, what="new versions")
        assert cid.view.commits[0]["version"] <= max(p.state.head.version for p in left.shards) + 1
        assert min(c["tokens"] for c in cid.view.commits) > min(p.state.head.tokens for p in left.shards)
        again = swarm.join("B", address)
        until(cid, lambda: contributes(cid, again, 0), what="a peer that returns with its own checkpoint")
        swarm.stop()
        assert [ended(member) for member in (cid, again)] == [0, 0], log_lines(cid)


WAITING = "waiting for another peer of the run"


@contextmanager
def after_a_power_failure(
    folder: Path, *, keeps_bootstrap: bool = False
) -> Iterator[tuple[Swarm, dict[str, Sequence[str]], int]]:
    """Founder A and peer B have merged together; then both lose power, and their bootstrap is gone for good. Each
    one's command, and the last version that A had."""
    config = write_config(folder, inner_steps=1_000_000, schedule_sync_every=8)
    with swarm_in(folder) as swarm:
        address = swarm.start_bootstrap()
        commands = {
            "A": ["start", str(config), "--access", "open", "--bootstrap", address, "--checkpoint-s", "1"],
            "B": ["join", address, "--checkpoint-s", "1"],
        }
        ann = swarm.launch("A", commands["A"])
        ann.wait_for(Invited, START_S)
        bob = swarm.launch("B", commands["B"])
        until(ann, lambda: contributes(ann, bob, 0), what="both at work")
        for member in (ann, bob):
            wait_until(lambda member=member: knows_others(member), what=f"what {member.name} remembers")  # type: ignore[misc]
        children = [child for member in (ann, bob) for child in children_of(member)]
        for member in (ann, bob) if keeps_bootstrap else (ann, bob, swarm.bootstrap):
            member.kill()
        wait_gone(children)
        ann.refresh()
        yield swarm, commands, ann.view.version


@pytest.mark.timeout(300)
@pytest.mark.parametrize("order", ["AB", pytest.param("BA", marks=pytest.mark.long)])
def test_a_run_wakes_up_without_its_bootstrap(tmp_path: Path, order: str) -> None:
    """The same commands again, one after the other: the peers meet and merge together."""
    with after_a_power_failure(tmp_path) as (swarm, commands, version):
        first = swarm.launch(order[0], commands[order[0]])
        wait_until(lambda: printed(first, WAITING) or not first.is_running, START_S, "one that waits")
        told = printed(first, WAITING)
        assert told is not None, log_lines(first)[-1]
        assert "left_s=600" in told, "how long"
        second = swarm.launch(order[1], commands[order[1]])
        ann, bob = (first, second) if order == "AB" else (second, first)
        until(ann, lambda: contributes(ann, bob, version), what="both at work together")
        swarm.stop()
        assert [ended(member) for member in (ann, bob)] == [0, 0]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_peers_that_are_restarted_at_once_meet_without_their_bootstrap(tmp_path: Path) -> None:
    """The system gave them their ports."""
    with after_a_power_failure(tmp_path) as (swarm, commands, version):
        ann, bob = [swarm.launch(name, commands[name]) for name in "AB"]
        until(ann, lambda: contributes(ann, bob, version), what="both at work together")


@pytest.mark.timeout(300)
def test_who_waits_for_the_others_can_be_ended_and_who_has_no_state_does_not_wait(tmp_path: Path) -> None:
    with after_a_power_failure(tmp_path) as (swarm, commands, _):
        for number in (signal.SIGTERM, signal.SIGINT):
            waiting = swarm.launch("B", commands["B"])
            until(waiting, lambda waiting=waiting: printed(waiting, WAITING), what="one that waits")  # type: ignore[misc]
            waiting.process.send_signal(number)
            assert ended(waiting, 15.0) == INTERRUPTED
        newcomer = swarm.launch("C", commands["B"])
        assert ended(newcomer) == NOBODY_THERE
        assert printed(newcomer, "none of the initial peers answers")
        assert not printed(newcomer, WAITING)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_who_has_a_state_joins_though_none_of_the_others_is_there_yet(tmp_path: Path) -> None:
    """The bootstrap is there, and knows the run by what has not expired yet, or not at all."""
    with after_a_power_failure(tmp_path, keeps_bootstrap=True) as (swarm, commands, version):
        bob = swarm.launch("B", commands["B"])
        until(bob, lambda: printed(bob, "no other peer of the run answers yet; continuing from the local state"))
        until(bob, lambda: bob.view.version > version, what="new versions")
        ann = swarm.launch("A", commands["A"])
        until(ann, lambda: contributes(ann, bob, version), what="both at work together")
