"""The table of benchmarks: rows are found by their settings, and what is missing is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import summary
from benchmarks.summary import MEASURES, Measure, find, summarize

GLOO = {"system": "gloo"}
MEASURE = Measure("exchange", "wire.exchange --all", "wall_s", 0.5, {"system": "p2pdiloco"}, GLOO, 10.0)


def row(system: str, **figures: float | None) -> dict[str, Any]:
    return {"settings": {"system": system, "link": "lo"}, "figures": figures, "load_1min": 0.3}


def test_a_figure_stands_beside_what_is_asked_and_the_other_systems() -> None:
    rows = [row("p2pdiloco", wall_s=1.0), row("gloo", wall_s=6.0), row("p2pdiloco", wall_s=9.0)]
    assert find(rows, {"system": "p2pdiloco", "link": "lo"}) == rows[2], "the last one"
    assert find(rows, {"system": "torchft"}) is None
    alone = {"figure": 0.9, "asked": 0.5, "peer": 0.6, "load": 0.3, "beside": None, "ratio": None}
    assert summarize(MEASURE, rows) == alone
    beside = summarize(MEASURE, rows, [row("p2pdiloco", wall_s=18.0)], "another")
    assert beside == alone | {"beside": 1.8, "ratio": 0.5}
    assert summarize(MEASURE, rows[2:]) == alone | {"peer": None}
    assert summarize(MEASURE, rows[1:2]) is None
    assert summarize(MEASURE, [row("p2pdiloco", wall_s=None)]) is None


def test_one_run_of_a_benchmark_serves_all_its_measures_and_failures_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(command: str, folder: Path) -> list[dict[str, Any]]:
        ran.append(command)
        return [row("p2pdiloco", wall_s=1.0, cpu_s=2.0)] if command == MEASURE.command else []

    monkeypatch.setattr(summary, "run", run)
    broken = Measure("memory", "memory", "bytes", 1.0)
    monkeypatch.setattr(summary, "MEASURES", (MEASURE, MEASURE._replace(name="CPU", key="cpu_s"), broken))
    path = tmp_path / "rows.jsonl"
    assert summary.main(["--json", str(path)]) == 1
    assert ran == [MEASURE.command, "memory"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["settings"]["measure"], one["figures"]["figure"]) for one in rows] == [("exchange", 0.1), ("CPU", 0.2)]
    told = capsys.readouterr()
    assert "| exchange |" in told.out
    assert "not measured: memory" in told.err
    assert summary.main(["--only", "nothing"]) == 2


def test_every_measure_names_a_benchmark_that_is_there() -> None:
    folder = Path(summary.__file__).parent
    for measure in MEASURES:
        path = folder.joinpath(*measure.command.split()[0].split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), measure.name
    assert len({measure.name for measure in MEASURES}) == len(MEASURES)
