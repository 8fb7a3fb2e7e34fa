"""State transfers between whole peers on a stage, some of whose donors lie or go."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import genesis
from troupe import Member, Stage, StageHost, act

from p2pdiloco.codec.digests import digest_list
from p2pdiloco.codec.formats import CHUNK
from p2pdiloco.peer.checkpoint import load
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.peer.signatures import signed
from p2pdiloco.peer.state_client import INCOMING
from p2pdiloco.peer.state_client import load as load_kept
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages
from p2pdiloco.protocol.chain import record_of
from p2pdiloco.protocol.ids import Digest, PeerId, RunId, ShardId, digest_of, learner_id
from p2pdiloco.protocol.messages import CommitHeader, Contributor, Head, commit_id
from p2pdiloco.protocol.replication import MAX_FETCHES
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire.control_messages import GetChunk, GetState, decode_request
from p2pdiloco.wire.request_reply import RequestError, Response


async def two_donors(stage: Stage, steps: int = 4) -> tuple[Member, Member]:
    """Two peers that have versions, and a third party's view of them: both may own."""
    ann = await stage.found()
    bob = await stage.add("bob", genesis(stage.manifest), has_learner=False)
    await stage.wait(3.0)
    await stage.train(ann, *[1.0] * steps)
    await stage.wait(3.0)
    assert ann.versions == bob.versions
    assert min(ann.versions) >= 1
    return ann, bob


def has_all_of(one: Member, other: Member) -> bool:
    return (
        one.state.heads == other.state.heads
        and torch.equal(one.state.theta, other.state.theta)
        and torch.equal(one.state.momentum, other.state.momentum)
        and one.state.integrity.digests == other.state.integrity.digests
    )


def test_a_newcomer_gets_every_chunk_of_every_shard(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path, elements=CHUNK + 1000) as stage:
            ann, _ = await two_donors(stage)
            cid = await stage.add("cid")
            await stage.wait(10.0)
            assert has_all_of(cid, ann)
            assert cid.faults() == {}
            await stage.ready(cid)
            assert torch.equal(cid.learner.flat(), ann.state.theta)

    act(story)


