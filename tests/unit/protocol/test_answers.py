"""How long participants usually take, and what the owner makes of it."""

from collections.abc import Sequence

import pytest
from stage import SHARD, A, B, C, D, Stage, only

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol.ids import Digest, PeerId
from p2pdiloco.protocol.membership import smoothed
from p2pdiloco.protocol.response_times import ResponseTimes
from p2pdiloco.protocol.support import Support
from p2pdiloco.protocol.waiting import QuorumView, Waits, decide

BASE = Digest("base")


def wait_s(times: ResponseTimes, missing: Sequence[PeerId], usual_s: float) -> float:
    """How long the owner waits for those that are missing, of many; without them it would not wait."""
    view = QuorumView(
        now=0.0,
        opened_at=0.0,
        quorum_at=0.0,
        given=9,
        answers=Support(9, 9),
        missing=times.usual_s(missing),
        min_quorum=1,
        rank=0,
        grace_s=0.0,
        waits=Waits(takeover_s=60.0, usual_s=usual_s, nearly_all_s=0.0, few_s=60.0, commit_s=1.0),
    )
    return decide(view).look_again_at or 0.0


def test_equal_samples_leave_no_variation() -> None:
    """W3b: the estimate comes to what is measured."""
    estimate = (0.0, 0.0)
    for _ in range(40):
        estimate = smoothed(*estimate, 1.0)
    assert estimate == pytest.approx((1.0, 0.0), abs=0.01)


def test_who_usually_takes_longer_than_the_limit_is_not_waited_for() -> None:
    """W3b: nor who was waited for in vain; who is new may answer."""
    answers = ResponseTimes(1)
    for _ in range(40):
        answers.record(B, 2.0)
        answers.record(C, 9.0)
    for limit_s in (5.0, 10.0):
        assert wait_s(answers, [B, C, D], limit_s) == limit_s
    assert wait_s(answers, [C], 5.0) == 0.0
    assert wait_s(answers, [D], 10.0) == 10.0
    answers.record_missing([D], 10.0)
    assert wait_s(answers, [D], 10.0) == 0.0
    for _ in range(20):
        answers.record(D, 2.0)
    assert wait_s(answers, [D], 10.0) == 10.0


def test_late_answers_to_the_version_before_count_and_others_do_not() -> None:
    """W3b."""
    answers = ResponseTimes(1)
    answers.record_late(B, SHARD, BASE, 3.0)
    assert wait_s(answers, [B], 1.9) == 1.9
    answers.end_round(SHARD, BASE, 1.0)
    answers.record_late(B, SHARD, Digest("older"), 3.0)
    assert wait_s(answers, [B], 1.9) == 1.9
    answers.record_late(B, SHARD, BASE, 3.0)
    assert wait_s(answers, [B], 2.0) == 2.0
    assert wait_s(answers, [B], 1.9) == 0.0
    answers.forget(B)
    assert wait_s(answers, [B], 1.9) == 1.9


def rounds(
    after_s: float, count: int = 12, grace_share: float = 0.7, round_trip_s: float = 0.0, trip_to_c_s: float = 0.0
) -> list[bool]:
    """Rounds that b answers at once and c ``after_s`` later: whether the owner waited for c. Three steps are 1.5 s,
    the paper's window is 0.7 s."""
    takeover = {"takeover_floor_s": 4.0, "takeover_ceiling_s": 4.0}
    stage = Stage(B, C, has_learner=False, grace_share=grace_share, overlap=2, **takeover)
    stage.round_trip_s = round_trip_s
    stage.round_trips[C] = trip_to_c_s or round_trip_s
    for peer in (B, C):
        stage.says(peer, weight=0.0)  # a owns everything
    found, merged = [], 0
    for sync_round in range(count):
        base, end = stage.head(), 40 * (sync_round + 1)
        effects = stage.offer(B, 40 * sync_round, end) + stage.wait(after_s)
        if only(effects, ef.Merge):
            stage.work(effects)
            stage.hear(C, stage.contribution(C, merged, end, base=base))
            found.append(False)
        else:
            effects += stage.offer(C, merged, end)
            assert only(effects, ef.Merge)
            stage.work(effects)
            found.append(True)
            merged = end
    return found


def test_the_owner_waits_for_those_who_usually_answer_within_half_a_period() -> None:
    """W3b: also in its first round, and though it is late for the paper's window."""
    assert all(rounds(after_s=0.8))


def test_the_owner_does_not_wait_for_those_who_usually_take_longer() -> None:
    """W3b."""
    assert not any(rounds(after_s=1.7))


