"""What askers get of what is dear to give."""

from __future__ import annotations

from p2pdiloco.net.abuse_limits import REMEMBERED, RequestRateLimit


def test_so_much_at_once_and_then_at_a_rate() -> None:
    allowance = RequestRateLimit(at_once=3, per_s=0.5)
    assert [allowance.take("ann", 0.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert allowance.take("bob", 0.0), "each has its own"
    assert not allowance.take("ann", 1.9), "who asks in vain pays nothing for it, and gains nothing"
    assert allowance.take("ann", 2.0)
    assert not allowance.take("ann", 2.0)
    assert [allowance.take("ann", 1000.0) for _ in range(4)] == [True] * 3 + [False]


def test_a_clock_that_is_put_back_gives_nothing() -> None:
    allowance = RequestRateLimit(at_once=1, per_s=1.0)
    assert allowance.take("ann", 100.0)
    assert not allowance.take("ann", 0.0)
    assert allowance.take("ann", 1.0)


def test_askers_are_bounded() -> None:
    allowance = RequestRateLimit(at_once=1, per_s=0.0)
    for number in range(2 * REMEMBERED):
        assert allowance.take(number, 0.0)
    assert len(allowance._taken) == REMEMBERED
