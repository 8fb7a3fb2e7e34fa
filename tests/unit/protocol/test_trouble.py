"""Rules N of docs/protocol.md: what people are told, and that the others go on. H = 4, steps of 0.5 s."""

from __future__ import annotations

from stage import SHARD, A, B, C, Stage, life, notes, only, sent

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg

NAN = "values are not finite"


def fail(stage: Stage) -> list[ef.Effect]:
    """The learner trains to its next round, and nothing of it can be encoded."""
    effects = stage.work(stage.train(4), ef.Snapshot)
    for encode in only(effects, ef.Encode):
        effects += stage.tell(ev.Failed("encode", encode.shard, None, NAN))
    return effects


def commit_of_b(stage: Stage, start: int) -> None:
    stage.work(stage.take(stage.commit(stage.contribution(B, start, start + 40).contributor)), ef.Apply)


def test_a_learner_that_can_give_nothing_two_rounds_in_a_row_does_not_participate() -> None:
    """N1a: and its user is told why, once."""
    stage = Stage(B, owners="bac")
    assert not notes(fail(stage), "poisoned")
    assert stage.machine.view.troubles == ()
    commit_of_b(stage, 0)
    effects = fail(stage)
    [told] = notes(effects, "poisoned")
    assert NAN in told
    assert stage.machine.view.troubles == (told,)
    assert A not in stage.machine.view.participants
    beats = [beat for _, beat in sent(stage.wait(0.6), msg.Heartbeat)]
    assert beats
    assert not any(beat.is_participating for beat in beats)
    commit_of_b(stage, 40)
    assert not notes(fail(stage), "poisoned")


def test_a_learner_of_which_one_shard_cannot_be_encoded_does_not_participate() -> None:
    """N1a: that shard would wait for it for ever, whatever it gives of the others (whole peers, 8000413)."""
    stage = Stage(B, C, owners="abc", min_quorum=2, fragments=((0, 1),))
    stage.says(C, is_participating=False)
    told: list[str] = []
    for _ in range(2):
        for encode in only(stage.work(stage.train(4), ef.Snapshot), ef.Encode):
            is_sound = encode.shard != SHARD
            told += notes(
                stage.tell(stage.end_of(encode) if is_sound else ev.Failed("encode", SHARD, None, NAN)), "poisoned"
            )
        commit_of_b(stage, 40 * len(told))
        stage.wait(0.6)
    assert len(told) == 1
    assert A not in stage.machine.view.participants


def test_a_poisoned_learner_participates_again_when_something_can_be_encoded() -> None:
    """N1a: or when it is another one; a success between two failures counts, too."""
    stage = Stage(B, owners="bac")
    fail(stage)
    commit_of_b(stage, 0)
    fail(stage)
    commit_of_b(stage, 40)
    effects = stage.give(4)
    assert len(notes(effects, "poisoned")) == 1
    assert stage.machine.view.troubles == ()
    assert A in stage.machine.view.participants
    commit_of_b(stage, 80)
    assert not notes(fail(stage), "poisoned"), "the first of a new row"
    other = Stage(B, owners="bac")
    fail(other)
    commit_of_b(other, 0)
    fail(other)
    other.tell(ev.LearnerStopped("killed"))
    other.tell(ev.LearnerStarted(life(A, 2)))
    assert other.machine.view.troubles == ()
    assert A in other.machine.view.participants


def test_a_head_that_moved_is_no_failure_of_the_learner() -> None:
    """N1a: what could not be encoded is history then."""
    stage = Stage(B, owners="bac")
    for sync_round in range(5):
        [encode] = only(stage.work(stage.train(4), ef.Snapshot), ef.Encode)
        commit_of_b(stage, 40 * sync_round)
        assert not notes(stage.tell(ev.Failed("encode", encode.shard, None, "the head has moved")), "poisoned")
    assert stage.machine.view.troubles == ()


def test_the_others_go_on_without_a_poisoned_learner() -> None:
    """N1a: with K = 2 the other one of two learners is enough then."""
    stage = Stage(B, C, owners="abc", min_quorum=2)
    stage.says(C, is_participating=False)
    assert not only(fail(stage) + stage.offer(B) + stage.wait(10.0), ef.Merge), "one of two"
    effects = fail(stage) + stage.wait(0.6)
    assert notes(effects, "poisoned")
    assert len(only(effects, ef.Merge)) == 1