def test_a_chunk_that_is_not_what_was_signed_is_taken_from_another(tmp_path: Path) -> None:
    """And who sent it is asked for no state any more."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await two_donors(stage)
            lies: list[PeerId] = []

            def lie(donor: PeerId, body: bytes, payload: bytearray | None) -> None:
                if donor == bob.id and isinstance(decode_request(body), GetChunk) and payload is not None:
                    payload[0] ^= 1
                    lies.append(donor)

            stage.spoil_answer = lie
            cid = await stage.add("cid", has_learner=False)
            await stage.wait(10.0)
            assert lies, "it was asked"
            assert has_all_of(cid, ann)
            assert cid.faults() == {"state": len(lies)}
            assert len(lies) <= 2, "what was asked before the first lie was seen"
            await stage.wait(300.0)  # longer than a wrong answer alone bars it: ann has shown the right one
            asked = cid.asked[bob.id]
            cid.host.spawn(cid.peer._downloads.fetch(ShardId(0), bob.id), name="fetch")
            await stage.settle()
            assert cid.asked[bob.id] == asked
            refused = [event for event in cid.events if isinstance(event, ev.Failed) and event.peer == bob.id]
            assert [event.reason for event in refused][-1:] == ["it sent a wrong state before and is not asked for now"]

    act(story)


def test_shards_that_will_be_asked_for_next_are_begun_before(tmp_path: Path) -> None:
    """More shards than the machine fetches at once: donors are never idle for want of questions, and nothing is asked
    for twice."""

    async def story() -> None:
        async with Stage(tmp_path, fragments=12) as stage:
            ann, bob = await two_donors(stage, steps=24)
            questions: Counter[object] = Counter()
            heads_at_first: list[int] = []

            def watch(donor: PeerId, body: bytes, payload: bytearray | None) -> None:
                question = decode_request(body)
                questions[question] += 1
                if isinstance(question, GetState) and question.shard >= MAX_FETCHES:
                    heads_at_first.append(sum(version >= 0 for version in cid.versions))

            stage.spoil_answer = watch
            cid = await stage.add("cid", has_learner=False)
            await stage.wait(10.0)
            assert has_all_of(cid, ann)
            assert len(questions) == 24, "an offer and a chunk of each"
            assert set(questions.values()) == {1}
            assert heads_at_first[0] == 0, "before any of the first four was there"
            assert min(cid.asked[ann.id], cid.asked[bob.id]) >= 6, "both helped"

    act(story)


def test_what_was_begun_early_and_failed_is_fetched_when_the_machine_asks(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path, fragments=12) as stage:
            ann, bob = await two_donors(stage, steps=24)

            def lie(donor: PeerId, body: bytes, payload: bytearray | None) -> None:
                if donor == bob.id and isinstance(decode_request(body), GetChunk) and payload is not None:
                    payload[-1] ^= 1

            stage.spoil_answer = lie
            cid = await stage.add("cid", has_learner=False)
            await stage.wait(30.0)
            assert has_all_of(cid, ann)
            assert set(cid.faults()) == {"state"}

    act(story)


def test_an_offer_that_does_not_prove_itself_is_a_lie(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path, fragments=12) as stage:
            ann, bob = await two_donors(stage, steps=24)
            for shelf in bob.driver.payload_cache.shards:
                shelf.proofs.clear()  # its offers have no signature any more
            cid = await stage.add("cid", has_learner=False)
            await stage.wait(20.0)
            assert has_all_of(cid, ann)
            assert {fields["peer"] for event, fields in cid.metrics.lines if event == "fault"} == {bob.id}

    act(story)


def test_a_join_is_told_and_its_end(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, _ = await two_donors(stage)
            cid = await stage.add("cid", has_learner=False)
            await stage.wait(10.0)
            told = [event for event in cid.metrics.events() if event in ("joining", "fetched", "downloaded", "current")]
            assert sorted(told) == ["current", "downloaded", "fetched", "fetched", "joining"]
            assert told[0] == "joining"
            fields = dict(cid.metrics.lines)
            assert fields["downloaded"]["bytes"] == 2 * 6 * 64
            assert fields["joining"]["shards"] == 2
            assert not {"joining", "fetched", "downloaded"} & set(ann.metrics.events())

    act(story)


def test_a_join_that_was_cut_off_goes_on_with_what_it_had(tmp_path: Path) -> None:
    """Kept shard by shard, since it lasts; and gone from the disk once a checkpoint has it."""

    async def story() -> None:
        async with Stage(tmp_path, fragments=16) as stage:
            ann = await stage.found()
            await stage.train(ann, *[1.0] * 32)
            await stage.wait(3.0)
            cid = await stage.add("cid", has_learner=False)
            ann.queued[cid.id] = 32 << 20  # chunks yield to it, two seconds each, as it is being read
            while (had := sum(version >= 0 for version in cid.versions)) < 4:
                await stage.wait(0.1)
                ann.queued[cid.id] -= 100_000
            assert had < 16
            stage.kill(cid)
            folder = tmp_path / "cid" / INCOMING
            kept = load_kept(folder, stage.manifest)
            assert kept is not None
            assert had - 4 <= len(kept.shards) <= had + 1
            again = await stage.add("cid", InitialState(*kept), has_learner=False)
            assert sum(version >= 0 for version in again.versions) == len(kept.shards)
            await stage.wait(60.0)
            assert has_all_of(again, ann)
            assert again.faults() == {}
            assert again.metrics.events().count("fetched") == 16 - len(kept.shards)
            assert not folder.exists()

    act(story)


def test_what_was_asked_of_two_is_not_waited_for_when_one_gave_it(tmp_path: Path) -> None:
    """A donor that stands still: its question is withdrawn."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await two_donors(stage)
            bob.queued[ann.id] = 1 << 40  # it holds chunks back for two seconds

            async def never(shard: ShardId, head: object, chunk: int) -> memoryview:
                await asyncio.get_running_loop().create_future()
                raise AssertionError

            bob.peer.state_server.chunk = never  # type: ignore[method-assign,assignment]
            cid = await stage.add("cid", has_learner=False)
            await stage.wait(40.0)
            assert has_all_of(cid, ann)
            assert cid.asked[bob.id] > 0
            assert not [task for task in stage.tasks if "fetch" in task.get_name() and not task.done()]

    act(story)


