"""What the driver lets through and what it keeps: whole peers on a stage, whose messages the test spoils."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from actors import genesis
from troupe import Member, Stage, act

from p2pdiloco.codec import compression
from p2pdiloco.codec.digests import list_bytes
from p2pdiloco.peer.checkpoint import load
from p2pdiloco.peer.payload_cache import SWEEP_S, SWEPT_AT_ONCE, PayloadCache
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.peer.signatures import signed
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId, RunId, ShardId, digest_of, learner_id
from p2pdiloco.protocol.manifest import TensorSpec, make_layout
from p2pdiloco.protocol.messages import SIGNATURE_BYTES
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire.control_messages import CommitParts, encode, join_commit, split_commit


def test_a_peer_alone_trains_and_every_token_stands_in_the_parameters_once(tmp_path: Path) -> None:
    """The stage itself: steps of 1 move the learner; what it gives comes back by the outer step, rate times momentum's
    look ahead."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            assert torch.equal(ann.learner.flat(), torch.ones(128))
            await stage.train(ann, 1.0, 1.0, 1.0, 1.0)
            assert ann.versions == [1, 1]
            # Fragment 1 gives 2 after two steps, fragment 0 gives 4 after four: theta = 1 + 0.5 * 1.5 * given.
            assert torch.equal(ann.state.theta, halves(4.0, 2.5))
            assert torch.equal(ann.learner.flat(), ann.state.theta + halves(0.0, 2.0))

    act(story)


@pytest.mark.parametrize(
    ("line", "codec", "is_coded"), [(None, "int4", True), (math.inf, "int4", False), (math.inf, "bf16", True)]
)
def test_both_directions_leave_huffman_codes_out_on_a_fast_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: float | None, codec: str, is_coded: bool
) -> None:
    made, join, store = list[bool](), compression.join, compression.store

    def coded(bodies: Iterable[bytes]) -> bytes:
        made.append(True)
        return join(bodies)

    def stored(payload: memoryview, sizes: Sequence[int]) -> memoryview:
        made.append(False)
        return store(payload, sizes)

    monkeypatch.setattr(compression, "join", coded)
    monkeypatch.setattr(compression, "store", stored)

    async def story() -> None:
        async with Stage(tmp_path, codec=codec) as stage:
            ann = await stage.found()
            await stage.add("bob", None, has_learner=False, weight=0.0)  # to whom the commit goes
            await stage.wait(3.0)
            ann.host.line_bytes_per_s = line
            await stage.train(ann, 1.0, 1.0)
            assert ann.versions == [0, 1]
            assert made == [is_coded and codec == "bf16", is_coded]  # the first it gives to itself

    act(story)


def test_the_machine_is_told_of_a_slow_line_once(tmp_path: Path) -> None:
    """O1c."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.beside(has_learner=False)
            await stage.train(ann, 1.0, 1.0)
            assert ev.LineChanged("slow") not in ann.events
            ann.host.line_bytes_per_s = 1e-3
            await stage.train(ann, *[1.0] * 6)
            assert ann.events.count(ev.LineChanged("slow")) == 1
            assert ann.machine.core.weight == 0.5

    act(story)


WAITS_S = 60.0
"""Longest takeover time."""


@pytest.mark.parametrize("work", ["merge", "encode", "apply"])
@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory: 12"), MemoryError()])
def test_a_shortage_of_memory_ends_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, error: Exception
) -> None:
    """The work is done later; what was trained waits."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()

            def fail(*given: object, **named: object) -> None:
                raise error

            with monkeypatch.context() as shortage:
                shortage.setattr(ann.state, work, fail)
                await stage.train(ann, 1.0, 1.0)
                assert ann.versions == [0, 0]
            await stage.wait(2 * WAITS_S)
            await stage.train(ann, *[1.0] * 8)
            assert min(ann.versions) >= 1

    act(story)


