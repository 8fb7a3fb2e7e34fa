"""The scaling law: its sizes and cells, its fit, and what is printed."""

from __future__ import annotations

import itertools
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.quality import law
from benchmarks.quality.__main__ import main
from benchmarks.quality.law import Law, Point
from benchmarks.quality.questions import apart
from benchmarks.quality.settings import Setting, to_row
from p2pdiloco.training.models import build_model

SMALLEST, SECOND = law.SIZES[:2]
TRUE = Law(8.0, learners=1.1, steps=-0.7, sync_every=0.5, size=-0.2)


def made(noise: float = 0.0, every: tuple[int, ...] = (3, 6)) -> list[Point]:
    draw, found = random.Random(1), []
    for size, m, steps, h in itertools.product(law.SIZES, (2, 8), (500, 2000), every):
        point = Point(size.parameters, steps, m, h, 0.0)
        found.append(point._replace(gap=TRUE.gap(point) * (1.0 + draw.uniform(-noise, noise))))
    return found


@pytest.mark.parametrize("size", law.SIZES, ids=lambda size: f"{size.parameters}")
def test_a_size_has_as_many_parameters_and_tokens_as_it_says(size: law.Size) -> None:
    model = build_model(size.cell(1.0).model_config, 1)
    assert sum(p.numel() for p in model.parameters()) == size.parameters
    assert size.steps * size.batch * law.CONTEXT == pytest.approx(20 * size.parameters, rel=0.01)
    assert size._replace(length=500).steps == 500


def test_small_sizes_come_first_and_each_cell_once() -> None:
    found = list(law.cells(10**9))
    assert len(set(found)) == len(found)
    assert [cell.width for cell in found] == sorted(cell.width for cell in found)
    assert {cell.width for cell in law.cells(SECOND.parameters)} == {SMALLEST.width, SECOND.width}
    assert all(cell.agreement and cell.bounded for cell in found if cell.method == "diloco")


def test_equal_cells_differ_in_size_steps_and_rule_alone() -> None:
    found = list(law.equal_cells(10**9))
    assert len(set(found)) == len(found)
    assert {cell.batch for cell in found} == {law.EQUAL_BATCH}
    assert {cell.steps for cell in found if cell.data == "same"} == set(law.STEPS)
    assert {(cell.width, cell.steps) for cell in found if cell.data == "english"} == {
        (size.width, steps) for size in law.SIZES for steps in law.PROSE_STEPS
    }
    assert {cell.width for cell in law.equal_cells(SECOND.parameters)} == {SMALLEST.width, SECOND.width}
    assert law.equal_rates(SMALLEST, "mean every 6") == (1.4, 2.4)
    assert law.equal_rates(law.HELD_BACK, "RDA every 24") == (0.46, 0.8)


def test_a_law_is_found_again() -> None:
    found = law.fit(made())
    assert found is not None
    assert found == pytest.approx(TRUE)
    assert found.gap(Point(100_000, 1000, 8, 6, 0.0)) == pytest.approx(8.0)


def test_what_does_not_vary_has_no_exponent() -> None:
    found = law.fit(made(every=(6,)))
    assert found is not None
    assert found == pytest.approx(TRUE._replace(sync_every=0.0))


def test_h_is_told_by_cells_that_differ_in_it_alone() -> None:
    """What else differs between cells of other H does not touch its exponent."""
    odd = [point._replace(sync_every=12, gap=2.0 * point.gap, parameters=7 * point.parameters) for point in made()[::4]]
    found = law.fit(made() + odd)
    assert found is not None
    assert found.sync_every == pytest.approx(TRUE.sync_every)


def test_windows_and_prose_have_their_own_factors() -> None:
    other = [point._replace(context=128, gap=1.5 * point.gap) for point in made()]
    prose = [point._replace(data="english", gap=1.2 * point.gap) for point in made()]
    found = law.fit([*made(), *other, *prose])
    assert found is not None
    assert found == pytest.approx(TRUE._replace(window=math.log2(1.5), prose=math.log(1.2)))
    assert found.gap(prose[0]) == pytest.approx(prose[0].gap)


def test_a_cell_that_is_held_back_is_predicted_before_it_is_run(tmp_path: Path) -> None:
    results, held = tmp_path / "rows.jsonl", law.HELD[0]
    equal = [size for size in law.equal(SECOND.parameters) if size.data == "same"]
    for size in equal:
        put(results, size.parallel(law.RATES[0]), 2.0)
        put(results, size.cell(law.RATES[0], **law.RULES["mean every 6"], learners=8), 2.2)
    before = "\n".join(law.lines(SECOND.parameters, None, results))
    assert f"held back, not run yet: {held.where}: predicted +" in before
    for cell in apart()[-2:]:
        put(results, cell, 2.1)
    after = "\n".join(law.lines(SECOND.parameters, None, results))
    assert f"held back: {held.where}: predicted +" in after
    assert "measured +5.0 %" in after
    assert re.findall(r"mean, \d+ points", before) == re.findall(r"mean, \d+ points", after)


