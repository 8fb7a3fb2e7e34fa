"""What many learners are worth: the law is found again, and groups are compared with the merge of all."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.quality import crowds, law
from benchmarks.quality.crowds import Compared, Efficiency
from benchmarks.quality.laboratory import Laboratory
from tests.quality.test_laboratory import MEAN, SMALL, text


def test_a_law_of_token_efficiency_is_found_again() -> None:
    known = Efficiency(0.5, 0.9, 0.5, -0.2)
    settings = [
        msgspec.structs.replace(SMALL, width=size.width, learners=m, batch=64, sync_every=h)
        for size in law.SIZES
        for m in (2, 8, 16)
        for h in (3, 24)
    ]
    rows = [(one, 100 * known.of(one.learners, one.sync_every, crowds.PARAMETERS[one.width])) for one in settings]
    found = crowds.fit(rows)
    assert found == pytest.approx(known)
    assert found.of(8, 6, 1e5) == pytest.approx(1 / 1.5)
    assert found.of(16, 6, 1e5) < found.of(16, 3, 1e5) < found.of(16, 3, 1e6)


@pytest.mark.parametrize(("codec", "is_exact"), [("fp32", True), ("int4", False)])
def test_merges_of_groups_differ_from_those_of_all_by_a_rounding(codec: str, is_exact: bool) -> None:
    changes = {**MEAN, "up": codec, "down": codec, "groups": 2, "bounded": False}
    laboratory = Laboratory(msgspec.structs.replace(SMALL, **changes), text())
    laboratory.exchange = compared = Compared(laboratory)
    laboratory.run()
    assert len(compared.errors) >= 12
    for difference, rounding in compared.errors:
        assert (difference < 1e-5) == (rounding < 1e-5) == is_exact
        assert difference < 2.0 * rounding + 1e-5
