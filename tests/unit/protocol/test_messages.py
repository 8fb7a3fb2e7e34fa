"""Rules S of docs/protocol.md: what is said and answered beside the rounds."""

from __future__ import annotations

import math

import msgspec
import pytest
from stage import SHARD, B, C, D, Stage, digest, only, sent, tokens

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import FragmentId, PeerId, ShardId
from p2pdiloco.protocol.messages import Head
from p2pdiloco.wire.control_messages import decode_message, encode

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
    assert stage.machine.view.live == (C,)


def test_a_newcomer_keeps_a_finished_peer_as_long_as_it_is_connected() -> None:
    """S2: it still serves its states, says nothing else that others could miss, and was not cut off when it goes."""
    stage = Stage(B, C, is_founder=False, has_learner=False)
    stage.says(B, phase="finished", is_participating=False)
    stage.says(C, phase="finished", is_participating=False)
    stage.hear(B, msg.Leaving("the run is complete"))
    stage.hear(C, msg.Leaving("the run is complete"))
    assert stage.machine.view.live == (B, C)
    assert B in stage.machine.core.participation.donors()
    for peer in (B, C):
        del stage.beats[peer]
        stage.tell(ev.PeerDisconnected(peer, "closed"))
    assert stage.machine.view.live == ()
    assert stage.machine.view.has_heard_end
    assert not stage.machine.view.missing, "they said goodbye"


def evaluation(loss: float, step: int = 4, version: int = 0) -> msg.Evaluation:
    return msg.Evaluation(version, 10 * step, step, loss)


def shown(stage: Stage) -> tuple[float, int] | None:
    """Loss and step of the evaluation that is shown."""
    found = stage.machine.view.evaluation
    return None if found is None else (found.loss, found.step)


def test_of_each_member_the_newest_evaluation_counts() -> None:
    """S3a: by step, if that is believed, once for each member, while it is connected."""
    stage = Stage(B)
    for step, loss in ((4, 3.0), (8, 2.0), (2, 4.0), (2**40, 0.0)):
        stage.hear(B, evaluation(loss, step))
    assert shown(stage) == (2.0, 8)
    stage = Stage(B, C, D)
    for peer, loss in ((B, 2.0), (C, 2.2)):
        stage.hear(peer, evaluation(loss))
    for step in range(1, 9):
        stage.hear(D, evaluation(0.0, step))
    assert shown(stage) == (2.0, 4), "many words of one member are one voice"
    stage.tell(ev.PeerDisconnected(D, "gone"))
    stage.tell(ev.PeerDisconnected(B, "gone"))
    stage.hear(C, evaluation(2.1, 8))
    assert shown(stage) == (2.1, 8)


@pytest.mark.parametrize("every", [1, 2])
def test_an_evaluation_counts_until_16_more_were_due(every: int) -> None:
    """S3a: it says nothing of the model then, though its maker is still connected."""
    stage = Stage(B, C, D, evaluation_every=every)
    for peer in (B, C):
        stage.hear(peer, evaluation(5.0))
    for sync_round in range(16 * every + 1):
        assert shown(stage) == (5.0, 4)
        stage.wait(2.0)
        stage.take(stage.commit(tokens(B, 40 * sync_round, 40 * (sync_round + 1)), step=4 * (sync_round + 1)))
        stage.hear(D, evaluation(2.0, 4 * (sync_round + 1), sync_round + 1))
    assert shown(stage) == (2.0, 4 * (16 * every + 1))


def test_an_owner_that_states_steps_far_ahead_has_no_more_versions_measured() -> None:
    """P1a: measurements are due by rounds of H = 4 steps, here every fourth, as far as steps are believed."""
    stage, asked = Stage(B, C, D, evaluation_every=4), 0
    for version in range(16):
        stage.wait(0.5)
        step = 4 * (version + 1) + (60 if version % 2 else 0)
        done = stage.take(stage.commit(tokens(B, 40 * version, 40 * (version + 1)), step=step))
        asked += len(only(done, ef.Evaluate))
    assert asked <= 5, "four are due; steps may be believed a round or two early"


