"""Deadlines of calls to the directory's nodes: near and dead ones cost little, far ones are waited for."""

from __future__ import annotations

from p2pdiloco.discovery.call_deadlines import LEAST_S, MOST_S, NODES_LIMIT, CallDeadlines


def test_before_anything_is_measured_a_dead_node_costs_the_least() -> None:
    assert CallDeadlines().deadline_s("node") == LEAST_S


def test_a_far_node_has_time_for_a_lost_packet() -> None:
    deadlines = CallDeadlines()
    for _ in range(20):
        deadlines.record("satellite", 0.8)
    assert 2 * 0.8 < deadlines.deadline_s("satellite") < 3.0
    for _ in range(20):
        deadlines.record("near", 0.02)
    assert deadlines.deadline_s("near") < LEAST_S + 0.1, "each has its own"


def test_a_node_of_which_nothing_is_known_is_taken_for_one_like_the_others() -> None:
    deadlines = CallDeadlines()
    for number in range(3):
        deadlines.record(number, 0.8)
    assert deadlines.typical_s == 0.8
    assert deadlines.deadline_s("new") > 2 * 0.8
    for number in range(10, 20):
        deadlines.record(number, 0.02)
    assert deadlines.deadline_s("new") < LEAST_S + 0.2, "one satellite among many does not make dead nodes dear"


def test_no_deadline_grows_beyond_the_most() -> None:
    deadlines = CallDeadlines()
    deadlines.record("stuck", 60.0)
    assert deadlines.deadline_s("stuck") == MOST_S


def test_nodes_that_were_measured_long_ago_are_forgotten() -> None:
    deadlines = CallDeadlines()
    deadlines.record("first", 5.0)
    for number in range(NODES_LIMIT):
        deadlines.record(number, 0.1)
    assert deadlines.deadline_s("first") < 5.0


def test_a_node_that_is_measured_again_is_not_forgotten_first() -> None:
    deadlines = CallDeadlines()
    deadlines.record("far", 0.8)
    for number in range(NODES_LIMIT - 1):
        deadlines.record(number, 0.1)
    for _ in range(20):
        deadlines.record("far", 0.8)
    deadlines.record("new", 0.1)
    assert deadlines.deadline_s("far") > 2 * 0.8