def test_a_good_chunk_bars_who_sent_it_wrong_and_nobody_else(tmp_path: Path) -> None:
    """Not the donor itself, of whose chunk a bit was spoilt on the way: it is the only one there, then and later."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, *[1.0] * 4)
            spoilt: list[PeerId] = []

            def spoil(donor: PeerId, body: bytes, payload: bytearray | None) -> None:
                if payload is not None and len(spoilt) < 2:
                    payload[0] ^= 1
                    spoilt.append(donor)

            stage.spoil_answer = spoil
            cid = await stage.add("cid", has_learner=False)
            await stage.wait(60.0)
            assert spoilt == [ann.id] * 2
            assert has_all_of(cid, ann)
            failed = [event for event in cid.events if isinstance(event, ev.Failed)]
            for shard in (ShardId(0), ShardId(1)):
                cid.host.spawn(cid.peer._downloads.fetch(shard, ann.id), name="fetch")
            await stage.wait(10.0)
            assert [event for event in cid.events if isinstance(event, ev.Failed)] == failed

    act(story)


def test_what_the_only_donor_spoils_is_fetched_from_who_comes_later(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, *[1.0] * 4)

            def lie(donor: PeerId, body: bytes, payload: bytearray | None) -> None:
                if donor == ann.id and payload is not None:
                    payload[0] ^= 1

            stage.spoil_answer = lie
            cid = await stage.add("cid", has_learner=False)
            await stage.wait(30.0)
            assert cid.versions == [-1, -1]
            failed = [event for event in cid.events if isinstance(event, ev.Failed)]
            assert {event.work for event in failed} == {"fetch"}
            assert "does not match its owner's signature" in failed[0].reason
            await stage.add("bob", await copied(stage, ann), has_learner=False)
            await stage.wait(30.0)
            assert has_all_of(cid, ann)
            assert not [task for task in stage.tasks if "download" in task.get_name() and not task.done()]

    act(story)


async def copied(stage: Stage, member: Member) -> InitialState:
    """What its checkpoint holds."""
    found = load(stage.folder / "ann" / "checkpoint")
    assert found is not None
    assert torch.equal(found.theta, member.state.theta)
    return InitialState(found.shards, found.theta, found.momentum)


def test_a_donor_that_goes_away_costs_what_it_was_asked_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path, elements=2 * CHUNK + 7) as stage:
            ann, bob = await two_donors(stage)

            def leave(donor: PeerId, body: bytes, payload: bytearray | None) -> None:
                if donor == bob.id and (bob.id, ann.id) in stage.connections:
                    stage.kill(bob)

            stage.spoil_answer = leave
            cid = await stage.add("cid", has_learner=False)
            await stage.wait(30.0)
            assert has_all_of(cid, ann)
            assert cid.faults() == {}

    act(story)


def test_what_ends_when_the_same_is_asked_again_is_not_that_ones_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the machine slept all is due at once: questions are in vain, their donor is lost, and found again."""
    ask, held = StageHost.request, []

    async def request(self: StageHost, peer: PeerId, body: bytes, **limits: Any) -> Response:
        if isinstance(decode_request(body), GetChunk) and len(held) < 2:
            held.append(asyncio.get_running_loop().create_future())
            try:
                await held[-1]
            except asyncio.CancelledError:
                raise RequestError("no answer in time") from None  # what is late is told as that (``within``)
        return await ask(self, peer, body, **limits)

    monkeypatch.setattr(StageHost, "request", request)

    async def story() -> None:
        async with Stage(tmp_path, elements=2 * CHUNK + 7) as stage:
            ann = await stage.found(has_learner=False)
            cid = await stage.add("cid", has_learner=False)
            await stage.wait(3.0)
            assert len(held) == 2
            downloads = cid.peer._downloads
            downloads._cancel(downloads._plan.drop(ann.id))
            downloads._find_donors()
            downloads._ask_more()
            await stage.wait(0.5)
            assert has_all_of(cid, ann), "nothing was asked a third time"

    act(story)