def test_a_newcomer_without_memory_for_the_state_ends_with_a_sentence(tmp_path: Path) -> None:
    """To fetch it again and again would only load the donors."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            await stage.found()
            bob = await stage.add("bob", has_learner=False)

            def fail(*given: object) -> None:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 12")

            bob.state.install = fail  # type: ignore[assignment,method-assign]
            await stage.wait(30.0)
            assert bob.ending is not None
            assert bob.ending.status == 1
            assert bob.ending.reason.startswith("no memory left (DefaultCPUAllocator")

    act(story)


def halves(first: float, second: float) -> torch.Tensor:
    """A vector of the run's two shards."""
    return torch.cat((torch.full((64,), first), torch.full((64,), second)))


def is_commit(sender: PeerId, to: PeerId, message: msg.Message) -> bool:
    return isinstance(message, msg.Commit)


async def with_commit(stage: Stage) -> tuple[Member, Member, msg.CommitHeader, CommitParts]:
    """The founder, who owns everything, a peer that follows, and a commit that has not reached that one."""
    ann = await stage.found()
    bob = await stage.beside(has_learner=False)
    stage.catch = is_commit
    await stage.train(ann, 1.0, 1.0)
    (caught,) = stage.caught
    assert isinstance(caught.message, msg.Commit)
    return ann, bob, caught.message.header, split_commit(memoryview(caught.payload), list_bytes(64))


def test_a_commit_that_its_owner_did_not_sign_is_dropped(tmp_path: Path) -> None:
    """With payload and digests in order: nothing but the signature is wrong."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob, header, parts = await with_commit(stage)
            stranger = Identity.ephemeral()
            renamed = msgspec.structs.replace(header, owner=stranger.peer_id)
            unsigned = (
                (header, bytes(SIGNATURE_BYTES)),
                (header, stranger.sign(messages.signed_commit_bytes(msg.commit_id(header)))),
                (header, stranger.sign(msg.commit_id(header).encode())),
                (renamed, parts.signature),
            )
            for number, (claimed, signature) in enumerate(unsigned, 1):
                await stage.deliver(bob, ann.id, msg.Commit(claimed), join_commit(parts._replace(signature=signature)))
                assert bob.faults() == {"payload": number}
                assert bob.versions == [0, 0]
            await stage.deliver(bob, ann.id, msg.Commit(header), join_commit(parts))
            assert bob.versions == [0, 1]
            assert bob.faults() == {"payload": len(unsigned)}

    act(story)


def test_a_commit_that_names_what_its_learners_did_not_give_is_dropped(tmp_path: Path) -> None:
    """G2f: its owner signed it, and speaks in others' names, or says more of them than they did."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob, header, parts = await with_commit(stage)
            (genuine,) = header.contributors
            stranger = Identity.ephemeral()
            lies = (
                msgspec.structs.replace(genuine, tokens_to=genuine.tokens_to + 1),
                msgspec.structs.replace(genuine, blocks=(Block(7),)),
                msgspec.structs.replace(genuine, learner=learner_id(bob.id, "1")),
                msgspec.structs.replace(genuine, learner=learner_id(Identity.ephemeral().peer_id, "1")),
                msgspec.structs.replace(genuine, signature=b""),
            )
            for number, lie in enumerate(lies, 1):
                said = msgspec.structs.replace(header, contributors=(lie,), owner=stranger.peer_id)
                signature = stranger.sign(messages.signed_commit_bytes(msg.commit_id(said)))
                sent = join_commit(parts._replace(signature=signature))
                await stage.deliver(bob, ann.id, msg.Commit(said), sent)
                assert bob.faults() == {"payload": number}
                assert bob.versions == [0, 0]
            assert stranger.peer_id in bob.machine.view.barred
            assert ann.id not in bob.machine.view.barred
            await stage.deliver(bob, ann.id, msg.Commit(header), join_commit(parts))
            assert bob.versions == [0, 1]

    act(story)


