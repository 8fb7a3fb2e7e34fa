"""A spoilt shard that nobody can be asked for: taken as it is, but not while those who have it may come back."""

from __future__ import annotations

from pathlib import Path

import torch

from p2pdiloco.peer.scrubber import ALONE_S
from p2pdiloco.protocol.ids import ShardId
from tests.unit.troupe import Member, Stage, act

SHARD = ShardId(0)


async def flip(stage: Stage, member: Member) -> None:
    """A value of the node's parameters is another; it is found out."""
    member.state.theta[0] += 1.0
    member.state.integrity.invalidate()
    await stage.wait(1.0)


async def lost(stage: Stage) -> tuple[Member, Member]:
    """One that has lost the other a moment ago, and whose state is spoilt; the other."""
    ann = await stage.found()
    bob = await stage.beside()
    stage.disconnect(ann, bob)
    await flip(stage, ann)
    return ann, bob


def test_who_has_just_lost_the_others_gets_its_state_from_them_when_they_are_back(tmp_path: Path) -> None:
    """Else a flipped bit is in what it signs next, and the others take the fault for their own memory's."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await lost(stage)
            await stage.wait(5.0)
            assert ann.state.integrity.is_spoilt(SHARD)
            stage.connect(ann, bob)
            await stage.wait(5.0)
            assert not ann.state.integrity.is_spoilt(SHARD)
            assert torch.equal(ann.state.theta, bob.state.theta)

    act(story)


def test_those_who_do_not_come_back_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, _ = await lost(stage)
            await stage.wait(ALONE_S + 1.0)
            assert ann.state.integrity.is_unsigned(SHARD), "the run goes on with it"

    act(story)


def test_who_never_had_company_goes_on_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await flip(stage, ann)
            assert ann.state.integrity.is_unsigned(SHARD)

    act(story)
