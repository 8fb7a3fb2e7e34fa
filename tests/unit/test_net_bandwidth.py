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


def send(estimator: BandwidthEstimator, link: float, windows: int) -> list[float]:
    """Windows in which bulk always waits; what was sent in each, as rates."""
    rates = []
    for _ in range(windows):
        budget = estimator.budget
        rates.append(link if budget is None else min(budget, link))
        estimator.add_window(int(rates[-1] * WINDOW_S), WINDOW_S, is_busy=True)
    return rates


def test_there_is_no_limit_until_something_was_measured() -> None:
    estimator = BandwidthEstimator()
    assert estimator.budget is None
    estimator.add_window(0, WINDOW_S, is_busy=False)
    send(estimator, 10.0 * MB, 1)
    assert estimator.estimate == 10.0 * MB


@pytest.mark.parametrize("link", [0.5 * MB, 12.5 * MB, 312.5 * MB])
def test_the_link_less_the_headroom_is_kept_most_of_the_time(link: float) -> None:
    estimator = BandwidthEstimator()
    send(estimator, link, 1 + PATIENCE)
    rates = send(estimator, link, 210)
    assert estimator.estimate == pytest.approx(link)
    assert sorted(rates)[len(rates) // 2] == pytest.approx(HEADROOM * link)
    assert sum(rate > HEADROOM * link * 1.001 for rate in rates) <= len(rates) / CRUISE_WINDOWS


def test_one_bad_window_does_not_end_the_search() -> None:
    estimator = BandwidthEstimator()
    for link in (1.0 * MB, 0.5 * MB, 100.0 * MB, 100.0 * MB, 0.1 * MB):
        send(estimator, link, 1)
    send(estimator, 100.0 * MB, 10)
    assert estimator.estimate == 100.0 * MB


def test_a_faster_link_is_found_by_doubling() -> None:
    estimator = BandwidthEstimator()
    send(estimator, 1.0 * MB, 30)
    send(estimator, 100.0 * MB, CRUISE_WINDOWS + 12)
    assert estimator.estimate == 100.0 * MB


def test_a_slower_link_is_believed_after_a_while() -> None:
    estimator = BandwidthEstimator()
    send(estimator, 100.0 * MB, 30)
    send(estimator, 10.0 * MB, MEMORY_WINDOWS // 2)
    assert estimator.estimate == 100.0 * MB
    send(estimator, 10.0 * MB, MEMORY_WINDOWS)
    assert estimator.estimate == pytest.approx(10.0 * MB)


def test_what_did_not_fill_the_link_says_nothing_against_it() -> None:
    estimator = BandwidthEstimator()
    send(estimator, 100.0 * MB, 30)
    for _ in range(10 * MEMORY_WINDOWS):
        estimator.add_window(100, WINDOW_S, is_busy=False)
    assert estimator.estimate == 100.0 * MB
    estimator.add_window(int(200.0 * MB * WINDOW_S), WINDOW_S, is_busy=False)
    assert estimator.estimate == 200.0 * MB


def test_a_line_of_64_kbit_gets_a_budget_that_it_carries() -> None:
    """Heartbeats wait behind all bulk that is sent beyond what the line carries."""
    estimator = BandwidthEstimator()
    send(estimator, 8000.0, 10)
    assert estimator.budget == pytest.approx(0.9 * 8000.0)


def test_a_path_that_carries_nothing_leaves_the_floor() -> None:
    estimator = BandwidthEstimator()
    send(estimator, 0.0, 300)
    assert estimator.budget == FLOOR_BYTES_PER_S


def test_a_gauge_sees_that_nothing_leaves_this_machine() -> None:
    gauge: DeliveryRateSampler[str] = DeliveryRateSampler()
    here, away = (Path("cubic", 0.01, acked_bytes=0, is_local=is_local) for is_local in (True, False))
    for paths, is_local in (({}, False), ({"a": here}, True), ({"a": here, "b": away}, False), ({"b": here}, True)):
        gauge.sample(paths, lambda _: False, 0.0)
        assert gauge.is_local is is_local
