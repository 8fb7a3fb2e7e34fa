"""Lines that all connections of a peer share: who goes when, and seeds under them."""

from __future__ import annotations

import os
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import pytest

from p2pdiloco.net.traffic_shaping import PEER_TURN_BYTES
from tests.machine_sim.report import simulate
from tests.machine_sim.shared_link_network import Parcel, Uplink

JOBS = min(2, os.cpu_count() or 1)


class Hours:
    """Virtual time, and what left when."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self.left: list[tuple[str, float]] = []
        self.now = 0.0

    def schedule(self, at: float, action: Callable[[Any], None], argument: Any) -> None:
        heappush(self.heap, (at, len(self.left) + len(self.heap), action, argument))

    def parcel(self, size: float, name: str) -> Parcel:
        return Parcel(size, lambda told: self.left.append((told, round(self.now, 6))), name)

    def pass_until(self, end: float) -> None:
        while self.heap and self.heap[0][0] <= end:
            self.now, _, action, argument = heappop(self.heap)
            action(argument)
        self.now = end


@pytest.fixture
def hours() -> Hours:
    return Hours()


@pytest.fixture
def uplink(hours: Hours) -> Uplink:
    return Uplink(100.0, hours.schedule)


def test_connections_take_turns_of_a_parcel(hours: Hours, uplink: Uplink) -> None:
    for name, size in (("a", 200.0), ("b", 100.0), ("a", 100.0), ("c", 100.0)):
        uplink.put(name, hours.parcel(size, name), 0.0)
    hours.pass_until(2.5)
    uplink.put("b", hours.parcel(100.0, "b"), 2.5)
    hours.pass_until(10.0)
    assert hours.left == [("a", 2.0), ("b", 3.0), ("c", 4.0), ("b", 5.0), ("a", 6.0)]


def test_a_large_parcel_waits_for_others_after_each_turn(hours: Hours) -> None:
    """As a codec with more bits makes."""
    uplink = Uplink(PEER_TURN_BYTES, hours.schedule)
    uplink.put("a", hours.parcel(2.5 * PEER_TURN_BYTES, "state"), 0.0)
    hours.pass_until(0.5)
    for _ in range(2):
        uplink.put("b", hours.parcel(0.5 * PEER_TURN_BYTES, "commit"), 0.5)
    hours.pass_until(10.0)
    assert hours.left == [("commit", 1.5), ("commit", 2.0), ("state", 3.5)]


def test_a_state_yields_after_each_slice(hours: Hours) -> None:
    uplink = Uplink(1e6, hours.schedule)
    uplink.put("a", hours.parcel(1e6, "state"), 0.0, 10.0)
    hours.pass_until(0.1)
    uplink.put("b", hours.parcel(9e5, "commit"), 0.1)
    hours.pass_until(10.0)
    assert [name for name, _ in hours.left] == ["commit", "state"]
    assert hours.left[0][1] < 1.1
    assert hours.left[1][1] == pytest.approx(1.9, abs=1e-3)


def test_parcels_of_one_connection_go_one_by_one_the_urgent_first(hours: Hours, uplink: Uplink) -> None:
    for name, urgency in (("first", 10.0), ("state", 10.0), ("commit", 0.0)):
        uplink.put("a", hours.parcel(100.0, name), 0.0, urgency)
    assert [parcel.argument for parcel in uplink.waiting("a")] == ["commit", "state"]
    hours.pass_until(10.0)
    assert hours.left == [("first", 1.0), ("commit", 2.0), ("state", 3.0)]


def test_control_does_not_wait_for_bulk_which_pays_for_it(hours: Hours, uplink: Uplink) -> None:
    uplink.put("a", hours.parcel(100.0, "bulk"), 0.0)
    hours.pass_until(0.5)
    assert uplink.control(10.0, 0.5) == pytest.approx(0.6)
    assert uplink.control(10.0, 0.5) == pytest.approx(0.7)
    hours.pass_until(10.0)
    assert hours.left == [("bulk", 1.2)]


def test_what_waits_for_a_broken_connection_takes_nothing_of_the_line(hours: Hours, uplink: Uplink) -> None:
    for name in ("a", "b"):
        uplink.put(name, hours.parcel(100.0, name), 0.0)
    uplink.put("b", hours.parcel(100.0, "more"), 0.0)
    hours.pass_until(1.0)
    assert [parcel.argument for parcel in uplink.clear("b", 1.0)] == ["more", "b"]
    hours.pass_until(10.0)
    assert hours.left == [("a", 1.0)]
    assert uplink.clear("b", 10.0) == []


def test_a_connection_that_is_held_begins_nothing(hours: Hours, uplink: Uplink) -> None:
    for name in ("begun", "next", "last"):
        uplink.put("a", hours.parcel(100.0, name), 0.0)
    uplink.put("b", hours.parcel(200.0, "other"), 0.0)
    uplink.hold("a")
    hours.pass_until(10.0)
    uplink.release("a", 10.0)
    hours.pass_until(20.0)
    assert hours.left == [("begun", 1.0), ("other", 3.0), ("next", 11.0), ("last", 12.0)]
    uplink.hold("a")
    uplink.put("a", hours.parcel(100.0, "lost"), 20.0)
    assert [parcel.argument for parcel in uplink.clear("a", 21.0)] == ["lost"]
    uplink.put("a", hours.parcel(100.0, "new"), 21.0)
    hours.pass_until(30.0)
    assert hours.left[4:] == [("new", 22.0)]


def test_a_line_that_rested_saved_nothing(hours: Hours, uplink: Uplink) -> None:
    uplink.put("a", hours.parcel(100.0, "a"), 0.0)
    hours.pass_until(50.0)
    uplink.put("a", hours.parcel(100.0, "again"), 50.0)
    hours.pass_until(60.0)
    assert hours.left == [("a", 1.0), ("again", 51.0)]


@pytest.mark.timeout(300)
def test_shared_uplinks_break_nothing() -> None:
    """In 7, 10 and 20 newcomers take states over slow lines; in 151 and 162 forks are as heavy as each other;
    in 10402198 nine come to a founder whose line its commits filled (M6b)."""
    report = simulate([*range(11), 20, 151, 162, 272, 10402198], "uplinks", jobs=JOBS)
    assert not report.violations, "\n".join(f"{v.command}   # {v.sentence}" for v in report.violations)
    assert report.tokens_lost == 0
    assert report.versions > 500
