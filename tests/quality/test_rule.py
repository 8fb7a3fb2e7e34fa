"""The product's choice of H and merge against other rows with its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.quality import rule
from benchmarks.quality.bases import as_shipped
from benchmarks.quality.questions import ANY_LENGTH, EVERY_THREE, LINE
from benchmarks.quality.settings import Setting, to_row

SHAPE: dict[str, Any] = {**LINE, "context": 64, "steps": 1000, "learners": 8, "agreement": True}


def put(path: Path, setting: Setting, loss: float, sent: float = 0.8) -> None:
    figures: dict[str, Any] = {"loss": loss, "by_window": [loss] * 4}
    figures |= {"up_bytes_per_parameter": sent / 2, "down_bytes_per_parameter": sent / 2}
    record.append(path, [record.row("quality", to_row(setting), figures)])


@pytest.mark.parametrize(("steps", "every"), [(480, 3), (1000, 6), (1920, 12), (4000, 24)])
@pytest.mark.parametrize("learners", [2, 4, 8])
def test_a_choice_is_by_planned_steps_however_many_learners_there_are(steps: int, every: int, learners: int) -> None:
    cell = as_shipped(**EVERY_THREE | SHAPE | {"steps": steps, "learners": learners})
    assert rule.chosen(cell, is_large=True).sync_every == every
    assert rule.chosen(cell, is_large=False).sync_every == 3


def test_a_choice_is_compared_with_rows_that_send_no_more(tmp_path: Path) -> None:
    """A small model exchanges every three steps, a large one every six in a run of 1,000."""
    results = tmp_path / "rows.jsonl"
    put(results, as_shipped(**SHAPE | {"method": "parallel", "learners": 1, "bounded": False}), 2.0)
    put(results, as_shipped(**EVERY_THREE | SHAPE), 2.04)
    put(results, as_shipped(**ANY_LENGTH | SHAPE), 2.10)
    put(results, as_shipped(**ANY_LENGTH | SHAPE | {"up": "int2"}), 2.08, sent=0.6)
    put(results, as_shipped(**ANY_LENGTH | SHAPE | {"overlap": 1}), 2.02)  # needs a faster line
    put(results, as_shipped(**ANY_LENGTH | SHAPE | {"pools": "momentum"}), 2.0)  # for nothing
    found = list(rule.lines(results))
    small, large = (next(line for line in found if f"| {size} |" in line) for size in ("its size", "large"))
    assert "| mean, 1/0, H = 3 | +2.0 | mean, 1/0, H = 3 | +2.0 | 0.0 |" in small
    assert "| mean, 1/0, H = 6 | +5.0 | mean, 1/0, H = 6, codec int2, int4 | +4.0 | 1.0 |" in large
    assert found[-1].endswith("largest loss: 1.0 points")
