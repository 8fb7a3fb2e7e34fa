"""What a peer answers, and what it lets go first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from actors import genesis
from troupe import Member, Stage, act

from p2pdiloco.peer.state_server import (
    LITTLE_BYTES,
    MANIFESTS,
    MANIFESTS_PER_S,
    OFFERS,
    OFFERS_OF_SHARD,
    OFFERS_PER_S,
    QUEUED_MOST_BYTES,
    STATE_PRIORITY,
    YIELD_MOST_S,
    YIELD_S,
)
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.wire.control_messages import GetChunk, GetManifest, GetState, encode
from p2pdiloco.wire.request_reply import Answer, RequestRefused


async def two(stage: Stage) -> tuple[Member, Member, bytes]:
    """Two peers, and a question for a chunk of the first one's state."""
    ann = await stage.found()
    bob = await stage.add("bob", genesis(stage.manifest), has_learner=False)
    await stage.wait(3.0)
    head = ann.state.heads[0]
    assert head is not None
    return ann, bob, encode(GetChunk(ShardId(0), head, 0))


def test_a_question_is_answered_or_refused_in_words(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob, question = await two(stage)
            assert (await ann.peer.answer(bob.id, encode(GetManifest()))).payload == stage.manifest.encode()
            answer = await ann.peer.answer(bob.id, question)
            assert answer.payload is not None
            assert bytes(answer.payload) == ann.state.theta[:64].numpy().tobytes() + bytes(2 * 64), (
                "float32, and a momentum in bfloat16"
            )
            assert answer.priority == STATE_PRIORITY
            refused = {
                b"no question": "malformed request",
                encode(GetState(ShardId(2))): "shard 2 has no state here yet",
                encode(GetChunk(ShardId(2), Digest("0" * 40), 0)): "there is no chunk 0 of shard 2",
                encode(GetChunk(ShardId(0), ann.state.heads[0], 1)): "there is no chunk 1 of shard 0",  # type: ignore[arg-type]
                encode(GetChunk(ShardId(0), Digest("0" * 40), 0)): "shard 0 is not at 00000000",
            }
            for body, reason in refused.items():
                with pytest.raises(RequestRefused, match=reason):
                    await ann.peer.answer(bob.id, body)

    act(story)


def test_a_manifest_is_given_seldom_to_one_peer(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob, _ = await two(stage)
            for _ in range(MANIFESTS):
                assert (await ann.peer.answer(bob.id, encode(GetManifest()))).payload
            with pytest.raises(RequestRefused, match="too many manifest requests"):
                await ann.peer.answer(bob.id, encode(GetManifest()))
            assert (await ann.peer.answer(PeerId("somebody else"), encode(GetManifest()))).payload
            await stage.wait(1 / MANIFESTS_PER_S)
            assert (await ann.peer.answer(bob.id, encode(GetManifest()))).payload

    act(story)


def test_states_are_offered_so_often_to_one_peer(tmp_path: Path) -> None:
    """What an offer holds overtakes all payloads, and waits for no budget."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob, _ = await two(stage)
            question = encode(GetState(ShardId(0)))
            for _ in range(OFFERS + OFFERS_OF_SHARD * len(Layout.of(stage.manifest).shards)):
                assert (await ann.peer.answer(bob.id, question)).body
            with pytest.raises(RequestRefused, match="too many state requests"):
                await ann.peer.answer(bob.id, question)
            assert (await ann.peer.answer(PeerId("somebody else"), question)).body
            await stage.wait(1 / OFFERS_PER_S)
            assert (await ann.peer.answer(bob.id, question)).body

    act(story)


def test_a_state_that_was_offered_stays_to_be_had_when_the_shard_moves_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob, question = await two(stage)
            before = ann.state.theta[:64].numpy().tobytes()
            await ann.peer.answer(bob.id, encode(GetState(ShardId(0))))
            await stage.train(ann, *[1.0] * 8)
            assert ann.versions[0] >= 1
            answer = await ann.peer.answer(bob.id, question)
            assert answer.payload is not None
            assert bytes(answer.payload)[:256] == before
            await stage.wait(100.0)
            with pytest.raises(RequestRefused, match="shard 0 is not at"):
                await ann.peer.answer(bob.id, question)

    act(story)


def test_contributions_and_commits_go_before_chunks_but_not_for_ever(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob, question = await two(stage)
            ann.host.up_bytes_per_s = 1.0

            def ask() -> asyncio.Task[Answer]:
                return asyncio.ensure_future(ann.peer.answer(bob.id, question))

            ann.queued[bob.id] = LITTLE_BYTES
            little = ask()
            await stage.settle()
            assert little.done(), "the link is never idle"
            ann.queued[bob.id] = LITTLE_BYTES + 1
            much = ask()
            await stage.wait(YIELD_MOST_S / 2)
            assert not much.done()
            ann.queued[bob.id] = 0
            await stage.wait(2 * YIELD_S)
            assert much.done(), "as soon as little waits"
            ann.queued[bob.id] = LITTLE_BYTES + 1
            patient = ask()
            await stage.wait(YIELD_MOST_S - 2 * YIELD_S)
            assert not patient.done()
            await stage.wait(4 * YIELD_S)
            assert patient.done(), "whatever waits"

    act(story)


def test_who_does_not_read_holds_up_nobody_else(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob, question = await two(stage)
            eve = await stage.add("eve", None, has_learner=False)
            ann.host.up_bytes_per_s = 1e6

            def ask() -> asyncio.Task[Answer]:
                return asyncio.ensure_future(ann.peer.answer(bob.id, question))

            ann.queued[eve.id] = 2 * LITTLE_BYTES
            first = ask()
            await stage.wait(YIELD_MOST_S + 2 * YIELD_S)
            assert first.done()
            ann.queued[eve.id] -= 1
            second = ask()
            await stage.settle()
            assert second.done(), "eve is not waited for any more"
            ann.queued[bob.id] = LITTLE_BYTES + 1
            third = ask()
            await stage.wait(YIELD_S)
            assert not third.done(), "others are"
            ann.queued[bob.id] = ann.queued[eve.id] = 0
            await stage.wait(2 * YIELD_S)
            assert third.done()
            ann.queued[eve.id] = 2 * LITTLE_BYTES
            fourth = ask()
            await stage.settle()
            assert not fourth.done(), "it has read all that was queued"
            fourth.cancel()

    act(story)


def test_who_reads_as_fast_as_the_link_allows_is_waited_for(tmp_path: Path) -> None:
    """Each time, on a link of 20 kB/s."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob, question = await two(stage)
            ann.host.up_bytes_per_s = 20_000.0
            ann.queued[bob.id] = 3 * LITTLE_BYTES
            for _ in range(2):
                answer = asyncio.ensure_future(ann.peer.answer(bob.id, question))
                for _ in range(round(YIELD_MOST_S / YIELD_S) - 1):
                    ann.queued[bob.id] -= int(20_000 * YIELD_S)
                    await stage.wait(YIELD_S)
                    assert not answer.done()
                await stage.wait(4 * YIELD_S)
                assert answer.done()

    act(story)


def test_what_the_link_carries_says_what_is_little(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob, question = await two(stage)
            for rate, little in ((100 * LITTLE_BYTES, 10 * LITTLE_BYTES), (None, 2 * LITTLE_BYTES)):
                ann.host.up_bytes_per_s = rate
                ann.queued[bob.id] = little
                answer = asyncio.ensure_future(ann.peer.answer(bob.id, question))
                await stage.settle()
                assert answer.done()
            ann.queued[bob.id] = 2 * LITTLE_BYTES + 1
            answer = asyncio.ensure_future(ann.peer.answer(bob.id, question))
            await stage.settle()
            assert not answer.done()
            answer.cancel()

    act(story)


def test_who_asks_and_does_not_read_gets_no_more(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob, question = await two(stage)
            ann.queued[bob.id] = QUEUED_MOST_BYTES + 1
            with pytest.raises(RequestRefused, match="busy"):
                await ann.peer.answer(bob.id, question)

    act(story)
