"""What is claimed: chosen by one half of the held-out text, shown by the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import record
from benchmarks.quality.claims import Claim, efficiency, table
from benchmarks.quality.report import seedless
from benchmarks.quality.settings import Setting, to_row

ONE = Setting(method="parallel", learners=1, batch=64, inner="muon")


def put(path: Path, setting: Setting, validation: float, test: float) -> None:
    figures: dict[str, Any] = {"loss": (validation + test) / 2, "by_window": [validation, test] * 3}
    figures |= {"up_bytes_per_parameter": 0.4, "down_bytes_per_parameter": 0.3}
    record.append(path, [record.row("quality", to_row(setting), figures)])


def test_a_rate_is_chosen_by_validation_and_a_gap_is_that_of_the_test_half(tmp_path: Path) -> None:
    results, out = tmp_path / "rows.jsonl", tmp_path / "table.jsonl"
    for seed in (1, 2):
        put(results, msgspec.structs.replace(ONE, learning_rate=1e-3, seed=seed), validation=1.0, test=2.0)
        put(results, msgspec.structs.replace(ONE, learning_rate=2e-3, seed=seed), validation=1.1, test=1.0)
        put(results, msgspec.structs.replace(ONE, method="diloco", learners=4, seed=seed), validation=9.0, test=2.1)
    put(results, msgspec.structs.replace(ONE, steps=960, learning_rate=1e-3), validation=1.5, test=2.2)
    claim = Claim("four", seedless(msgspec.structs.replace(ONE, method="diloco", learners=4)))
    absent = Claim("eight", msgspec.structs.replace(claim.setting, learners=8))
    lines = table(out, [claim, absent], results)
    written = [json.loads(line) for line in out.read_text().splitlines()]
    figures = written[0]["figures"]
    assert figures["test"] == [2.1, 2.1]
    assert figures["to_parallel"] == pytest.approx([5.0, 5.0])
    assert figures["token_efficiency"] == pytest.approx([100 * 0.5**0.5] * 2)
    assert written[1]["figures"] == {"seeds": []}
    assert "| eight | 0 | - | - | - | - | - |" in lines


def test_token_efficiency_is_read_from_runs_of_other_lengths() -> None:
    assert efficiency(1.5, {480: 2.0, 960: 1.5, 1920: 1.0}, 1920) == pytest.approx(0.5)
    assert efficiency(2.1, {480: 2.0, 1920: 1.0}, 1920) is None
    assert efficiency(0.9, {480: 2.0, 1920: 1.0}, 1920) is None
