"""The public model of utilisation: its published figures, and what must hold whatever the line."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.scale import bandwidth
from benchmarks.scale.bandwidth import least_rate, sustained
from benchmarks.wan import task
from p2pdiloco.planner import SYSTEMS, Training, p2pdiloco, streaming


@pytest.mark.parametrize(("name", "theirs", "ours"), bandwidth.published(), ids=lambda x: str(x)[:20])
def test_published_cells_are_within_five_per_cent(name: str, theirs: float, ours: float) -> None:
    assert ours == pytest.approx(theirs, rel=0.05), name


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_faster_line_is_never_worse(system: str) -> None:
    training = Training(parameters=12e9, peers=8, sync_every=100)
    shares = [SYSTEMS[system](training, rate) for rate in bandwidth.RATES]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 1
    rate = least_rate(SYSTEMS[system], training)
    assert SYSTEMS[system](training, rate) == pytest.approx(0.95, abs=1e-6)


def test_a_late_fragment_waits_for_its_deadline_alone() -> None:
    """With a round every ten steps and two of overlap, three steps are what there is."""
    seldom = Training(parameters=1e9, peers=2, sync_every=240, up_bytes=0.5, down_bytes=0.5)
    bits = 1e9 * 8 * 0.5 / 24
    assert streaming(seldom, bits / 3) == 1.0
    assert streaming(seldom, bits / 4) == pytest.approx(10 / 11)


def test_rounds_are_left_out_where_learners_would_wait() -> None:
    training = Training(parameters=1e9, peers=4)
    rate = least_rate(p2pdiloco, training, 1.0)
    assert sustained(training, rate) == pytest.approx(1.0)
    assert sustained(training, rate / 2) == pytest.approx(0.5)
    assert p2pdiloco(training, rate / 2) == pytest.approx(0.5)


def test_cells_are_all_there_and_more_peers_need_more() -> None:
    found = bandwidth.cells()
    assert len(found) == len(bandwidth.SIZES) * len(bandwidth.PEERS) * len(bandwidth.CODECS)
    assert found["12B, M = 2, int4"]["p2pdiloco"] < found["12B, M = 64, int4"]["p2pdiloco"]
    training = msgspec.structs.replace(bandwidth.PAPER, up_bytes=0.271, down_bytes=0.271)
    assert bandwidth.needed(training)["p2pdiloco"] < 0.84


def test_the_measured_model_is_that_of_the_benchmark() -> None:
    assert bandwidth.MEASURED_PARAMETERS == task.PARAMETERS
