"""How long participants usually take, and what the owner makes of it."""

import pytest
from stage import SHARD, B, C, D, Stage, only

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol.aggregation import ResponseTimes
from p2pdiloco.protocol.ids import Digest
from p2pdiloco.protocol.membership import smoothed

BASE = Digest("base")


def test_equal_samples_leave_no_variation() -> None:
    """W3b: the estimate comes to what is measured."""
    estimate = (0.0, 0.0)
    for _ in range(40):
        estimate = smoothed(*estimate, 1.0)
    assert estimate == pytest.approx((1.0, 0.0), abs=0.01)


def test_who_usually_takes_longer_than_the_limit_is_not_waited_for() -> None:
    """W3b: nor who never answered."""
    answers = ResponseTimes(1)
    for _ in range(40):
        answers.record(B, 2.0)
        answers.record(C, 9.0)
    assert answers.wait_s([B, C, D], 5.0) == pytest.approx(2.0, abs=0.05)
    assert answers.wait_s([B, C, D], 10.0) == pytest.approx(9.0, abs=0.2)
    assert answers.wait_s([D], 10.0) == 0.0


def test_late_answers_to_the_version_before_count_and_others_do_not() -> None:
    """W3b."""
    answers = ResponseTimes(1)
    answers.record_late(B, SHARD, BASE, 3.0)
    assert answers.wait_s([B], 10.0) == 0.0
    answers.end_turn(SHARD, BASE, 1.0)
    answers.record_late(B, SHARD, Digest("older"), 3.0)
    assert answers.wait_s([B], 10.0) == 0.0
    answers.record_late(B, SHARD, BASE, 3.0)
    assert answers.wait_s([B], 10.0) == pytest.approx(4.0)  # 2 and twice its half
    answers.forget(B)
    assert answers.wait_s([B], 10.0) == 0.0


def turns(
    after_s: float, count: int = 12, grace_share: float = 0.7, round_trip_s: float = 0.0, trip_to_c_s: float = 0.0
) -> list[bool]:
    """Turns that b answers at once and c ``after_s`` later: whether the owner waited for c. H / 2 steps are 1 s, the
    paper's window is 0.7 s."""
    stage = Stage(B, C, has_learner=False, grace_share=grace_share, overlap=2)
    stage.round_trip_s = round_trip_s
    stage.round_trips[C] = trip_to_c_s or round_trip_s
    for peer in (B, C):
        stage.says(peer, weight=0.0)  # a owns everything
    found, merged = [], 0
    for turn in range(count):
        base, end = stage.head(), 40 * (turn + 1)
        effects = stage.offer(B, 40 * turn, end) + stage.wait(after_s)
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
    """W3b: c is late for the paper's window at first, and then waited for."""
    found = turns(after_s=0.8)
    assert not found[0]
    assert found[-4:] == [True] * 4


def test_the_owner_does_not_wait_for_those_who_usually_take_longer() -> None:
    """W3b."""
    assert not any(turns(after_s=1.2))


def test_where_round_trips_are_long_the_owner_waits_for_two_of_them_longer() -> None:
    """W3b: peers whose steps are shorter than a round trip merged alone, because nobody could answer in time."""
    assert turns(after_s=1.2, round_trip_s=0.2)[-4:] == [True] * 4
    assert not any(turns(after_s=1.6, round_trip_s=0.2))


def test_who_answers_heartbeats_late_is_not_waited_for_longer() -> None:
    """W3b: the median of round trips counts, so no single peer can lengthen it."""
    assert not any(turns(after_s=1.2, trip_to_c_s=0.8))


def test_without_a_grace_share_the_owner_waits_for_nobody() -> None:
    """W3b."""
    assert not any(turns(after_s=0.8, grace_share=0.0))
