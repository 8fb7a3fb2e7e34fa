"""The clock that a directory's nodes share."""

from __future__ import annotations

import math

import pytest

from p2pdiloco.discovery.clock_sync import SharedClock

NOW = 1_800_000_000.0


class Machine:
    """A wall clock that somebody may set, and a steady one."""

    def __init__(self) -> None:
        self.wall = NOW
        self.steady = 100.0
        self.clock = SharedClock(lambda: self.wall, lambda: self.steady)

    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


def test_alone_it_is_the_machines_clock_whatever_becomes_of_that() -> None:
    machine = Machine()
    assert machine.clock.now() == NOW
    machine.wait(10.0)
    machine.wall -= 3600.0
    assert machine.clock.now() == NOW + 10.0
    assert machine.clock.ahead_s == pytest.approx(-3600.0)
    assert not machine.clock.is_wrong, "nobody else has said so"


def test_who_joins_takes_over_the_others_time() -> None:
    machine = Machine()
    machine.clock.adopt([-3600.0, -3599.5, -3600.2])
    assert machine.clock.now() == pytest.approx(NOW - 3600.0)
    assert machine.clock.is_wrong
    told = machine.clock.describe()
    assert "3,600 s ahead of that of 3 other nodes of the directory" in told
    assert "timedatectl" in told
    other = Machine()
    other.clock.adopt([60.0])
    assert "60 s behind that of 1 other node of the directory" in other.clock.describe()


def test_small_differences_are_the_networks() -> None:
    machine = Machine()
    machine.clock.adopt([1.5, 0.2, -1.0])
    assert machine.clock.now() == NOW
    assert not machine.clock.is_wrong
    assert machine.clock.witnesses == 3


def test_one_liar_among_honest_ones_changes_nothing() -> None:
    machine = Machine()
    for lie in (1e9, -1e9, math.nan, math.inf, -math.inf, 1e300):
        machine.clock.adopt([0.1, lie, -0.1])
        machine.clock.compare([0.1, lie, -0.1])
        assert machine.clock.now() == NOW
    machine.clock.adopt([math.nan])
    machine.clock.adopt([1e300])
    machine.clock.adopt([])
    assert machine.clock.now() == NOW


def test_who_is_there_moves_only_with_most_of_several() -> None:
    machine = Machine()
    assert machine.clock.compare([0.0]), "one is no majority, whatever it says"
    assert machine.clock.compare([3600.0])
    assert not machine.clock.compare([3600.0, 0.0]), "the lower of two"
    assert machine.clock.compare([3600.0, 1800.0, 0.0]), "they do not agree: look again soon"
    assert machine.clock.now() == NOW
    assert machine.clock.compare([3600.0, 3600.5, 0.0])
    assert not machine.clock.compare([0.0, 0.5, -3600.0])
    assert machine.clock.now() == pytest.approx(NOW + 3600.0, abs=1.0)


def test_half_of_the_others_is_no_majority() -> None:
    machine = Machine()
    assert machine.clock.compare([-1800.0, 3600.0, 3600.5, 7200.0]), "they do not agree: look again soon"
    assert machine.clock.now() == NOW
