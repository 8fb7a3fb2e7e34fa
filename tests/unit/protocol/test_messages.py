"""Rules S of docs/protocol.md: what is said and answered beside the turns."""

from __future__ import annotations

import msgspec
import pytest
from stage import SHARD, B, C, Stage, digest, only, sent, tokens

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.identifiers import FragmentId, PeerId, ShardId
from p2pdiloco.protocol.messages import Head

ELSEWHERE = ShardId(99)
FAR = Head(ELSEWHERE, 1, digest("far"), 1000)


def test_a_heads_request_is_answered_with_all_heads() -> None:
    """S1: by who has them all; a newcomer is silent."""
    stage = Stage(B, fragments=((ShardId(0), ShardId(1)),))
    stage.take(stage.commit(tokens(B, 0, 40), step=8))
    answer = msg.Heads((stage.head(), stage.head(ShardId(1))), 8)
    assert sent(stage.hear(B, msg.HeadsRequest()), msg.Heads) == [(B, answer)]
    assert not sent(Stage(B, is_founder=False, has_learner=False).hear(B, msg.HeadsRequest()), msg.Heads)


def test_who_says_that_it_leaves_is_lost_at_once() -> None:
    """S2: though its connection stands and it was heard just now."""
    stage = Stage(B, C)
    stage.hear(B, msg.Leaving("asked to"))
    assert stage.machine.status().live == (C,)


def test_of_evaluations_the_newest_is_kept() -> None:
    """S3: by step, if that is believed."""
    stage = Stage(B)
    for step, loss in ((4, 3.0), (8, 2.0), (2, 4.0), (2**40, 0.0)):
        stage.hear(B, msg.Evaluation(step // 4, 10 * step, step, loss))
    kept = stage.machine.status().evaluation
    assert kept is not None
    assert (kept.step, kept.loss) == (8, 2.0)


@pytest.mark.parametrize("peer", [B, PeerId("a stranger")])
def test_what_does_not_fit_is_ignored(peer: PeerId) -> None:
    """S4: shards and fragments that are not there, from b; anything, from a stranger."""
    stage = Stage(B)
    ours = stage.head()
    commit = stage.commit(tokens(B, 0, 40))
    elsewhere: list[msg.Message] = [
        msg.Turn(FragmentId(99), 4, (FAR,)),
        msg.Turn(FragmentId(0), 0, (FAR,)),
        stage.contribution(B, shard=ELSEWHERE, base=FAR),
        stage.contribution(B, base=FAR),
        msg.Refused(ELSEWHERE, digest("x"), "no", FAR),
        msg.Refused(SHARD, ours.id, "no", FAR),
        msg.Commit(msgspec.structs.replace(commit, shard=ELSEWHERE)),
        msg.Heads((FAR,), 4),
        msg.CommitsRequest(ELSEWHERE, digest("x")),
        msg.FetchAdvised(ELSEWHERE, FAR),
    ]
    here: list[msg.Message] = [msg.Turn(FragmentId(0), 4, (ours,)), msg.Commit(commit), msg.HeadsRequest()]
    said = elsewhere if peer == B else elsewhere + here
    effects = [effect for message in said for effect in stage.hear(peer, message)] + stage.wait(3.0)
    assert [e for e in effects if not isinstance(e, ef.Note | ef.Send)] == []
    assert {type(send.message) for send in only(effects, ef.Send)} == {msg.Heartbeat}
    assert stage.machine.status().heads == (ours,)
