"""All peers of a run die at once; it goes on from what lies on their disks."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm import advance, children_of, contributes, ended, log_lines, swarm_in, until, wait_gone, write_config
from waiting import wait_until

from p2pdiloco.chaos.swarm import Member
from p2pdiloco.peer.checkpoint import best_of, load_all


def states(member: Member) -> list[Path]:
    """Its checkpoints on the disk."""
    folder = member.run_folder()
    return [] if folder is None else sorted((folder / "checkpoint").glob("state-*.json"))


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
        wait_until(lambda: cid.said("to join from another machine"), what="an address to join")
        address = str(cid.said("to join from another machine")).split(" join ")[-1].split()[0]
        until(cid, lambda: cid.view.commits, what="new versions")
        assert cid.view.commits[0]["version"] <= max(p.state.head.version for p in left.shards) + 1
        assert min(c["tokens"] for c in cid.view.commits) > min(p.state.head.tokens for p in left.shards)
        again = swarm.join("B", address)
        until(cid, lambda: contributes(cid, again, 0), what="a peer that returns with its own checkpoint")
        swarm.stop()
        assert [ended(member) for member in (cid, again)] == [0, 0], log_lines(cid)