def test_who_has_fetched_a_state_can_give_it(tmp_path: Path) -> None:
    """With the proof that it came with: those who made it are gone."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await two_donors(stage)
            cid = await stage.add("cid", has_learner=False)
            await stage.wait(10.0)
            stage.kill(ann)
            stage.kill(bob)
            dan = await stage.add("dan", has_learner=False)
            await stage.wait(20.0)
            assert min(dan.versions) >= 1
            assert has_all_of(dan, cid)
            assert dan.faults() == {}

    act(story)


def test_a_state_that_comes_while_the_learner_trains_leaves_it_its_progress(tmp_path: Path) -> None:
    """Behind a cut, too long for the others' logs: what it gave meanwhile is restored, and merged once."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await two_donors(stage)
            cid = await stage.add("cid")
            await stage.wait(10.0)
            await stage.ready(cid)
            for other in (ann, bob):
                stage.disconnect(cid, other)
            await stage.wait(5.0)
            await stage.train(cid, *[1.0] * 8)
            mine = cid.versions
            for _ in range(10):
                await stage.train(ann, *[0.5] * 4)
                await stage.wait(1.0)
            assert min(ann.versions) > max(mine)
            for other in (ann, bob):
                stage.connect(cid, other)
            for _ in range(8):
                await stage.wait(5.0)
                await stage.rest(cid)
            learner = cid.machine.core.learner
            assert learner is not None
            assert cid.state.heads == ann.state.heads
            unmerged = torch.cat([torch.full((64,), 8.0 - mark.steps) for mark in learner.marks])
            assert torch.equal(cid.learner.flat(), cid.state.theta + unmerged)

    act(story)


def test_a_state_that_its_maker_signed_and_nothing_leads_to_replaces_nobodys_model(tmp_path: Path) -> None:
    """H3b: heavier heads than all others have, and a state that is signed as it should be, by somebody's own key."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await two_donors(stage)
            key = Identity.ephemeral()
            eve = await stage.add("eve", identity=key, has_learner=False, weight=0.0)
            await stage.wait(10.0)
            assert eve.state.heads == ann.state.heads
            before = ann.state.heads[0]
            forged = forge(eve, key, ShardId(0), stage.manifest.run)
            await stage.wait(20.0)
            await stage.train(ann, *[1.0] * 8)
            await stage.wait(10.0)
            for member in (ann, bob):
                asked = [event for event in member.events if isinstance(event, ev.Failed) and event.work == "fetch"]
                assert any("2 of 3 peers stand" in event.reason for event in asked)
                assert before != member.state.heads[0] != forged
                assert not (member.state.theta[:64] == 7.0).any()
            assert ann.state.heads == bob.state.heads

    act(story)


def forge(eve: Member, key: Identity, shard: ShardId, run: RunId) -> Digest:
    """Eve's shard is full of 7, at a head that is far ahead; all signed by her own key. That head."""
    chain, parent = eve.machine.core.chains[shard], digest_of(b"nobody's")
    theta, momentum = eve.state.theta[:64], eve.state.momentum[:64]
    theta.fill_(7.0)
    listed = digest_list(theta, momentum)
    mine = signed(key, run, shard, parent, Contributor(learner_id(eve.id, "1"), 0, 100, 0, 10), digest_of(b""))
    marks = ((mine.learner, ev.Mark(100, 10, 500)),)
    trained = chain.state().trained
    record = record_of(dict(marks), trained)
    header = CommitHeader(shard, 500, parent, 20, eve.id, (mine,), 10**6, digest_of(b""), digest_of(listed), record)
    head = Head(shard, 500, commit_id(header), header.tokens)
    assert chain.head is not None
    eve.machine.core.heads_mark ^= int(chain.head.id[:15], 16) ^ int(head.id[:15], 16)
    chain.replace(ev.ShardState(head, header.step, marks, trained))
    eve.driver.payload_cache.shards[shard].proofs[head.id] = (header, key.sign(messages.signed_commit_bytes(head.id)))
    eve.state.heads[shard] = head.id
    eve.state.integrity.set_digests(shard, listed)
    return head.id