def test_most_intervals_hold_the_truth_and_grow_with_noise() -> None:
    widths = []
    for noise in (0.05, 0.3):
        low, high = law.interval(one.size for one in law.fits(made(noise)))
        assert low < -0.2 < high
        widths.append(high - low)
    assert widths[1] > 2 * widths[0]


@pytest.mark.parametrize("gaps", [(), (3.0,), (3.0, -0.1)])
def test_of_one_size_there_is_no_law(gaps: tuple[float, ...]) -> None:
    assert law.fit(Point(1000 * (i + 1), 500, 2, 6, gap) for i, gap in enumerate(gaps)) is None


def put(path: Path, setting: Setting, loss: float) -> None:
    figures: dict[str, Any] = {"loss": loss, "by_window": [loss] * 4}
    figures |= {"up_bytes_per_parameter": 0.4, "down_bytes_per_parameter": 0.3}
    record.append(path, [record.row("quality", to_row(setting), figures)])


def test_what_is_printed_is_the_gap_at_the_best_rate_and_the_law_of_it(tmp_path: Path) -> None:
    results = tmp_path / "rows.jsonl"
    rule = law.RULES["mean every 6"]
    for size, gap in ((SMALLEST, 1.08), (SECOND, 1.04)):
        for rate, worse in zip(law.RATES, (1.1, 1.0, 1.2), strict=True):
            put(results, size.parallel(rate), 2.0 * worse)
            put(results, size.cell(rate, **rule, learners=8), 2.0 * worse * gap)
    found = "\n".join(law.lines(SECOND.parameters, None, results))
    assert "| 26,232, mean every 6, M = 8 | 1 | 2.1600 | +8.00 |" in found
    assert "| 80,112, mean every 6, M = 8 | 1 | 2.0800 | +4.00 |" in found
    assert "edge of those trained: none" in found
    assert "mean, 2 points: " in found
    assert "exponent of learners: +0.00 (90 %: +0.00 to +0.00)" in found
    assert "RDA: no law" in found
    put(results, SECOND.cell(law.RATES[-1], **rule, learners=2), 2.0)
    assert f"edge of those trained: {SECOND.parameters:,}, mean every 6, M = 2" in "\n".join(
        law.lines(SECOND.parameters, None, results)
    )


def test_a_row_gets_more_rates_as_long_as_its_best_is_at_an_edge(tmp_path: Path) -> None:
    """A best rate in the middle gets none, and the last rate of all ends it."""
    results, rule = tmp_path / "rows.jsonl", law.RULES["mean every 6"]
    by_rate = dict(zip(law.ALL_RATES, (1.3, 1.2, 1.1, 1.0, 1.05, 1.06, 1.07), strict=True))
    for rate in law.RATES:
        put(results, SMALLEST.parallel(rate), by_rate[rate])
        for seed in law.SEEDS:  # the lower, the better
            put(results, SMALLEST.cell(rate, **rule, learners=8, seed=seed), rate)
    asked = []
    for cell in law.more_cells(SMALLEST.parameters, results):
        assert len(asked) < 4
        asked.append(cell)
        put(results, cell, cell.learning_rate)
    rows = [SMALLEST.cell(rate, **rule, learners=8, seed=seed) for rate in (0.46, 0.26) for seed in law.SEEDS]
    assert asked == rows


def test_what_is_held_back_is_predicted_and_fits_no_law(tmp_path: Path) -> None:
    results = tmp_path / "rows.jsonl"
    rule = law.RULES["mean every 6"]
    for size, gap in ((SMALLEST, 1.08), (SECOND, 1.04), (law.HELD_BACK, 1.03)):
        put(results, size.parallel(law.RATES[1]), 2.0)
        put(results, size.cell(law.RATES[1], **rule, learners=8), 2.0 * gap)
    put(results, SMALLEST._replace(length=500).parallel(law.RATES[1]), 2.0)  # the law needs more than two lengths
    put(results, SMALLEST._replace(length=500).cell(law.RATES[1], **rule, learners=8), 2.0 * 1.08)
    without, found = ("\n".join(law.lines(n, None, results)) for n in (SECOND.parameters, law.HELD_BACK.parameters))
    assert "held back: 2,755,008" not in without
    assert without.split("points: ")[1].split("  held back")[0] in found
    assert "| 2,755,008 on packages, 3,363 steps, mean every 6, M = 8 | 1 | 2.0600 | +3.00 |" in found
    assert re.search(r"held back: 2,755,008, 3,363 steps, H = 6: predicted \+\d.\d %, measured \+3.0 %", found)
    assert {cell.data for cell in law.cells(law.SIZES[-1].parameters)} == {"same"}
    assert [cell.data for cell in law.cells(law.HELD_BACK.parameters)].count("packages") == 12


def test_a_device_that_is_not_there_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["scale", "--device", "gpu"])
    assert "--device gpu is not a device that torch knows" in capsys.readouterr().err
