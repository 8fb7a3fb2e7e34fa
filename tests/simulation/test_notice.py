"""Peers that leave in order because their machine is taken back: nothing that they have trained is lost."""

from __future__ import annotations

import pytest

from benchmarks.churn.notice import LEAVE_S, in_worlds

pytestmark = pytest.mark.heavy


def test_no_token_of_a_leaver_is_lost_and_it_is_gone_in_time() -> None:
    """Judged by the models of those who stay. `python -m benchmarks.churn.notice` does more, and real processes."""
    found = in_worlds(range(1, 11))
    assert len(found) >= 5
    assert all(left.trained for _, left in found)
    assert [(seed, left) for seed, left in found if left.lost or left.trouble or left.seconds > LEAVE_S] == []
