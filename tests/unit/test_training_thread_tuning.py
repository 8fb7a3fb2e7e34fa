"""Threads chosen by measured steps; time is a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2pdiloco.training.thread_tuning import CHANGED, REST, TRIED, WARM, WATCHED, ThreadChoice

ROUND = 3 * (WARM + TRIED)


def train(choice: ThreadChoice, steps: int, time_of: Callable[[int], float]) -> None:
    """As a learner does it: what is said is done before the next step."""
    threads = choice.threads
    for _ in range(steps):
        changed = choice.stepped(time_of(threads))
        threads = threads if changed is None else changed
        assert threads == choice.threads


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({4: 1.0, 2: 1.8, 1: 3.5}, 4),
        ({4: 2.0, 2: 0.5, 1: 0.9}, 2),
        ({4: 9.0, 2: 3.0, 1: 1.0}, 1),
        ({4: 0.99, 2: 1.0, 1: 1.9}, 2),
    ],
    ids=["an idle machine", "two cores are busy", "threads that wait for each other", "no faster: not taken"],
)
def test_the_fastest_number_is_taken(times: dict[int, float], expected: int) -> None:
    choice = ThreadChoice(4)
    assert choice.candidates == [4, 2, 1]
    train(choice, ROUND, times.__getitem__)
    assert choice.threads == expected
    assert not choice._left


def test_a_step_that_hung_decides_nothing() -> None:
    choice, steps = ThreadChoice(2), 0

    def time_of(threads: int) -> float:
        nonlocal steps
        steps += 1
        return 60.0 if steps in (1, 5, 6) else 1.0 / threads

    train(choice, 2 * (WARM + TRIED), time_of)
    assert choice.threads == 2


def test_another_load_is_measured_anew_after_a_while() -> None:
    choice = ThreadChoice(4)
    train(choice, ROUND, lambda threads: 1.0 / threads)
    train(choice, REST, lambda threads: 1.0 / threads)
    assert (choice.threads, choice._left) == (4, [])
    train(choice, WATCHED + ROUND, lambda threads: 4.0 if threads == 4 else 1.0 / threads)
    assert (choice.threads, choice._left) == (2, [])
    train(choice, REST + 2 * WATCHED + ROUND, lambda threads: 0.2 / threads)
    assert (choice.threads, choice._left) == (4, []), "the load is gone"


def test_a_little_slower_is_no_other_load() -> None:
    choice = ThreadChoice(4)
    train(choice, ROUND, lambda threads: 1.0 / threads)
    train(choice, 3 * REST, lambda threads: 0.9 * CHANGED / threads)
    assert not choice._left
    for _ in range(3 * REST):  # short bursts
        assert choice.stepped(0.25) is None


def test_where_there_is_one_core_nothing_is_tried() -> None:
    choice = ThreadChoice(1)
    train(choice, 1000, lambda threads: 1.0)
    assert choice.threads == 1