def test_one_lying_evaluation_among_several_changes_nothing() -> None:
    """S3b: neither loss nor step, whether the lie is the smallest or the largest figure; of more peers, two liars."""
    stage = Stage(B, C, D)
    for peer in (B, C):
        stage.hear(peer, evaluation(2.0))
    for lie in (msg.Evaluation(2**56, 2**56, 8, 0.0), msg.Evaluation(0, 0, 9, 1e6)):
        stage.hear(D, lie)
        assert shown(stage) == (2.0, 4)
    crowd = Stage(*(PeerId(f"peer {number}") for number in range(8)))
    for number in range(6):
        crowd.hear(PeerId(f"peer {number}"), evaluation(3.0 - 0.1 * number, 2 + number))
    for number in (6, 7):
        crowd.hear(PeerId(f"peer {number}"), evaluation(0.0, 9 + number))
        assert shown(crowd) == (2.5, 7)


def test_the_newest_evaluation_that_the_others_support_is_shown() -> None:
    """S3b: not an older one in their middle; while the loss falls fast, the one before the newest."""
    stage = Stage(B, C, D)
    for sync_round, (peer, loss, told) in enumerate(
        ((B, 5.0, 5.0), (C, 3.0, 3.0), (D, 2.0, 3.0), (B, 1.5, 2.0), (C, 1.48, 1.48), (D, 1.51, 1.51))
    ):
        stage.hear(peer, evaluation(loss, sync_round + 1))
        assert (shown(stage) or (0.0, 0))[0] == told


def test_what_is_shown_does_not_go_back_to_an_older_evaluation() -> None:
    """S3b: the author of the newest has measured again, and the others have yet to measure a loss as low. After a while
    it does, because the newest may be of one whose step nobody else has reached."""
    stage = Stage(B, C, D, evaluation_every=1)
    stage.take(stage.commit(tokens(B, 0, 40), step=4))
    for peer, loss, step in ((B, 1.90, 1), (C, 1.82, 6), (D, 1.75, 7), (D, 1.62, 8)):
        stage.hear(peer, evaluation(loss, step, 1))
    assert shown(stage) == (1.75, 7)
    for version in range(3):
        stage.wait(2.0)
        stage.take(stage.commit(tokens(B, 40 * version + 40, 40 * version + 80), step=4 * version + 8))
        stage.hear(B, evaluation(1.90, version + 2, 1))
        assert shown(stage) == ((1.75, 7) if version < 2 else (1.82, 6))


def test_nobody_claims_more_for_an_evaluation_than_is_merged() -> None:
    """S3b: version and tokens are where the loss is drawn in a curve."""
    stage = Stage(B, C, D)
    stage.take(stage.commit(tokens(B, 0, 40), step=4))
    stage.hear(B, msg.Evaluation(2**56, 2**56, 4, 2.0))
    assert stage.machine.view.evaluation == msg.Evaluation(1, 40, 4, 2.0)


@pytest.mark.parametrize("has_learner", [True, False])
def test_of_two_evaluations_the_newer_is_shown(has_learner: bool) -> None:
    """S3b: as measured in a run of two peers, of which one drew the first version and not the next ones."""
    stage = Stage(B, C, has_learner=has_learner)
    if has_learner:
        stage.tell(ev.Evaluated(0, 5.575))
    else:
        stage.hear(C, evaluation(5.575, 1))
    for step, loss in ((4, 2.743), (8, 2.811)):
        stage.hear(B, evaluation(loss, step))
        assert shown(stage) == (loss, step)


@pytest.mark.parametrize("lie", [0.0, 1e6])
def test_of_two_evaluations_a_newer_one_that_cannot_be_is_not_shown(lie: float) -> None:
    """S3b: neither beside one's own, nor beside what was shown before by who has measured nothing."""
    stage = Stage(B)
    stage.tell(ev.Evaluated(0, 2.0))
    stage.hear(B, evaluation(lie))
    assert (shown(stage) or (0.0, 0))[0] == 2.0
    follower = Stage(B, C, has_learner=False)
    follower.hear(B, evaluation(2.0, 4))
    for step in (5, 7):
        follower.hear(C, evaluation(lie, step))
        assert shown(follower) == (2.0, step - 1)
        follower.hear(B, evaluation(2.0, step + 1))
        assert shown(follower) == (2.0, step + 1)


