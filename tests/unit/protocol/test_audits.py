"""Rules V5 of docs/protocol.md: whoever has the contributions makes a merge again, and a lying owner is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from actors import FOUNDER
from stage import SHARD, A, B, C, D, Stage, digest, head_of, notes, only, sent, tokens, with_payload
from troupe import Member, act
from troupe import Stage as Theatre

from p2pdiloco.codec import merge
from p2pdiloco.peer import audit
from p2pdiloco.peer.audit import ANSWER_S, UNCHECKED, UNCHECKED_PER_S
from p2pdiloco.peer.payload_cache import ShardPayloads
from p2pdiloco.peer.payload_store import Held, PayloadStore
from p2pdiloco.peer.state_server import PAYLOADS
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.audits import AUDIT_SHARE, AUDITED_VERSIONS
from p2pdiloco.protocol.barred_owners import EVIDENCE_MOST, audited_payloads
from p2pdiloco.protocol.chain import no_size
from p2pdiloco.protocol.config import Sizes
from p2pdiloco.protocol.counted_tokens import TokenCounts
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId, learner_id
from p2pdiloco.protocol.norm_bound import MEMORY, NormBound
from p2pdiloco.wire.control_messages import GetPayload, decode_request, encode
from p2pdiloco.wire.request_reply import RequestRefused


def wrong(stage: Stage, owner: PeerId = B, version: int = 1, name: str = "") -> msg.WrongMerge:
    """A proof as the driver brings it."""
    given = with_payload(tokens(C, 0, 40), f"given {owner} {version} {name}")
    return msg.WrongMerge(stage.commit(given, owner=owner, version=version), b"")


def of(header: msg.CommitHeader, *, has_delivered: bool, later: int = 0) -> ev.Audited:
    """An audit whose owner was asked when there were ``later`` further versions."""
    return ev.Audited(header.shard, header.version, header.owner, has_delivered, header.version + later)


# -- what the machine decides ------------------------------------------------------------------------------------------


def test_a_commit_states_the_limit_that_its_merge_kept_to() -> None:
    """V5a: one that states another is not applied."""
    stage = Stage(B, C, has_learner=False, sizes=Sizes(elements=(100,)))
    sound = stage.commit(tokens(C, 0, 40))
    assert sound.longest == stage.machine.core.chains[SHARD].longest(sound.contributors) > 0.0
    effects = stage.hear(B, msg.Commit(msgspec.structs.replace(sound, longest=sound.longest / 2)))
    assert "states" in notes(effects, "commit")[0]
    assert not only(effects, ef.Apply)
    stage = Stage(B, C, owners="abc", has_learner=False, grace_share=0.0, sizes=Sizes(elements=(100,)))
    effects = stage.work(stage.offer(C), ef.Merge)
    (merging,), ((_, sent_), *_) = only(effects, ef.Merge), sent(effects, msg.Commit)
    assert sent_.header.longest == merging.longest > 0.0


def test_all_peers_together_audit_one_commit_in_ten() -> None:
    """V5b: each that applies it and is not its owner with an equal chance; nobody asks an owner that is away."""
    for others in ((B,), (B, C), (B, C, D)):
        stage = Stage(*others)
        header = stage.commit(tokens(C, 0, 40), owner=B)
        (audit,) = only(stage.take(header), ef.Audit)
        assert (audit.shard, audit.commit) == (SHARD, head_of(header).id)
        assert audit.chance * len(others) == pytest.approx(AUDIT_SHARE)
    own = Stage(B, owners="ab", has_learner=False, grace_share=0.0)
    assert not only(own.work(own.offer(B)), ef.Audit)
    assert own.head().version == 1
    stage = Stage(C)
    assert not only(stage.take(stage.commit(tokens(C, 0, 40), owner=B), sender=C), ef.Audit), "its owner is away"
    stage.tell(ev.Contradicted(wrong(stage, C)))
    assert not only(stage.take(stage.commit(tokens(C, 40, 80), owner=C), sender=C), ef.Audit)


@pytest.mark.parametrize(
    ("counted", "length", "usual", "expected"),
    [(1, 1.0, 0, 2.0), (MEMORY, 11.0, 0, 2.0), (MEMORY, 7.0, 0, 0.1), (1, 1.0, 9, 0.1)],
)
def test_steps_with_which_an_owner_could_do_most_harm_are_audited_by_two(
    counted: int, length: float, usual: int, expected: float
) -> None:
    """V5b: those of a young chain, and those of more than two mean lengths (here 4 for a round), but not of few
    contributions, whose merges are short."""
    stage = Stage(B, C, D, has_learner=False, sizes=Sizes(elements=(100,)))
    chain = stage.machine.core.chains[SHARD]
    chain.norm_bound = NormBound(counted, 0)
    chain.counts = TokenCounts(usual=tuple((number, 0) for number in range(usual)))
    given = (tokens(B, 0, 40), tokens(C, 0, 40), tokens(D, 0, 40))
    header = stage.commit(*given, owner=B, length=length, record=chain.record_after(1, given, length))
    (audit,) = only(stage.take(header), ef.Audit)
    assert 3 * audit.chance == pytest.approx(expected)


def test_an_owner_that_merged_wrongly_owns_nothing_and_all_are_told() -> None:
    """V5c: as for two commits of one parent: all hear of it, also those who come later, and after a restart."""
    stage = Stage(B, C, D)
    proof = wrong(stage)
    effects = stage.tell(ev.Contradicted(proof))
    assert dict(sent(effects, msg.WrongMerge)) == {B: proof, C: proof, D: proof}
    (said,) = notes(effects, "wrong-merge")
    assert f"{B} has put other values into version 1" in said
    assert f"members ban {B}" in said
    stage.wait(1.0)
    assert B not in {peer for peer, _ in stage.machine.core.membership.owners.candidates}
    assert (PeerId("e"), proof) in sent(stage.meet(PeerId("e")), msg.WrongMerge)
    assert not sent(stage.tell(ev.Contradicted(wrong(stage, version=2))), msg.WrongMerge), "one is enough"
    again = Stage(B, is_founder=False, has_learner=False)
    state = stage.machine.core.chains[SHARD].state()
    again.tell(ev.Started((state,), convictions=stage.machine.view.convictions()))
    assert B in again.machine.view.barred


def test_an_owner_keeps_for_a_while_what_it_merged() -> None:
    """V5f: of the last versions, within the driver's limit, and always of its newest merge among them."""
    stage = Stage(B, C, has_learner=False, log_length=16)
    made: list[msg.CommitHeader] = []
    for version in range(AUDITED_VERSIONS + 1):
        given = with_payload(tokens(C, 40 * version, 40 * version + 40), f"given {version}")
        header = stage.commit(given, owner=B if version == 1 else A)
        made.append(header)
        stage.take(header)
    kept = stage.machine.audits.payloads(SHARD, no_size, 0)
    assert kept == set().union(*map(audited_payloads, made[2:]))
    assert kept <= stage.machine.payloads(SHARD)
    limited = stage.machine.audits.payloads(SHARD, lambda _: 10, 45)
    assert limited == set().union(*map(audited_payloads, made[-2:]))
    assert stage.machine.audits.payloads(SHARD, lambda _: 10, 0) == audited_payloads(made[-1])