def test_a_commit_with_other_parts_than_it_names_is_dropped(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob, header, parts = await with_commit(stage)
            other = bytearray(parts.gradient)
            other[-1] ^= 1
            listed = bytearray(parts.digests)
            listed[0] ^= 1
            spoilt = (parts._replace(gradient=bytes(other)), parts._replace(digests=bytes(listed)))
            for number, wrong in enumerate(spoilt, 1):
                await stage.deliver(bob, ann.id, msg.Commit(header), join_commit(wrong))
                assert bob.faults() == {"payload": number}
                assert not any(
                    isinstance(event, ev.Received) and event.message == msg.Commit(header) for event in bob.events
                )
            await stage.deliver(bob, ann.id, msg.Commit(header), join_commit(parts)[: SIGNATURE_BYTES + 3])
            await stage.deliver(bob, ann.id, msg.Commit(header))
            assert bob.faults() == {"payload": 4}
            assert bob.versions == [0, 0]

    act(story)


def test_a_contribution_that_is_not_what_it_names_is_dropped(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(has_learner=False)
            bob = await stage.beside()
            stage.catch = lambda sender, to, message: isinstance(message, msg.Contribution)
            await stage.train(bob, 1.0, 1.0)
            caught = stage.caught[0]
            assert caught.to == ann.id
            other = bytearray(caught.payload)
            other[-1] ^= 1
            await stage.deliver(ann, bob.id, caught.message, bytes(other))
            assert ann.faults() == {"payload": 1}
            assert isinstance(caught.message, msg.Contribution)
            more = msgspec.structs.replace(caught.message.contributor, tokens_to=10**6)  # G1a
            unsigned = msgspec.structs.replace(caught.message, contributor=more)
            await stage.deliver(ann, bob.id, unsigned, caught.payload)
            assert ann.faults() == {"payload": 2}
            assert ann.versions == [0, 0]
            await stage.deliver(ann, bob.id, caught.message, caught.payload)
            assert ann.versions == [0, 1]

    act(story)


def test_a_learner_whose_merged_payload_is_gone_takes_the_global_parameters(tmp_path: Path) -> None:
    """What it has in common with the merged state cannot be told any more: kept, it would be merged again."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside()
            resets: list[bool] = []

            def forget(event: ev.Event, effects: list[ef.Effect]) -> None:
                for effect in effects:
                    if isinstance(effect, ef.Apply) and effect.settled:
                        resets.append(effect.is_reset)
                        del bob.driver.payload_cache.shards[effect.header.shard].payloads[effect.settled[0]]

            bob.before = forget
            for _ in range(2):
                ann.learner.step(1.0)
                bob.learner.step(4.0)
            for _ in range(2):
                await stage.rest(ann)
                await stage.rest(bob)
            assert ann.versions == bob.versions == [0, 1]
            assert resets == [False], "the machine does not know that the payload is gone"
            assert torch.equal(ann.learner.flat(), ann.state.theta + halves(2.0, 0.0))
            assert torch.equal(bob.learner.flat(), bob.state.theta + halves(8.0, 0.0))

    act(story)


def test_a_merge_whose_payload_is_gone_fails(tmp_path: Path) -> None:
    """A commit that names it would say that its tokens are merged. The learner, who has it all, gives anew."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()

            def forget(event: ev.Event, effects: list[ef.Effect]) -> None:
                is_first = not any(isinstance(event, ev.Failed) for event in ann.events)
                if is_first and any(isinstance(effect, ef.Merge) for effect in effects):
                    for shelf in ann.driver.payload_cache.shards:
                        shelf.payloads.clear()

            ann.before = forget
            await stage.train(ann, 1.0, 1.0)
            failed = [event for event in ann.events if isinstance(event, ev.Failed)]
            assert [(event.work, event.shard, event.peer) for event in failed] == [
                ("merge", 1, ann.id),
                ("give", 1, None),
            ]
            assert ann.versions == [0, 1]
            assert torch.equal(ann.learner.flat(), ann.state.theta + halves(2.0, 0.0))

    act(story)


def test_own_contributions_are_kept_until_it_is_known_what_became_of_them(tmp_path: Path) -> None:
    """A commit that comes long after the sweep settles them, and the learner keeps what it trained since."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside()
            stage.catch = is_commit
            for _ in range(2):
                ann.learner.step(1.0)
                bob.learner.step(4.0)
            for _ in range(2):
                await stage.rest(ann)
                await stage.rest(bob)
            await stage.wait(3 * SWEEP_S)
            await stage.train(bob, 0.5)
            caught = stage.caught[0]
            await stage.deliver(bob, ann.id, caught.message, caught.payload)
            await stage.rest(bob)
            assert bob.versions == [0, 1]
            assert torch.equal(bob.learner.flat(), bob.state.theta + halves(8.5, 0.5))

    act(story)


def test_many_shards_are_swept_a_few_at_a_time() -> None:
    """None is left out, and no call looks at more than a few."""
    shards = 20
    specs = tuple(
        TensorSpec(name=f"w{number}", shape=(16,), merge="direct", fragment=FragmentId(number))
        for number in range(shards)
    )
    payload_cache = PayloadCache(make_layout(specs, shards, 16, "direct"), Identity.ephemeral(), RunId("run"))
    asked: list[int] = []

    class Needless:
        def payloads(self, shard: ShardId, *_: object) -> set[Digest]:
            asked.append(shard)
            return set()

        def commits(self, shard: ShardId) -> set[Digest]:
            return set()

    for shelf in payload_cache.shards:
        shelf.put(Digest("unknown"), b"left over")
    for call in range(1, 5):
        payload_cache.sweep(Needless(), 100.0 * call)  # type: ignore[arg-type]
        assert len(asked) <= SWEPT_AT_ONCE * call
    assert not any(shelf.payloads for shelf in payload_cache.shards)


def test_payloads_that_nobody_needs_are_dropped(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, *[1.0] * 8)
            for shelf in ann.driver.payload_cache.shards:
                shelf.put(Digest("unknown"), b"left over")
            await stage.wait(2 * SWEEP_S)
            for shard, shelf in enumerate(ann.driver.payload_cache.shards):
                log = ann.machine.core.chains[shard].log
                assert len(log) == 2
                assert set(shelf.payloads) == ann.machine.payloads(ShardId(shard))
                assert set(shelf.proofs) == {msg.commit_id(header) for header in log}
                assert set(shelf.digests) == {header.result for header in log}

    act(story)


def test_who_was_away_gets_the_versions_it_missed_and_not_the_state(tmp_path: Path) -> None:
    """Long after they were made: what belongs to the log is kept."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside(has_learner=False)
            stage.disconnect(ann, bob)
            await stage.train(ann, *[1.0] * 12)
            await stage.wait(3 * SWEEP_S)
            assert bob.versions == [0, 0]
            stage.connect(ann, bob)
            await stage.wait(10.0)
            assert bob.versions == ann.versions == [3, 3]
            assert torch.equal(bob.state.theta, ann.state.theta)
            assert not any(isinstance(event, ev.Fetched) for event in bob.events)

    act(story)


def test_the_proof_of_a_head_is_kept_without_a_log(tmp_path: Path) -> None:
    """A peer that starts from its checkpoint has no log; whoever joins later must still be shown who signed."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, *[1.0] * 4)
            await stage.wait(1.0)
            stage.kill(ann)
            found = load(tmp_path / "ann" / "checkpoint")
            assert found is not None
            for segment in (tmp_path / "ann" / "checkpoint").glob("since-*"):
                segment.unlink()  # its own commits would tell as well
            again = await stage.add("ann", InitialState(found.shards, found.theta, found.momentum), has_learner=False)
            await stage.wait(3 * SWEEP_S)
            newcomer = await stage.add("cid", has_learner=False)
            await stage.wait(10.0)
            assert newcomer.versions == again.versions == [1, 1]
            assert newcomer.faults() == {}

    act(story)


def test_a_payload_that_cannot_be_merged_is_its_senders_fault_and_the_others_are_merged(tmp_path: Path) -> None:
    """It has the digest that it promised, and is no gradient."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            key = Identity.ephemeral()
            bob = await stage.add("bob", genesis(stage.manifest), identity=key, weight=0.0)
            await stage.ready(bob)
            await stage.wait(3.0)
            stage.catch = lambda sender, to, message: sender == bob.id and isinstance(message, msg.Contribution)
            bob.learner.step(2.0)
            bob.learner.step(2.0)
            ann.learner.step(1.0)
            ann.learner.step(1.0)
            await stage.rest(bob)
            given = stage.caught[0].message
            assert isinstance(given, msg.Contribution)
            payload = b"no gradient"
            run, named = stage.manifest.run, digest_of(payload)
            mine = signed(key, run, given.shard, given.base.id, given.contributor, named)
            spoilt = msgspec.structs.replace(given, contributor=mine, payload_bytes=len(payload))
            stage.catch = lambda sender, to, message: False
            await stage.deliver(ann, bob.id, spoilt, payload)
            await stage.rest(ann)
            assert ann.faults() == {"contribution": 1}
            assert ("fault", {"peer": bob.id, "what": "contribution"}) in ann.metrics.lines
            assert ann.versions[1] == 1
            assert [c.learner for c in ann.machine.core.chains[1].log[0].contributors] == [ann.peer.supervision.learner]

    act(story)


def test_a_defect_of_ours_ends_the_peer_with_a_sentence(tmp_path: Path) -> None:
    """And nothing is done after it."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()

            def broken(*_: object, is_coded: bool) -> None:
                raise RuntimeError("a defect")

            ann.state.encode = broken  # type: ignore[assignment,method-assign]
            await stage.train(ann, 1.0, 1.0)
            assert ann.ending is not None
            assert ann.ending.status == 1
            assert "internal error: RuntimeError('a defect')" in ann.ending.reason
            heard = len(ann.events)
            await stage.wait(10.0)
            assert len(ann.events) == heard

    act(story)


def test_what_was_chosen_for_each_payload_is_told_with_its_error(tmp_path: Path) -> None:
    """The codec is left to the sender: bf16 where no limit is known. Small integers are exact in it, thirds are not."""

    async def story() -> None:
        for change, is_exact in ((1.0, True), (1.0 / 3.0, False)):
            async with Stage(tmp_path / str(is_exact), codec="auto") as stage:
                ann = await stage.found()
                await stage.train(ann, change, change)
                told = [fields for event, fields in ann.metrics.lines if event == "codec"]
                assert [(f["direction"], f["codec"], f["shard"]) for f in told] == [
                    ("up", "bf16", 1),
                    ("down", "bf16", 1),
                ]
                assert (told[0]["error"] == 0.0) is is_exact
                assert told[0]["error"] < 0.01
                assert told[1]["error"] == 0.0, "what bf16 has made of it is exact the second time"
                assert ann.versions == [0, 1]

    act(story)


def test_what_is_no_message_is_a_fault_and_a_payload_is_admitted_only_with_what_it_belongs_to(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside()
            ann.peer.message(bob.id, b"\x93 this is no message", None)
            assert ann.faults() == {"message": 1}
            assert ann.blamed == {bob.id: 1}
            stage.catch = lambda sender, to, message: isinstance(message, msg.Contribution)
            await stage.train(bob, 1.0, 1.0)
            given = stage.caught[0].message
            assert isinstance(given, msg.Contribution)
            body, size = encode(given), given.payload_bytes
            assert ann.peer.admit(bob.id, body, size)
            assert not ann.peer.admit(bob.id, body, size + 1)
            assert not ann.peer.admit(ann.id, body, size), "in another's name"
            assert not ann.peer.admit(bob.id, b"\x93 this is no message", size)
            assert not ann.peer.admit(bob.id, encode(msg.HeadsRequest()), 0)
            elsewhere = encode(msgspec.structs.replace(given, shard=ShardId(2)))
            assert not ann.peer.admit(bob.id, elsewhere, size)

    act(story)