@pytest.mark.parametrize("has_learner", [True, False])
def test_of_two_evaluations_the_newer_is_shown_once_the_other_is_old(has_learner: bool) -> None:
    """S3b: however far it has fallen; but what this peer itself has measured is shown at once."""
    stage = Stage(B, C, evaluation_every=1, has_learner=has_learner)
    if has_learner:
        stage.tell(ev.Evaluated(0, 9.0))
    else:
        stage.hear(C, evaluation(9.0, 1))
    for sync_round in range(3):
        stage.wait(2.0)
        stage.take(stage.commit(tokens(B, 40 * sync_round, 40 * (sync_round + 1)), step=4 * (sync_round + 1)))
        stage.hear(B, evaluation(2.0, 4 * (sync_round + 1), sync_round + 1))
        assert (shown(stage) or (0.0, 0))[0] == (9.0 if sync_round < 2 else 2.0)
    assert shown(stage) == (2.0, 12)
    if has_learner:
        stage.tell(ev.Evaluated(3, 0.5))
        assert (shown(stage) or (0.0, 0))[0] == 0.5


def test_who_alone_evaluates_is_shown() -> None:
    """S3b: as it says, each time."""
    stage = Stage(B, C)
    for step, loss in ((2, 3.0), (4, 0.0), (8, 5.0)):
        stage.hear(B, evaluation(loss, step))
        assert shown(stage) == (loss, step)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, -1.0, 1e7])
def test_a_loss_that_is_none_is_refused_and_not_told(loss: float) -> None:
    """S3c: as a message, by the machine, and as what the own learner has measured."""
    with pytest.raises(ValueError):
        decode_message(encode(evaluation(loss)))
    stage = Stage(B)
    stage.hear(B, evaluation(loss))
    effects = stage.tell(ev.Evaluated(0, loss))
    assert shown(stage) is None
    assert not sent(effects, msg.Evaluation)
    assert "not sent to other peers" in only(effects, ef.Note)[0].reason


def test_a_commit_that_a_goodbye_has_overtaken_is_applied() -> None:
    """S4: a commit's payload is on its way for longer than a goodbye. An owner that left at once left alone with it."""
    stage = Stage(B, C, owners="bca")
    first = stage.commit(tokens(B, 0, 40), tokens(C, 0, 40))
    del stage.beats[B]
    stage.hear(B, msg.Leaving("asked to"))
    stage.take(first, B)
    assert stage.head().version == 1


@pytest.mark.parametrize("peer", [B, PeerId("a stranger")])
def test_what_does_not_fit_is_ignored(peer: PeerId) -> None:
    """S4: shards and fragments that are not there, from b; anything but commits, from a stranger."""
    stage = Stage(B)
    ours = stage.head()
    commit = stage.commit(tokens(B, 0, 40))
    elsewhere: list[msg.Message] = [
        msg.Round(FragmentId(99), 4, (FAR,)),
        msg.Round(FragmentId(0), 0, (FAR,)),
        stage.contribution(B, shard=ELSEWHERE, base=FAR),
        stage.contribution(B, base=FAR),
        msg.Refused(ELSEWHERE, digest("x"), "no", FAR),
        msg.Refused(SHARD, ours.id, "no", FAR),
        msg.Commit(msgspec.structs.replace(commit, shard=ELSEWHERE)),
        msg.Heads((FAR,), 4),
        msg.CommitsRequest(ELSEWHERE, digest("x")),
        msg.FetchAdvised(ELSEWHERE, FAR),
    ]
    here: list[msg.Message] = [msg.Round(FragmentId(0), 4, (ours,)), msg.HeadsRequest()]
    said = elsewhere if peer == B else elsewhere + here
    effects = [effect for message in said for effect in stage.hear(peer, message)] + stage.wait(3.0)
    assert [e for e in effects if not isinstance(e, ef.Note | ef.Send)] == []
    assert {type(send.message) for send in only(effects, ef.Send)} == {msg.Heartbeat}
    assert stage.machine.view.known_heads == (ours,)