def test_what_proves_a_wrong_merge_is_kept_for_others() -> None:
    """V5f: of the latest."""
    stage = Stage(B)
    proofs = [wrong(stage, PeerId(f"e{number}"), name=str(number)) for number in range(EVIDENCE_MOST + 2)]
    for proof in proofs:
        stage.tell(ev.Contradicted(proof))
    headers = [proof.header for proof in proofs[2:]]
    assert stage.machine.barred_owners.payloads(SHARD) == set().union(*map(audited_payloads, headers))
    assert stage.machine.barred_owners.payloads(SHARD) <= stage.machine.payloads(SHARD)
    assert {msg.commit_id(header) for header in headers} <= stage.machine.commits(SHARD)
    assert len(stage.machine.view.barred) == EVIDENCE_MOST + 2


def commit_of(stage: Stage, owner: PeerId) -> tuple[msg.CommitHeader, float]:
    """A commit of ``owner`` of what C gives, which is applied, and the chance of its audit."""
    version = stage.head().version
    given = with_payload(tokens(C, 40 * version, 40 * version + 40), f"given {version}")
    header = stage.commit(given, owner=owner)
    (audit,) = only(stage.take(header, sender=owner), ef.Audit)
    return header, audit.chance


def test_an_owner_that_does_not_deliver_counts_as_one_that_missed() -> None:
    """V5g: only if it was asked while it should still have it, however long it takes to answer; it is never barred.
    What it made before may be lost, as it may have restarted. All that it makes from then on is audited until it
    delivers, and no commit of its own makes up for it."""
    stage = Stage(B, C, log_length=16)
    missed = stage.machine.core.membership.owners._missed
    before, chance = commit_of(stage, B)
    assert chance < 0.1
    stage.tell(of(before, has_delivered=False))
    header, chance = commit_of(stage, B)
    assert chance == 1.0
    stage.tell(of(before, has_delivered=False))
    assert not missed, "it was made before"
    assert notes(stage.tell(of(header, has_delivered=False)), "audit")
    assert set(missed) == {B}
    assert commit_of(stage, B)[1] == 1.0
    assert set(missed) == {B}, "though it made a commit"
    header, _ = commit_of(stage, B)
    stage.tell(of(header, has_delivered=True))
    commit_of(stage, B)
    assert not missed
    assert B not in stage.machine.view.barred
    stage.tell(of(header, has_delivered=False, later=2))
    assert not missed, "it was asked when it need not have them any more"
    header, _ = commit_of(stage, B)
    stage.beats.pop(B)
    stage.tell(ev.PeerDisconnected(B, "gone"))
    stage.tell(of(header, has_delivered=False))
    assert not missed, "who is away cannot be asked"


