"""A donor's copies of its shards: shared, bounded, and of one head with their proofs."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path

import pytest
from troupe import Member, Stage, act

from p2pdiloco.peer import driver, state_server
from p2pdiloco.protocol.ids import PeerId, ShardId
from p2pdiloco.wire.control_messages import GetChunk, GetState, StateOffer, decode_as, encode
from p2pdiloco.wire.request_reply import Answer, RequestRefused

ASKER = PeerId("somebody")


def ask(member: Member, question: GetState | GetChunk) -> asyncio.Task[Answer]:
    return asyncio.ensure_future(member.peer.answer(ASKER, encode(question)))


def copies_of(member: Member) -> list[int]:
    """Shards as they are copied from now on, but for checkpoints."""
    made: list[int] = []
    copy = member.state.copy

    def counted(shard: ShardId, *arguments: object, **options: object) -> object:
        if options.get("is_checked", True):
            made.append(shard)
        return copy(shard, *arguments, **options)  # type: ignore[arg-type]

    member.state.copy = counted  # type: ignore[assignment,method-assign]
    return made


async def offer_of(member: Member, shard: int) -> StateOffer:
    return decode_as((await ask(member, GetState(ShardId(shard)))).body, StateOffer)


def test_who_ask_at_once_and_who_asks_later_share_one_copy(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            made = copies_of(ann)
            answers = await asyncio.gather(*(ask(ann, GetState(ShardId(0))) for _ in range(5)))
            assert len({answer.body for answer in answers}) == 1
            head = decode_as(answers[0].body, StateOffer).proof.state.head.id
            for _ in range(3):
                await ask(ann, GetChunk(ShardId(0), head, 0))
            assert made == [0]
            await offer_of(ann, 1)
            assert made == [0, 1]

    act(story)


def test_who_shares_a_copy_with_somebody_who_gave_up_is_told_to_ask_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            ann.held["tensors"] = []
            first, second = ask(ann, GetState(ShardId(0))), ask(ann, GetState(ShardId(0)))
            await stage.settle()
            first.cancel()
            await stage.settle()
            with pytest.raises(RequestRefused, match="ask again"):
                await second
            await ann.release("tensors")
            assert (await offer_of(ann, 0)).proof.state.head == ann.machine.core.head(ShardId(0))

    act(story)


def test_what_is_offered_is_of_one_head_while_versions_come(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, *[1.0] * 4)
            ann.held["tensors"] = []
            asked = ask(ann, GetState(ShardId(1)))
            for _ in range(2):
                ann.learner.step(1.0)
                ann.learner.boundary()
            await ann.release("tensors")
            await stage.rest(ann)
            assert ann.versions[1] == 2
            offer = decode_as((await asked).body, StateOffer)
            assert offer.proof.header is not None
            assert offer.proof.state.head.version == offer.proof.header.version == 1

    act(story)


def test_copies_are_bounded_and_the_longest_unused_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_server, "COPIES_LEAST_BYTES", 0)
    monkeypatch.setattr(state_server, "COPIES_LEAST", 2)

    async def story() -> None:
        async with Stage(tmp_path, fragments=3) as stage:
            ann = await stage.found()
            made = copies_of(ann)
            first = await offer_of(ann, 0)
            await offer_of(ann, 1)
            await ask(ann, GetChunk(ShardId(0), first.proof.state.head.id, 0))  # used last
            await offer_of(ann, 2)
            assert made == [0, 1, 2]
            await offer_of(ann, 0)
            await offer_of(ann, 2)
            assert made == [0, 1, 2]
            await offer_of(ann, 1)
            assert made == [0, 1, 2, 1]

    act(story)


def test_a_copy_that_nobody_uses_is_dropped(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            made = copies_of(ann)
            await offer_of(ann, 0)
            for _ in range(3):
                await stage.wait(state_server.KEEP_S * 0.9)
                await offer_of(ann, 0)
            assert made == [0]
            await stage.wait(state_server.KEEP_S * 1.1)
            await offer_of(ann, 0)
            assert made == [0, 0]

    act(story)


def test_copies_that_nobody_asks_for_any_more_leave_no_memory(tmp_path: Path) -> None:
    """Also if nobody ever asks again."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            donor_of = ann.peer.state_server
            await offer_of(ann, 0)
            room = weakref.ref(donor_of._blocks)
            await stage.wait(state_server.KEEP_S * 0.9)
            await offer_of(ann, 0)
            await stage.wait(state_server.KEEP_S * 0.9)
            assert donor_of._copies
            await stage.wait(state_server.KEEP_S * 2.1)
            assert not donor_of._copies
            assert room() is None

    act(story)


def test_a_copy_that_is_held_up_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            ann.held["tensors"] = []
            asked = ask(ann, GetState(ShardId(0)))
            await stage.wait(driver.COPY_S + 1.0)
            with pytest.raises(RequestRefused, match="busy"):
                await asked

    act(story)
