"""Whole peers that vote for going back, and go on from their known-good checkpoints: real files, a stage around."""

from __future__ import annotations

from pathlib import Path

from test_peer_checkpoint_writer import same, versions_in
from troupe import Member, Stage, act

from p2pdiloco.peer.checkpoint import ASIDE, indices
from p2pdiloco.protocol import events as ev
from p2pdiloco.util.files import LOCAL

NAMES = ("ann", "bob", "cid")
GOOD, BAD = 1.0, 9.0


async def trio(stage: Stage) -> list[Member]:
    """Three that train."""
    members = [await stage.found()]
    for name in NAMES[1:]:
        members.append(await stage.add(name))
        await stage.wait(15.0)
        await stage.ready(members[-1])
    await stage.wait(5.0)
    return members


async def round_of(stage: Stage, members: list[Member], change: float = 0.5) -> None:
    """All make the steps of a round, and merge."""
    for _ in range(4):
        for member in members:
            member.learner.step(change)
        for member in members:
            await stage.rest(member)
    await stage.wait(3.0)
    for member in members:
        await stage.rest(member)


async def measure(stage: Stage, members: list[Member], loss: float) -> None:
    """Each measures the model."""
    for member in members:
        member.metrics.loss = loss
        member.driver.feed(ev.Evaluated(member.versions[0], loss))
        await stage.settle()


async def save(stage: Stage, members: list[Member]) -> None:
    for member in members:
        saving = member.host.spawn(member.peer.checkpoint_writer.save(is_last=False), name="save")  # type: ignore[arg-type]
        await stage.settle()
        assert saving.done()


async def ruin(stage: Stage, members: list[Member]) -> None:
    """Good checkpoints, and then versions after which the loss is far higher."""
    for _ in range(3):
        await round_of(stage, members)
        await measure(stage, members, GOOD)
        await save(stage, members)
    for member in members:
        member.metrics.loss = BAD
    for _ in range(2):
        await round_of(stage, members)
        await save(stage, members)
        await measure(stage, members, BAD)


def restored(member: Member) -> dict[int, int]:
    """The version to which it went back, by shard."""
    found = [event.state.head for event in member.events if isinstance(event, ev.Restored) and event.state is not None]
    return {head.shard: head.version for head in found}


def test_peers_go_back_to_their_known_good_checkpoints_and_go_on(tmp_path: Path) -> None:
    """The state on disk and in memory is the good one; what was newer is set aside, so that a restart is no way back to
    it; learners take the global parameters; and the run goes on."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            members = await trio(stage)
            await ruin(stage, members)
            ann = members[0]
            assert [restored(member) for member in members] == [{0: 2, 1: 2}] * 3
            abandoned = set(ann.machine.core.abandoned)
            assert abandoned
            for place in (tmp_path / name / "checkpoint" for name in NAMES):
                assert any(name.startswith(ASIDE) for name in LOCAL.names(place)), "nothing is removed"
                assert [index.shards[0].state.head.version for _, index in indices(place)] == [2]
            for _ in range(3):
                await round_of(stage, members)
            await stage.wait(10.0)  # a fork of the last version heals within five seconds
            assert min(ann.versions) > 4, "later than where it went wrong"
            assert all(same(ann, other) for other in members)
            heads = {head for chain in ann.machine.core.chains for head in (*chain.ancestry, chain.head)}  # type: ignore[misc]
            assert abandoned.isdisjoint(heads)
            assert versions_in(tmp_path / "ann") == ann.versions, "and a restart goes on from there"
            assert all(not member.faults() for member in members)

    act(story)
