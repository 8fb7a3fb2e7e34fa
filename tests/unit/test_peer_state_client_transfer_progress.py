"""Bytes, rate and time left of a download; time is a number."""

from __future__ import annotations

import pytest

from p2pdiloco.peer.state_client import WINDOW_S, TransferProgress, clock

MB = 1_000_000


def test_the_rate_follows_the_last_seconds() -> None:
    progress = TransferProgress(1000 * MB, 0.0)
    for second in range(1, 21):
        progress.add(10 * MB, float(second))
    assert progress.bytes_per_s(20.0) == pytest.approx(10 * MB)
    assert progress.left_s(20.0) == pytest.approx(80.0)
    for second in range(21, 31):
        progress.add(2 * MB, float(second))
    assert progress.bytes_per_s(30.0) == pytest.approx(2 * MB, rel=0.01)
    assert progress.bytes_per_s(30.0 + WINDOW_S) == pytest.approx(MB, rel=0.01)


def test_nothing_yet_and_everything() -> None:
    progress = TransferProgress(MB, 0.0)
    assert progress.left_s(1.0) is None
    assert "stalled" in progress.line(1.0, 100)
    progress.add(MB, 2.0)
    assert progress.share == 1.0
    assert progress.left_s(2.0) == 0.0
    assert TransferProgress(0, 0.0).share == 1.0


@pytest.mark.parametrize("width", [0, 10, 40, 60, 79, 200])
def test_the_line_fits_in_its_terminal(width: int) -> None:
    progress = TransferProgress(123_456 * MB, 0.0)
    progress.add(23_456 * MB, 7.0)
    line = progress.line(7.0, width)
    assert len(line) <= width
    assert line.isascii()


def test_the_line() -> None:
    progress = TransferProgress(800 * MB, 0.0)
    progress.add(400 * MB, 4.0)
    bar = "=" * 15 + " " * 15
    assert progress.line(4.0, 100) == f"[{bar}]  50% of 800.0 MB, 100.0 MB/s, 0:04 left"


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0.4, 67.0, 3729.0)] == ["0:00", "1:07", "1:02:09"]


def test_what_the_event_log_gets() -> None:
    progress = TransferProgress(800 * MB, 0.0)
    assert progress.fields(1.0) == {"done_mb": 0.0, "of_mb": 800.0, "mb_per_s": 0.0, "left_s": None}
    progress.add(400 * MB, 4.0)
    assert progress.fields(4.0) == {"done_mb": 400.0, "of_mb": 800.0, "mb_per_s": 100.0, "left_s": 4.0}