def test_who_never_answers_is_waited_for_once() -> None:
    """W3b: then it counts as one that answers too late."""
    stage = Stage(B, C, has_learner=False, grace_share=0.7, overlap=2)
    for peer in (B, C):
        stage.says(peer, weight=0.0)  # a owns everything
    waited_s = []
    for sync_round in range(3):
        effects, began = stage.offer(B, 40 * sync_round, 40 * (sync_round + 1)), stage.now
        while not only(effects, ef.Merge):
            effects += stage.wait(0.01)
        waited_s.append(stage.now - began)
        stage.work(effects)
    assert waited_s == pytest.approx([1.0, 0.7, 0.7], abs=0.05)


def test_where_round_trips_are_long_the_owner_waits_for_two_of_them_longer() -> None:
    """W3b: peers whose steps are shorter than a round trip merged alone, because nobody could answer in time."""
    assert rounds(after_s=1.7, round_trip_s=0.2)[-4:] == [True] * 4
    assert not any(rounds(after_s=1.95, round_trip_s=0.2))


def test_who_answers_heartbeats_late_is_not_waited_for_longer() -> None:
    """W3b: the median of round trips counts, so no single peer can lengthen it."""
    assert not any(rounds(after_s=1.7, trip_to_c_s=0.8))


def test_without_a_grace_share_the_owner_waits_for_nobody() -> None:
    """W3b."""
    assert not any(rounds(after_s=0.8, grace_share=0.0))


def test_an_owner_to_which_nobody_comes_in_time_does_not_merge_as_if_it_were_alone() -> None:
    """M4d: the others may take another one for the owner, whose commit comes first then."""
    for others, least_s in (((B, C, D), 1.0), ((B,), 0.5)):
        stage = Stage(*others, owners="a" + "".join(others), grace_share=0.7, overlap=2)
        for peer in others:
            stage.machine.aggregation.response_times.record(peer, 10.0)
        effects = stage.train(4)
        effects += stage.work(effects, ef.Snapshot, ef.Encode)
        assert not only(effects + stage.wait(least_s - 0.2), ef.Merge)
        assert only(stage.wait(0.5), ef.Merge)


@pytest.mark.parametrize("is_encoding", [False, True])
def test_an_owners_own_learner_is_timed_when_it_comes_too_late(is_encoding: bool) -> None:
    """W3b: also if the version was merged while its snapshot, or its encoding, was under way."""
    stage = Stage(B, owners="ab", grace_share=0.7, overlap=2)
    times = stage.machine.aggregation.response_times
    times.record(A, 10.0)
    (late,) = only(stage.train(4), ef.Snapshot)
    if is_encoding:
        (late,) = only(stage.tell(stage.end_of(late)), ef.Encode)
    stage.hear(B, stage.contribution(B))
    stage.work(stage.wait(0.8), ef.Merge, ef.Apply)
    assert stage.head().version == 1, "it was merged without the own learner"
    stage.wait(0.7)
    before = wait_s(times, [A], 9.9)
    stage.tell(stage.end_of(late))
    assert (before, wait_s(times, [A], 9.0)) == (0.0, 9.0), "10, and an eighth of the way to 1.5"


def test_the_owner_waits_for_at_most_half_of_the_takeover_time() -> None:
    """W3b: else the next owner merges, too, before the commit is there."""
    stage = Stage(B, has_learner=False, overlap=2, takeover_floor_s=1.2, takeover_ceiling_s=1.2)
    assert stage.machine.aggregation.waits().usual_s == pytest.approx(0.6)


def test_the_owner_waits_for_three_steps_however_short_a_round_is() -> None:
    """W3b: learners are in the middle of steps when a round opens, and some are slower."""
    takeover = {"takeover_floor_s": 60.0, "takeover_ceiling_s": 60.0}
    stages = [Stage(B, owners="ba", sync_every=sync_round, **takeover) for sync_round in (2, 10)]
    for stage in stages:
        stage.train(1)
    step_s = stages[0].machine.core.fastest_step_time_s()
    limits = [stage.machine.aggregation.waits().usual_s for stage in stages]
    assert limits == pytest.approx([3 * step_s, 5 * step_s])


@pytest.mark.parametrize("owners", ["ab", "ba"])
def test_an_own_learner_is_timed_whoever_owns_the_shard(owners: str) -> None:
    """W3b."""
    stage = Stage(B, owners=owners, grace_share=0.7, overlap=2)
    times = stage.machine.aggregation.response_times
    times.record(A, 10.0)
    (snapshot,) = only(stage.train(4), ef.Snapshot)
    stage.wait(0.4)
    stage.work([snapshot], ef.Snapshot, ef.Encode)
    assert wait_s(times, [A], 8.9) == 8.9, "10, and an eighth of the way to 0.4"