def test_an_owner_is_excused_once() -> None:
    """V5g: else it showed nothing of its lies, delivered one true merge, and lied again for nothing."""
    stage = Stage(B, C, log_length=16)
    missed = stage.machine.core.membership.owners._missed
    for is_excused in (True, False):
        header, chance = commit_of(stage, B)
        assert chance < 0.1
        stage.tell(of(header, has_delivered=False))
        assert bool(missed) != is_excused
        header, chance = commit_of(stage, B)
        assert chance == 1.0
        stage.tell(of(header, has_delivered=True))


# -- whole peers -------------------------------------------------------------------------------------------------------


def lying(member: Member) -> None:
    """From now on it puts one value of its own into each merge."""
    sound = member.state.merge

    def merged(*given: Any, **options: Any) -> Any:
        encode = merge.encode

        def changed(how: Any, values: torch.Tensor, *rest: Any) -> Any:
            values[3] += 1.0
            return encode(how, values, *rest)

        merge.encode = changed
        try:
            return sound(*given, **options)
        finally:
            merge.encode = encode

    member.state.merge = merged  # type: ignore[method-assign]


async def company(stage: Theatre) -> tuple[Member, Member, Member]:
    """Ann, who trains and owns everything, Bob, who follows, and Cat, who does, too."""
    ann = await stage.found()
    bob = await stage.beside(has_learner=False)
    cat = await stage.add("cat", None, has_learner=False, weight=0.0)
    await stage.wait(3.0)
    assert cat.machine.view.is_current
    return ann, bob, cat


async def audited(stage: Theatre, owner: Member, auditor: Member) -> list[ev.Audited]:
    """How the audits of ``auditor`` end, which audits each of some merges of ``owner``."""
    auditor.draws = 0.0
    await stage.train(owner, *[1.0] * 8)
    await stage.settle()
    return [event for event in auditor.events if isinstance(event, ev.Audited)]


def newest(member: Member) -> tuple[msg.CommitHeader, bytes]:
    """The signed commit at the head of a shard that has one."""
    header = member.machine.view.newest_commits()[0]
    _, signature = member.driver.payload_cache.shards[header.shard].proofs[msg.commit_id(header)]
    return header, signature


def test_a_right_merge_is_made_again_and_nothing_follows(tmp_path: Path) -> None:
    """V5c: of every commit, here; what is needed comes from the owner."""

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob, cat = await company(stage)
            ended = await audited(stage, ann, bob)
            assert len(ended) >= 4
            assert all(event.has_delivered for event in ended)
            assert not [event for event in cat.events if isinstance(event, ev.Audited)], "it draws for itself"
            assert not bob.machine.view.barred
            assert not bob.faults()

    act(story)


