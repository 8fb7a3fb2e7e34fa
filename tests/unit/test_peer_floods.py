"""A member that floods another with messages that are well-formed and cost it time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from actors import genesis
from troupe import Stage, act

from p2pdiloco.net.abuse_limits import FORGED, Reputation
from p2pdiloco.peer import peer as module
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import FragmentId, PeerId, ShardId, digest_of
from p2pdiloco.wire.control_messages import encode

FLOODS: list[msg.Message] = [
    msg.HeadsRequest(),
    msg.Round(FragmentId(0), 8, ()),
    msg.Refused(ShardId(0), digest_of(b"base"), "stale", msg.Head(ShardId(0), 0, digest_of(b"head"), 0)),
]


@pytest.mark.parametrize("message", FLOODS, ids=lambda message: type(message).__name__)
def test_a_flood_of_one_kind_is_dropped_and_costs_its_sender_the_connection(
    tmp_path: Path, message: msg.Message
) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            eve = await stage.add("eve", genesis(stage.manifest), has_learner=False)
            await stage.wait(3.0)
            blamed: list[str] = []
            ann.peer.host.links.blame = blamed.append  # type: ignore[method-assign]
            before = len(ann.events)
            for _ in range(module.MESSAGE_BURST + 500):
                ann.peer.message(eve.id, encode(message), None)
            taken = sum(isinstance(e, ev.Received) and e.peer == eve.id for e in ann.events[before:])
            assert taken == module.MESSAGE_BURST
            assert blamed == [eve.id] * 500
            assert ann.peer.metrics.faults["flood"] == 500
            ann.peer.message(eve.id, encode(msg.Leaving("done")), None)
            assert ann.peer.metrics.faults["flood"] == 500, "other kinds have a limit of their own"

    act(story)


def test_a_flood_of_messages_with_payloads_is_dropped_before_they_are_verified(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            eve = await stage.add("eve", genesis(stage.manifest), has_learner=False)
            await stage.wait(3.0)
            proof = msg.Equivocation(_commit(1), _commit(2), bytes(64), bytes(64))
            for _ in range(module.MESSAGE_BURST + 5):
                ann.peer.message(eve.id, encode(msg.Commit(_commit(1))), None)
            faults = dict(ann.peer.metrics.faults)
            for _ in range(5):
                ann.peer.message(eve.id, msg.Commit(_commit(1)), memoryview(b"payload"))
            await stage.settle()
            assert ann.peer.metrics.faults["flood"] == faults["flood"] + 5
            assert ann.peer.metrics.faults["payload"] == faults["payload"]
            assert not ann.forged.total()
            ann.peer.message(eve.id, encode(proof), None)
            await stage.settle()
            assert ann.forged[eve.id] == 1, "a proof that is none"

    act(story)


def test_a_wrong_digest_or_signature_is_blamed_on_its_sender(tmp_path: Path) -> None:
    """But not that it names somebody who may not be known here."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside()
            stage.catch = lambda sender, to, message: isinstance(message, msg.Contribution)
            await stage.train(bob, 1.0, 1.0)
            sent = next(c for c in stage.caught if isinstance(c.message, msg.Contribution) and c.payload)
            await stage.deliver(ann, bob.id, sent.message, sent.payload[:-1] + b"?")
            assert ann.forged == {bob.id: 1}
            given = msgspec.structs.replace(sent.message.contributor, tokens_to=sent.message.contributor.tokens_to + 1)
            await stage.deliver(ann, bob.id, msgspec.structs.replace(sent.message, contributor=given), sent.payload)
            assert ann.forged == {bob.id: 2}
            await stage.deliver(ann, bob.id, sent.message, sent.payload)
            assert ann.forged == {bob.id: 2}

    act(story)


def test_a_few_forged_messages_cost_the_connection() -> None:
    scores = Reputation()
    assert [scores.blame(PeerId("eve"), FORGED, 0.0) for _ in range(4)] == [False, False, False, True]
    assert scores.is_shut_out(PeerId("eve"), 1.0)


def _commit(version: int) -> msg.CommitHeader:
    some, owner = digest_of(b"some"), PeerId("eve")
    return msg.CommitHeader(ShardId(0), version, some, 0, owner, (), 0, some, some, some, 1.0)


def test_a_peer_is_heard_again_once_it_is_slower(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            eve = await stage.add("eve", genesis(stage.manifest), has_learner=False)
            await stage.wait(3.0)
            for _ in range(module.MESSAGE_BURST + 10):
                ann.peer.message(eve.id, encode(msg.HeadsRequest()), None)
            faults = ann.peer.metrics.faults["flood"]
            await stage.wait(1.0)
            for _ in range(module.MESSAGES_PER_S // 2):
                ann.peer.message(eve.id, encode(msg.HeadsRequest()), None)
            assert ann.peer.metrics.faults["flood"] == faults

    act(story)