def test_a_learner_that_does_not_answer_does_not_participate() -> None:
    """N3a: with K = 2 the other one of two learners is enough then, and people are told once."""
    stage = Stage(B, C, owners="abc", min_quorum=2)
    stage.says(C, is_participating=False)
    assert only(stage.train(4), ef.Snapshot)
    effects = stage.offer(B) + stage.wait(19.0)
    assert not only(effects, ef.Merge), "one of two"
    assert stage.machine.view.troubles == ()
    effects = stage.wait(2.0)
    [told] = notes(effects, "silent")
    assert stage.machine.view.troubles == (told,)
    assert not any(beat.is_participating for _, beat in sent(stage.wait(1.1), msg.Heartbeat))
    assert len(only(effects, ef.Merge)) == 1
    assert not notes(stage.wait(60.0), "silent")
    slow = Stage(B, owners="ba")
    slow.steps = 4
    slow.tell(ev.Stepped(slow.steps, slow.tokens, 5.0))
    assert not notes(slow.wait(39.0), "silent"), "8 steps of 5 s"
    assert notes(slow.wait(2.0), "silent")


def test_a_learner_that_answers_one_question_is_not_silent() -> None:
    """N3a: it copies one fragment after the other, and how many at once is not the machine's to know."""
    stage = Stage(B, owners="ba", fragments=((0,), (1,)))
    asked = only(stage.train(4), ef.Snapshot)
    assert len(asked) == 2
    stage.wait(15.0)
    effects = stage.tell(stage.end_of(asked[0]))
    assert not notes(effects + stage.wait(15.0), "silent")
    assert notes(stage.wait(6.0), "silent")


def test_a_learner_that_answers_again_participates() -> None:
    """N3a: or another one in its place."""
    stage = Stage(B, owners="ba")
    asked = stage.train(4)
    stage.wait(30.0)
    assert A not in stage.machine.view.participants
    assert notes(stage.work(asked, ef.Snapshot, ef.Encode), "silent")
    assert A in stage.machine.view.participants
    assert stage.machine.view.troubles == ()
    other = Stage(B, owners="ba")
    other.train(4)
    other.wait(30.0)
    other.tell(ev.LearnerStopped("killed"))
    other.tell(ev.LearnerStarted(life(A, 2)))
    assert A in other.machine.view.participants
    assert other.machine.view.troubles == ()


def test_without_versions_for_long_a_peer_says_that_it_is_stuck() -> None:
    """N2a: 10 s here, or four periods."""
    stage = Stage(B, owners="bac", min_quorum=2, stuck_s=10.0)
    stage.says(B, step_time_s=0.25)
    stage.give()
    assert not notes(stage.wait(9.0), "stuck")
    [told] = notes(stage.wait(2.0), "stuck")
    assert stage.machine.view.troubles == (told,)
    assert not notes(stage.wait(30.0), "stuck"), "once"
    commit_of_b(stage, 0)
    assert len(notes(stage.wait(1.0), "stuck")) == 1
    assert stage.machine.view.troubles == ()
    slow = Stage(B, owners="bac", stuck_s=10.0)
    slow.says(B, step_time_s=5.0)
    slow.give()
    assert not notes(slow.wait(75.0), "stuck"), "periods of 20 s"
    assert notes(slow.wait(10.0), "stuck")


def test_while_nobody_trains_nobody_is_stuck() -> None:
    """N2a: neither followers alone nor those that wait for learners; time counts from when one comes."""
    stage = Stage(B, owners="bac", stuck_s=10.0, has_learner=False)
    stage.says(B, is_participating=False)
    assert not notes(stage.wait(60.0), "stuck")
    stage.says(B, is_participating=True)
    assert not notes(stage.wait(9.0), "stuck")
    assert notes(stage.wait(2.0), "stuck")
    assert stage.head(SHARD).version == 0


def test_a_learner_that_rests_does_not_participate_when_it_has_given_all() -> None:
    """N4a: with K = 2 the other one of two learners is enough then."""
    stage = Stage(B, owners="bac")
    stage.train(1)
    beats = [beat for _, beat in sent(stage.tell(ev.LearnerRested()), msg.Heartbeat)]
    assert beats
    assert all(beat.is_participating for beat in beats), "it has something to give"

    stage = Stage(B, C, owners="abc", min_quorum=2)
    stage.says(C, is_participating=False)
    effects = stage.announce(B, 4) + stage.offer(B) + stage.wait(3.0)
    assert not only(effects, ef.Merge), "one of two"
    effects = stage.work(stage.tell(ev.LearnerRested()), ef.Snapshot, ef.Encode) + stage.wait(3.0)
    assert A not in stage.machine.view.participants
    assert len(only(effects, ef.Merge)) == 1


def test_a_learner_that_rested_participates_with_its_next_step() -> None:
    """N4a: and tells so at once."""
    stage = Stage(B, owners="bac")
    [told] = {beat.is_participating for _, beat in sent(stage.tell(ev.LearnerRested()), msg.Heartbeat)}
    assert not told
    beats = [beat for _, beat in sent(stage.train(1), msg.Heartbeat)]
    assert beats
    assert all(beat.is_participating for beat in beats)
