"""Rate limits, decaying counters, backoff and timers."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.timing import Backoff, DecayingCounter, RateLimiter, Timers, TokenBucket

STEPS_S = st.lists(st.floats(0.0, 100.0), max_size=80)
"""Seconds between calls."""


def times_of(steps_s: list[float]) -> list[float]:
    """When each call comes, on a clock that began long ago."""
    return [1000.0 + sum(steps_s[:number]) for number in range(len(steps_s))]


# -- Rate limits -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10), st.floats(0.0, 5.0), STEPS_S)
def test_no_window_holds_more_than_burst_and_rate_allow(burst: int, per_s: float, steps_s: list[float]) -> None:
    bucket = TokenBucket(burst=burst, per_s=per_s)
    taken = [now for now in times_of(steps_s) if bucket.take(now)]
    for first, began in enumerate(taken):
        for last, ended in enumerate(taken[first:], first):
            assert last - first + 1 <= burst + per_s * (ended - began) + 1e-6


@given(st.integers(1, 10), st.floats(0.01, 5.0), STEPS_S)
def test_who_waits_as_long_as_it_is_told_is_let_through_and_not_sooner(
    burst: int, per_s: float, steps_s: list[float]
) -> None:
    bucket = TokenBucket(burst=burst, per_s=per_s)
    for now in times_of(steps_s):
        wait_s = bucket.wait_s(now)
        assert bucket.take(now) == (wait_s == 0.0)
        assert bucket.available(now + bucket.wait_s(now)) >= 1.0 - 1e-6


@given(st.floats(0.0, 5.0), STEPS_S, st.lists(st.sampled_from("abc"), min_size=80))
def test_keys_do_not_take_from_each_other(per_s: float, steps_s: list[float], keys: list[str]) -> None:
    limiter: RateLimiter[str] = RateLimiter(burst=2, per_s=per_s)
    alone = {key: TokenBucket(burst=2, per_s=per_s) for key in "abc"}
    for now, key in zip(times_of(steps_s), keys, strict=False):
        assert limiter.take(key, now) == alone[key].take(now)


def test_so_much_at_once_and_then_at_a_rate() -> None:
    limiter: RateLimiter[str] = RateLimiter(burst=3, per_s=0.5)
    assert [limiter.take("ann", 0.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert limiter.take("bob", 0.0), "each has its own"
    assert not limiter.take("ann", 1.9), "who asks in vain pays nothing for it, and gains nothing"
    assert limiter.take("ann", 2.0)
    assert not limiter.take("ann", 2.0)
    assert [limiter.take("ann", 1000.0) for _ in range(4)] == [True] * 3 + [False]


def test_many_tokens_are_taken_as_a_whole_or_not_at_all() -> None:
    bucket = TokenBucket(burst=10, per_s=1.0)
    assert bucket.take(0.0, 8.0)
    assert not bucket.take(0.0, 3.0)
    assert bucket.take(0.0, 2.0)
    assert bucket.wait_s(0.0, 4.0) == 4.0
    assert bucket.wait_s(0.0, 11.0) == math.inf, "it never holds so many"
    assert bucket.wait_s(0.0, 10.0) == 10.0
    spent = TokenBucket(burst=1.0, per_s=0.0)
    assert (spent.wait_s(0.0), spent.take(0.0), spent.wait_s(0.0)) == (0.0, True, math.inf)


def test_a_clock_that_is_put_back_gives_nothing() -> None:
    limiter: RateLimiter[str] = RateLimiter(burst=1, per_s=1.0)
    assert limiter.take("ann", 100.0)
    assert not limiter.take("ann", 0.0)
    assert limiter.take("ann", 1.0)


def test_what_is_given_back_fills_the_bucket_and_no_more() -> None:
    limiter: RateLimiter[str] = RateLimiter(burst=2, per_s=0.0)
    assert [limiter.take("ann", 0.0) for _ in range(3)] == [True, True, False]
    assert limiter.give_back("ann")
    assert not limiter.give_back("nobody")
    assert [limiter.take("ann", 0.0) for _ in range(2)] == [True, False]
    assert [limiter.give_back("ann") for _ in range(9)] == [True] * 2 + [False] * 7
    assert (limiter.available("ann", 0.0), limiter.available("nobody", 0.0)) == (2.0, 2.0)
    bucket = TokenBucket(burst=2, per_s=0.0)
    assert bucket.take(0.0, 2.0)
    assert bucket.give_back()
    assert bucket.available(0.0) == 1.0
    assert limiter.take("ann", 0.0)
    assert limiter.available("ann", 0.0) == 1.0


def test_what_is_granted_is_there_beside_the_burst_until_it_is_used() -> None:
    bucket = TokenBucket(burst=2, per_s=1.0)
    bucket.grant(3)
    assert bucket.available(100.0) == 5.0, "no more come by themselves"
    bucket.give_back()
    assert bucket.take(100.0, 4)
    assert bucket.available(100.5) == 1.5


def test_the_key_that_was_used_longest_ago_is_forgotten() -> None:
    limiter: RateLimiter[int] = RateLimiter(burst=1, per_s=0.0, max_keys=3)
    for number in (1, 2, 3):
        assert limiter.take(number, 0.0)
    assert not limiter.take(1, 0.0)
    assert limiter.take(4, 0.0), "the place of 2"
    assert len(limiter) == 3
    assert [limiter.take(number, 0.0) for number in (1, 3, 4)] == [False] * 3


# -- Decaying counter --------------------------------------------------------------------------------------------------


def test_counts_halve_and_are_no_growing_table() -> None:
    counter: DecayingCounter[str] = DecayingCounter(60.0, max_keys=100)
    assert [counter.add("ann", 0.0) for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert counter.count("ann", 60.0) == 2.0
    assert counter.add("ann", 60.0) == 3.0
    assert counter.count("bob", 60.0) == 0.0
    for number in range(200):
        counter.add(f"{number}", 60.0)
    assert len(counter) == 100
    assert counter.count("ann", 60.0) == 0.0
    counter.add("100", 60.0)
    counter.add("new", 60.0)
    assert (counter.count("100", 60.0), counter.count("101", 60.0)) == (2.0, 0.0), "100 was counted again"


# -- Backoff -----------------------------------------------------------------------------------------------------------


def test_a_pause_doubles_until_there_is_news() -> None:
    backoff = Backoff(2.0, 10.0)
    assert [backoff.next_s() for _ in range(5)] == [2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff.failures == 5
    backoff.reset()
    assert (backoff.pause_s, backoff.next_s(), backoff.pause_s) == (2.0, 2.0, 4.0)
    for _ in range(2000):
        backoff.next_s()
    assert backoff.pause_s == 10.0


# -- Timers ------------------------------------------------------------------------------------------------------------

Command = tuple[Literal["set", "cancel", "pop", "pop_if_due"], int, float]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("set", "cancel", "pop", "pop_if_due")), st.integers(0, 5), st.integers(0, 9).map(float)
        ),
        max_size=300,
    )
)
def test_timers_are_due_in_order_and_once(commands: list[Command]) -> None:
    timers: Timers[int] = Timers()
    model: dict[int, float] = {}
    """The key that was set longest ago first."""
    for command, key, at in commands:
        first = min(model, key=lambda one: model[one], default=None)
        match command:
            case "set":
                timers.set(key, at)
                model.pop(key, None)
                model[key] = at
            case "cancel":
                timers.cancel(key)
                model.pop(key, None)
            case "pop":
                is_due = first is not None and model[first] <= at
                assert timers.pop_due(at) == (first if is_due else None)
                if is_due:
                    del model[first]
            case "pop_if_due":
                is_due = model.get(key, math.inf) <= at
                assert timers.pop_if_due(key, at) == is_due
                if is_due:
                    del model[key]
        assert timers.next() == min(model.values(), default=None)
        assert len(timers) == len(model)
        assert [one in timers for one in range(6)] == [one in model for one in range(6)]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_deadline_that_is_moved_for_ever_takes_no_memory(is_cancelled: bool) -> None:
    timers: Timers[str] = Timers()
    timers.set("other", 1e9)
    for number in range(10_000):
        timers.set("key", float(number))
        if is_cancelled:
            timers.cancel("key")
    assert len(timers._heap) < 100


def test_deadlines_that_are_moved_often_are_due_in_order() -> None:
    timers: Timers[int] = Timers()
    for number in range(1000):
        timers.set(number % 37, float((number * 7919) % 1009))
    deadlines = {number % 37: float((number * 7919) % 1009) for number in range(1000)}
    due = [timers.pop_due(1e9) for _ in range(38)]
    assert due == [*sorted(deadlines, key=lambda key: deadlines[key]), None]
