"""The learned budget; a link is a number."""

from __future__ import annotations

import pytest

from p2pdiloco.net.bandwidth import (
    CRUISE_WINDOWS,
    FLOOR_BYTES_PER_S,
    HEADROOM,
    MEMORY_WINDOWS,
    PATIENCE,
    BandwidthEstimator,
    DeliveryRateSampler,
    Path,
)

MB = 1_000_000
WINDOW_S = 0.1


def send(capacity: BandwidthEstimator, link: float, windows: int) -> list[float]:
    """Windows in which bulk always waits; what was sent in each, as rates."""
    rates = []
    for _ in range(windows):
        budget = capacity.budget
        rates.append(link if budget is None else min(budget, link))
        capacity.saw(int(rates[-1] * WINDOW_S), WINDOW_S, is_busy=True)
    return rates


def test_there_is_no_limit_until_something_was_measured() -> None:
    capacity = BandwidthEstimator()
    assert capacity.budget is None
    capacity.saw(0, WINDOW_S, is_busy=False)
    send(capacity, 10.0 * MB, 1)
    assert capacity.estimate == 10.0 * MB


@pytest.mark.parametrize("link", [0.5 * MB, 12.5 * MB, 312.5 * MB])
def test_the_link_less_the_headroom_is_kept_most_of_the_time(link: float) -> None:
    capacity = BandwidthEstimator()
    send(capacity, link, 1 + PATIENCE)
    rates = send(capacity, link, 210)
    assert capacity.estimate == pytest.approx(link)
    assert sorted(rates)[len(rates) // 2] == pytest.approx(HEADROOM * link)
    assert sum(rate > HEADROOM * link * 1.001 for rate in rates) <= len(rates) / CRUISE_WINDOWS


def test_one_bad_window_does_not_end_the_search() -> None:
    capacity = BandwidthEstimator()
    for link in (1.0 * MB, 0.5 * MB, 100.0 * MB, 100.0 * MB, 0.1 * MB):
        send(capacity, link, 1)
    send(capacity, 100.0 * MB, 10)
    assert capacity.estimate == 100.0 * MB


def test_a_faster_link_is_found_by_doubling() -> None:
    capacity = BandwidthEstimator()
    send(capacity, 1.0 * MB, 30)
    send(capacity, 100.0 * MB, CRUISE_WINDOWS + 12)
    assert capacity.estimate == 100.0 * MB


def test_a_slower_link_is_believed_after_a_while() -> None:
    capacity = BandwidthEstimator()
    send(capacity, 100.0 * MB, 30)
    send(capacity, 10.0 * MB, MEMORY_WINDOWS // 2)
    assert capacity.estimate == 100.0 * MB
    send(capacity, 10.0 * MB, MEMORY_WINDOWS)
    assert capacity.estimate == pytest.approx(10.0 * MB)


def test_what_did_not_fill_the_link_says_nothing_against_it() -> None:
    capacity = BandwidthEstimator()
    send(capacity, 100.0 * MB, 30)
    for _ in range(10 * MEMORY_WINDOWS):
        capacity.saw(100, WINDOW_S, is_busy=False)
    assert capacity.estimate == 100.0 * MB
    capacity.saw(int(200.0 * MB * WINDOW_S), WINDOW_S, is_busy=False)
    assert capacity.estimate == 200.0 * MB


def test_a_path_that_carries_nothing_leaves_the_floor() -> None:
    capacity = BandwidthEstimator()
    send(capacity, 0.0, 300)
    assert capacity.budget == FLOOR_BYTES_PER_S


def test_a_gauge_sees_that_nothing_leaves_this_machine() -> None:
    gauge: DeliveryRateSampler[str] = DeliveryRateSampler()
    here, away = (Path("cubic", 0.01, acked_bytes=0, is_local=is_local) for is_local in (True, False))
    for paths, is_local in (({}, False), ({"a": here}, True), ({"a": here, "b": away}, False), ({"b": here}, True)):
        gauge.look(paths, lambda _: False, 0.0)
        assert gauge.is_local is is_local
