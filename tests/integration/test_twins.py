"""A state folder that was copied: two processes with one identity, each with a lock of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from swarm import advance, contributes, ended, log_lines, swarm_in, until, write_config
from waiting import wait_until

from p2pdiloco.demo.local_swarm import Member, Swarm

REPAIR = 2
RESOLVED_S = 60.0


def copied(member: Member, name: str) -> str:
    """A copy of its state folder, in the place of peer ``name``'s."""
    shutil.copytree(member.folder, member.folder.with_name(f"peer-{name}"), ignore=shutil.ignore_patterns("log.txt"))
    return name


def complaints(member: Member) -> list[str]:
    return [line for line in log_lines(member) if line.startswith("p2pdiloco: ")]


def begin(swarm: Swarm, config: Path) -> tuple[str, Member, Member]:
    """A founder and a peer at work."""
    address = swarm.start_bootstrap()
    ann = swarm.start_founder("A", config, address)
    bob = swarm.join("B", address)
    until(ann, lambda: contributes(ann, bob, 0), what="contributions of B")
    return address, ann, bob


@pytest.mark.timeout(300)
def test_who_starts_on_a_copied_folder_does_not_begin(tmp_path: Path) -> None:
    config = write_config(tmp_path, inner_steps=1_000_000)
    with swarm_in(tmp_path) as swarm:
        address, ann, bob = begin(swarm, config)
        twin = swarm.join(copied(bob, "T"), address)
        assert ended(twin) == REPAIR, log_lines(twin)
        assert len(complaints(twin)) == 1
        assert "another process takes part with this peer's identity" in complaints(twin)[0]
        assert "remove identity.key from the copy" in complaints(twin)[0]
        advance(ann, 2)
        assert bob.is_running
        assert not any("disconnected" in line for line in log_lines(ann) + log_lines(bob))


@pytest.mark.timeout(300)
def test_of_two_that_start_at_once_one_ends_and_says_why(tmp_path: Path) -> None:
    config = write_config(tmp_path, inner_steps=1_000_000)
    with swarm_in(tmp_path) as swarm:
        address, ann, bob = begin(swarm, config)
        bob.process.terminate()
        assert ended(bob) == 0
        names = ["B", copied(bob, "T")]
        quiet = len(log_lines(ann))
        both = [swarm.join(name, address) for name in names]
        wait_until(lambda: any(not member.is_running for member in both), RESOLVED_S, "the end of one of the twins")
        (loser,) = (member for member in both if not member.is_running)
        (winner,) = (member for member in both if member is not loser)
        assert ended(loser) == REPAIR, log_lines(loser)
        assert "another process takes part with this peer's identity" in complaints(loser)[-1]
        ann.refresh()
        version = ann.view.version
        until(ann, lambda: contributes(ann, winner, version + 1), what="contributions of the one that stays")
        assert winner.is_running
        assert len(log_lines(ann)) - quiet < 60, "\n".join(log_lines(ann)[quiet:])
