"""A spoilt shard that nobody can be asked for: taken as it is, but not while those who have it may come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from p2pdiloco.codec import digests
from p2pdiloco.codec.formats import CHUNK
from p2pdiloco.peer.scrubber import ALONE_S
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import PeerId, ShardId
from p2pdiloco.wire.control_messages import GetState, decode_request
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


def signs_another_state(owner: Member) -> None:
    """From now on it signs a wrong digest of each shard's last chunk."""
    sound = owner.state.merge

    def merge(*given: Any, **options: Any) -> Any:
        found = sound(*given, **options)
        return found._replace(digests=found.digests[:-1] + bytes([found.digests[-1] ^ 1]))

    owner.state.merge = merge  # type: ignore[method-assign]


def test_an_owner_that_signed_another_state_is_barred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A6d: of a chunk that nobody has drawn. Two peers that have the same state need nobody's."""

    async def story() -> None:
        async with Stage(tmp_path, elements=CHUNK + 100) as stage:
            ann = await stage.found()
            bob = await stage.add("bob", None, has_learner=False, weight=0.0)
            cat = await stage.add("cat", None, has_learner=False, weight=0.0)
            await stage.wait(3.0)
            monkeypatch.setattr(digests, "sample", lambda *_: [0])
            signs_another_state(ann)
            await stage.train(ann, 1.0, 1.0)
            await stage.wait(20.0)
            honest = ann.state.theta
            for member in (bob, cat):
                assert max(member.versions) == 1
                assert ann.id in member.machine.view.barred
                assert torch.equal(member.state.theta, honest), "it goes on with its own state"
                assert not any(member.state.integrity.is_spoilt(ShardId(shard)) for shard in (0, 1))
                assert sum(isinstance(event, ev.Failed) and event.work == "fetch" for event in member.events) <= 2

    act(story)


def notes_who_offers(member: Member, asked: list[PeerId]) -> None:
    honest = member.peer.answer

    async def answer(peer: PeerId, body: bytes) -> Any:
        if isinstance(decode_request(body), GetState):
            asked.append(member.id)
        return await honest(peer, body)

    member.peer.answer = answer  # type: ignore[method-assign]


def test_who_is_altered_itself_blames_nobody(tmp_path: Path) -> None:
    """A6d: it is repaired by another peer, and its owner only if nobody else has the state."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.add("bob", None, has_learner=False, weight=0.0)
            cat = await stage.add("cat", None, has_learner=False, weight=0.0)
            await stage.wait(3.0)
            await stage.train(ann, *[1.0] * 4)
            assert min(bob.versions) > 0
            right = bob.state.theta.clone()
            asked = list[PeerId]()
            for member in (ann, cat):
                notes_who_offers(member, asked)
            await flip(stage, bob)
            await stage.wait(5.0)
            assert torch.equal(bob.state.theta, right)
            assert asked
            stage.disconnect(bob, cat)
            await flip(stage, bob)
            await stage.wait(5.0)
            assert torch.equal(bob.state.theta, right), "there is nobody else than the owner"
            stage.connect(bob, cat)
            await stage.wait(3.0)
            bob.state.theta[0] += 1.0
            cat.state.theta[1] += 1.0
            for member in (bob, cat):
                member.state.integrity.invalidate()
            await stage.wait(5.0)
            assert not bob.machine.view.barred, "two states that differ prove nothing"
            assert not cat.machine.view.barred

    act(story)