@pytest.mark.parametrize("limit", ["MOST_AUDITED_BYTES", "MEMORY_BYTES"])
@pytest.mark.parametrize("is_known", [True, False])
def test_an_owner_whose_merges_are_too_large_to_be_audited_is_not_blamed(
    limit: str, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """V5g: nothing is fetched in vain if the commit shows how large they are; the log says so once."""
    monkeypatch.setattr(audit, limit, 1)
    monkeypatch.setattr(PayloadStore, "may_write", lambda _: limit == "MOST_AUDITED_BYTES")
    if not is_known:
        monkeypatch.setattr(ShardPayloads, "size_of", lambda *_: 0)

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob, _ = await company(stage)
            lying(ann)
            before = bob.asked.total()
            assert not await audited(stage, ann, bob)
            assert (bob.asked.total() == before) == is_known
            assert sum("are not audited" in record.getMessage() for record in caplog.records) == 1

    act(story)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_merge_as_large_as_the_limit_is_audited(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """V5c, V5g: one byte more is not."""

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob, _ = await company(stage)
            lying(ann)
            bob.draws = 0.0
            monkeypatch.setattr(ShardPayloads, "size_of", lambda *_: 50)
            monkeypatch.setattr(Held, "__len__", lambda _: 50)
            monkeypatch.setattr(audit, "MOST_AUDITED_BYTES", 100 - more)
            await stage.train(ann, 1.0, 1.0)
            await stage.settle()
            assert (ann.id in bob.machine.view.barred) == (more <= 0)
            assert any("are not audited" in record.getMessage() for record in caplog.records) == (more > 0)

    act(story)


def test_a_large_merge_is_made_again_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V5c, V5d: of true merges nothing stays there; what proves a wrong one is shown from there."""
    monkeypatch.setattr(audit, "SPILL_BYTES", 0)
    monkeypatch.setattr(audit, "merge_problem", watched := Mock(side_effect=audit.merge_problem))

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob, cat = await company(stage)
            ended = await audited(stage, ann, bob)
            assert len(ended) >= 4
            assert all(event.has_delivered for event in ended)
            assert any(held.data is None for call in watched.mock_calls for held in call.args[1].values())
            lying(ann)
            await stage.train(ann, 1.0, 1.0)
            await stage.settle()
            assert bob.faults() == {"merge": 1}
            assert ann.id in cat.machine.view.barred

    act(story)


def test_a_lying_owner_is_found_and_each_finds_it_for_itself(tmp_path: Path) -> None:
    """V5c, V5d: by one audit; the others fetch what proves it from the accuser, as the owner shows it to nobody."""

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob, cat = await company(stage)
            lying(ann)
            bob.draws = 0.0
            asked: list[PeerId] = []

            async def answer(peer: PeerId, body: bytes) -> Any:
                asked.append(peer)
                if peer != bob.id:
                    raise RequestRefused("not for you")
                return await honest(peer, body)

            honest, ann.peer.answer = ann.peer.answer, answer  # type: ignore[method-assign]
            await stage.train(ann, 1.0, 1.0)
            await stage.settle()
            assert bob.faults() == {"merge": 1}
            assert ann.id in bob.machine.view.barred
            assert ann.id in cat.machine.view.barred
            assert set(asked) == {bob.id}
            assert cat.asked[bob.id]
            stage.kill(ann)
            dan = await stage.add("dan", None, has_learner=False, weight=0.0)
            await stage.wait(3.0)
            assert ann.id in dan.machine.view.barred, "who comes later makes the merge again, too"
            await stage.wait(5.0)
            stage.kill(bob)
            again = await stage.add("bob", None, has_learner=False, weight=0.0)
            assert ann.id in again.machine.view.barred, "it is on the disk"

    act(story)


def test_an_accuser_whose_word_does_not_hold_is_not_heard_again(tmp_path: Path) -> None:
    """V5d, V5e: a right merge, a commit that nobody signed; one that cannot be checked costs nothing."""

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob, cat = await company(stage)
            await stage.train(ann, 1.0, 1.0)
            header, signature = newest(bob)
            await stage.deliver(bob, cat.id, msg.WrongMerge(header, signature))
            assert bob.faults() == {"accusation": 1}
            assert not bob.machine.view.barred
            before = bob.asked[cat.id] + bob.asked[ann.id]
            foreign = msgspec.structs.replace(header, payload=digest("gone"))
            signed = _signed(foreign)
            for accusation in (msg.WrongMerge(header, signature), msg.WrongMerge(foreign, signed)):
                await stage.deliver(bob, cat.id, accusation)
            assert bob.faults() == {"accusation": 1}
            assert bob.asked[cat.id] + bob.asked[ann.id] == before, "it is not heard"
            await stage.deliver(cat, bob.id, msg.WrongMerge(foreign, bytes(64)))
            assert cat.faults() == {"accusation": 1}
            await stage.deliver(ann, bob.id, msg.WrongMerge(foreign, signed))
            assert not ann.faults(), "its own commits it knows better"
            dan = await stage.add("dan", None, has_learner=False, weight=0.0)
            await stage.wait(3.0)
            for _ in range(2):
                await stage.deliver(dan, bob.id, msg.WrongMerge(foreign, signed))
            assert not dan.faults()
            assert not dan.machine.view.barred
            assert dan.asked[ann.id] >= 2

    act(story)


def unsigned(member: Member) -> None:
    """From now on it names others' contributions without their signatures."""
    feed = member.driver.feed

    def changed(event: ev.Event) -> None:
        if isinstance(event, ev.Received) and isinstance(event.message, msg.Contribution):
            contributor = msgspec.structs.replace(event.message.contributor, signature=bytes(64))
            event = msgspec.structs.replace(
                event, message=msgspec.structs.replace(event.message, contributor=contributor)
            )
        feed(event)

    member.driver.feed = changed  # type: ignore[method-assign]


def test_a_contribution_that_was_not_made_convicts_without_a_payload(tmp_path: Path) -> None:
    """G2f, V5d: the commit alone proves it, to everybody who is told; its owner's signature must be right."""

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob, cat = await company(stage)
            await stage.train(ann, 1.0, 1.0)
            header, _ = newest(bob)
            own = header.contributors[0]
            others = msgspec.structs.replace(own, learner=learner_id(cat.id, "1"))
            false = msgspec.structs.replace(header, contributors=(*header.contributors, others))
            await stage.deliver(bob, cat.id, msg.WrongMerge(false, bytes(64)))
            assert bob.faults() == {"accusation": 1}
            assert not bob.machine.view.barred
            before = cat.asked.total()
            await stage.deliver(cat, bob.id, msg.WrongMerge(false, _signed(false)))
            assert cat.faults() == {"merge": 1}
            assert cat.asked.total() == before, "it needs no payload"
            assert ann.id in cat.machine.view.barred
            assert ann.id not in bob.machine.view.barred, "it does not hear whom it ignores"

    act(story)


def test_an_owner_that_names_what_was_not_given_is_found(tmp_path: Path) -> None:
    """G2f: at once, by all that hear it; who comes later finds it in the state that the liar offers."""

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside()
            cat = await stage.add("cat", None, has_learner=False, weight=0.0)
            await stage.wait(3.0)
            stage.disconnect(bob, cat)
            unsigned(ann)
            for _ in range(2):
                bob.learner.step(1.0)
                ann.learner.step(1.0)
                await stage.rest(bob)
                await stage.rest(ann)
            await stage.settle()
            stage.kill(bob)
            stage.kill(cat)
            dan = await stage.add("dan", None, has_learner=False, weight=0.0)
            await stage.wait(3.0)
            for member, what in ((bob, "payload"), (cat, "payload"), (dan, "state")):
                assert ann.id in member.machine.view.barred
                assert member.faults().keys() == {what}
                assert max(member.versions) <= 0

    act(story)


def never_answers(member: Member, after_s: float = 1e9) -> None:
    """From now on it lets every question for a payload wait so long, and then refuses."""
    honest = member.peer.answer

    async def answer(peer: PeerId, body: bytes) -> Any:
        if isinstance(decode_request(body), GetPayload):
            await member.host.sleep(after_s)
            raise RequestRefused("not for you")
        return await honest(peer, body)

    member.peer.answer = answer  # type: ignore[method-assign]


async def beside_a_silent_liar(stage: Theatre, after_s: float = 1e9) -> tuple[Member, Member]:
    """Ann, who merges wrongly and answers auditors so late, and Bob, who audits all that she makes."""
    ann, bob, _ = await company(stage)
    bob.draws = 0.0
    lying(ann)
    never_answers(ann, after_s)
    return ann, bob


def test_accusations_that_cannot_be_checked_are_few(tmp_path: Path) -> None:
    """V5e: of one peer; once an hour it may try again."""

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob, cat = await company(stage)
            await stage.train(ann, 1.0, 1.0)
            header, _ = newest(bob)
            foreign = msgspec.structs.replace(header, payload=digest("gone"))
            await stage.settle()
            before = bob.asked[cat.id]
            for _ in range(3 * UNCHECKED):
                await stage.deliver(bob, cat.id, msg.WrongMerge(foreign, _signed(foreign)))
            assert bob.asked[cat.id] - before == UNCHECKED
            assert not cat.faults()
            stage.now += 1.01 / UNCHECKED_PER_S
            for _ in range(3):
                await stage.deliver(bob, cat.id, msg.WrongMerge(foreign, _signed(foreign)))
            assert bob.asked[cat.id] - before == UNCHECKED + 1

    act(story)


def test_no_accuser_delays_audits_or_other_accusers(tmp_path: Path) -> None:
    """V5e: one whose payloads never come has them wait, one accusation at a time, and nobody else."""

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob, cat = await company(stage)
            dan = await stage.add("dan", None, has_learner=False, weight=0.0)
            await stage.wait(3.0)
            await stage.train(ann, 1.0, 1.0)
            header, signature = newest(bob)
            foreign = msgspec.structs.replace(header, payload=digest("gone"))
            never_answers(cat)
            for _ in range(UNCHECKED):
                await stage.deliver(bob, cat.id, msg.WrongMerge(foreign, _signed(foreign)))
            bob.draws = 0.0
            await stage.train(ann, 1.0, 1.0)
            ended = [event for event in bob.events if isinstance(event, ev.Audited)]
            assert ended, "its own audits go on"
            assert all(event.has_delivered for event in ended)
            await stage.deliver(bob, dan.id, msg.WrongMerge(header, signature))
            await stage.wait(2.0 * ANSWER_S)
            assert bob.faults() == {"accusation": 1}, "the other accuser comes next"

    act(story)


def test_an_owner_that_takes_its_time_does_not_escape(tmp_path: Path) -> None:
    """V5g: it answers for nothing until two versions have passed; it is judged by when it was asked."""

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob = await beside_a_silent_liar(stage, 2.0)
            await stage.train(ann, *[1.0] * 12)
            await stage.wait(2.0 * ANSWER_S)
            first = next(event for event in bob.events if isinstance(event, ev.Audited))
            assert not first.has_delivered
            assert bob.versions[first.shard] > first.version + 1
            assert first.head_version == first.version

    act(story)


def test_what_is_long_past_is_not_audited(tmp_path: Path) -> None:
    """V5g: when its turn comes, the owner has dropped the contributions."""

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob = await beside_a_silent_liar(stage)
            await stage.train(ann, *[1.0] * 30)
            assert bob.asked[ann.id]
            bob.draws = 1.0
            before = bob.asked[ann.id]
            await stage.wait(10.0 * ANSWER_S)
            assert bob.asked[ann.id] == before

    act(story)


def test_an_owner_shows_what_it_merged_and_nothing_else(tmp_path: Path) -> None:
    """V5f: and so often to one peer."""

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob, _ = await company(stage)
            await stage.train(ann, 1.0, 1.0)
            header, _ = newest(ann)
            commit = msg.commit_id(header)
            given = Digest(header.contributors[0].payload.hex())
            for payload in (given, header.payload):
                answer = await ann.peer.answer(bob.id, encode(GetPayload(header.shard, commit, payload)))
                held = ann.driver.payload_cache.shards[header.shard].payloads[payload]
                assert held.data is not None
                assert answer.payload is not None
                assert bytes(answer.payload) == bytes(held.data)
            for shard, named, payload in (
                (header.shard, commit, digest("other")),
                (header.shard, digest("other"), given),
                (ShardId(99), commit, given),
            ):
                with pytest.raises(RequestRefused):
                    await ann.peer.answer(bob.id, encode(GetPayload(shard, named, payload)))
            question = encode(GetPayload(header.shard, commit, given))
            for _ in range(PAYLOADS - 5):
                await ann.peer.answer(bob.id, question)
            with pytest.raises(RequestRefused, match="too many"):
                await ann.peer.answer(bob.id, question)

    act(story)


def _signed(header: msg.CommitHeader) -> bytes:
    """By the founder, who owns everything here."""
    return FOUNDER.sign(messages.signed_commit_bytes(msg.commit_id(header)))


def test_an_audit_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """V5g: the owner shows something else than it was given. That proves nothing."""

    async def story() -> None:
        async with Theatre(tmp_path) as stage:
            ann, bob, _ = await company(stage)
            lying(ann)
            bob.draws = 0.0

            def spoil(peer: PeerId, body: bytes, payload: bytearray | None) -> None:
                if payload is not None:
                    payload[-1] ^= 1

            stage.spoil_answer = spoil
            await stage.train(ann, 1.0, 1.0)
            await stage.settle()
            ended = [event for event in bob.events if isinstance(event, ev.Audited)]
            assert ended
            assert not any(event.has_delivered for event in ended)
            assert bob.faults() == {"payload": len(ended)}
            assert not bob.machine.view.barred

    act(story)
