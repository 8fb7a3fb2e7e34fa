"""Fine-tuning in the laboratory: learners that take turns in one model, and the table of gaps to one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks import record
from benchmarks.quality import fine_tuning, hf_learners, runner, script_tie
from benchmarks.quality.laboratory import Laboratory
from benchmarks.quality.settings import Setting, to_row
from p2pdiloco.training.dataset_files import Corpus

RATES = fine_tuning.RATES["lora"]


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that is trained for two steps."""
    monkeypatch.setattr(hf_learners, "BASE", tmp_path / "base.pt")
    monkeypatch.setattr(hf_learners, "BASE_STEPS", 2)


def text() -> Corpus:
    draw = torch.Generator().manual_seed(1)
    train, held_out = (torch.randint(0, 256, (n,), dtype=torch.uint8, generator=draw) for n in (20_000, 4_200))
    return Corpus(train=train, held_out=held_out)


def short(way: str, m: int) -> Setting:
    return msgspec.structs.replace(fine_tuning.together("english", way, m).setting, steps=20, warmup=1)


@pytest.mark.parametrize("way", ["lora", "whole"])
def test_learners_that_take_turns_are_each_as_if_alone(way: str) -> None:
    setting, model = short(way, 2), hf_learners.build(way, 1)
    batches = torch.randint(0, 256, (3, 2, 4, 65), generator=torch.Generator().manual_seed(2))
    both = hf_learners.Copies(setting, model, 2)
    alone = [hf_learners.Copies(setting, model, 1) for _ in range(2)]
    for progress, batch in enumerate(batches):
        losses = both.step(batch, progress, progress)
        apart = [one.step(batch[index : index + 1], progress, progress) for index, one in enumerate(alone)]
        assert torch.equal(losses, torch.cat(apart))
    laboratory = Laboratory(setting, text())
    for index, one in enumerate(alone):
        found, expected = torch.empty(2, laboratory.layout.elements)
        both.flat(index, laboratory.specs, laboratory.layout).copy_to(found, range(len(laboratory.layout.shards)))
        one.flat(0, laboratory.specs, laboratory.layout).copy_to(expected, range(len(laboratory.layout.shards)))
        assert torch.equal(found, expected)


def test_adapters_alone_are_exchanged_and_the_base_stays() -> None:
    """And everybody's base is the same, whatever the seed."""
    laboratory = Laboratory(short("lora", 2), text())
    whole = Laboratory(short("whole", 2), text())
    assert laboratory.layout.elements == 58_560
    assert (whole.layout.elements, len(whole.specs)) == (fine_tuning.PARAMETERS, fine_tuning.TENSORS)
    before = whole.exchange.theta.clone()
    result = laboratory.run()
    assert result.figures["global_steps"] == 20
    assert torch.equal(Laboratory(short("whole", 1), text()).exchange.theta, before)
    assert not torch.equal(whole.run().theta, before)


def put(path: Path, setting: Setting, loss: float) -> None:
    figures: dict[str, Any] = {"loss": loss, "by_window": [loss] * 4}
    record.append(path, [record.row("quality", to_row(setting), figures)])


def test_a_run_is_compared_with_more_batch_and_with_more_steps(tmp_path: Path) -> None:
    results = tmp_path / "rows.jsonl"
    for row, loss in (
        (fine_tuning.together("c++", "lora", 2), 1.02),
        (fine_tuning.wider("c++", "lora", 2), 1.0),
        (fine_tuning.longer("c++", "lora", 2), 0.85),
    ):
        for seed in (1, 2):
            for rate, worse in zip(RATES[fine_tuning.FIRST_RATES], (0.0, 0.1, 0.2), strict=True):
                put(results, msgspec.structs.replace(row.setting, seed=seed, learning_rate=rate), loss + worse)
    put(results, fine_tuning.together("english", "lora", 2).setting, 1.0)  # at one rate: nobody knows its best
    found = "\n".join(fine_tuning.lines(results))
    assert "| c++, lora, M = 2 | 2 | 0.004 | 1.0200 +- 0.0000 | +2.00 +- 0.00 | +20.00 +- 0.00 |" in found
    assert "| english, lora, M = 2 | 0 | 0.004 | - | - | - |" in found


def test_every_row_is_tuned_alike_and_repeated_at_its_best_rate(tmp_path: Path) -> None:
    """Here the lower, the better: each row goes down to the end of the ladder."""
    results, asked = tmp_path / "rows.jsonl", []
    for cell in fine_tuning.cells(results):
        if cell not in asked:
            asked.append(cell)
            put(results, cell, cell.learning_rate)
    rows = list(fine_tuning.rows())
    assert len(asked) == len(rows) * (5 + 2)
    lora = [cell for cell in asked if msgspec.structs.replace(cell, learning_rate=RATES[2], seed=1) == rows[0].setting]
    assert [(cell.learning_rate, cell.seed) for cell in lora] == [
        *((rate, 1) for rate in (RATES[2], RATES[3], RATES[4], RATES[1], RATES[0])),
        (RATES[0], 2),
        (RATES[0], 3),
    ]


def test_a_script_trains_the_laboratorys_cell_to_the_end_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner alone, with a node of its own."""
    monkeypatch.setattr(script_tie, "text_of", lambda *_: text())
    setting = msgspec.structs.replace(short("lora", 2), learners=1, batch=fine_tuning.WINDOWS, steps=24)
    with pytest.raises(RuntimeError, match="its learners trained alone"):
        script_tie.joint_share(tmp_path, 1)
    found = script_tie.learn(script_tie.Job(setting, 0, "", 0.0), tmp_path)
    assert script_tie.joint_share(tmp_path, 1) == 1.0
    assert script_tie.joint_share(tmp_path, 2) == 0.0
    assert found.steps == 24
    assert 3.0 < found.loss < 6.0, "text that is noise"


def test_scripts_are_compared_with_the_laboratory_seed_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "rows.jsonl"
    cell = fine_tuning.together("english", "lora", 2).setting
    for rate, loss in zip(RATES[fine_tuning.FIRST_RATES], (2.0, 1.0, 2.0), strict=True):
        put(results, msgspec.structs.replace(cell, learning_rate=rate), loss)
    best = msgspec.structs.replace(cell, learning_rate=RATES[fine_tuning.FIRST_RATES][1])
    put(results, msgspec.structs.replace(best, seed=2), 1.0)
    rows, asked = runner.rows(results), list[Setting]()
    monkeypatch.setattr(runner, "rows", lambda: rows)

    def swarm(setting: Setting, folder: Path, step_s: float) -> tuple[list[script_tie.Result], float]:
        asked.append(setting)
        return [script_tie.Result(1.01 * setting.seed, 290), script_tie.Result(1.03 * setting.seed, 310)], 0.5

    monkeypatch.setattr(script_tie, "swarm", swarm)
    figures = script_tie.measure("lora", "english", 2, [1, 2], 0.1, tmp_path)
    assert asked == [best, msgspec.structs.replace(best, seed=2)]
    assert figures["difference"] == pytest.approx((2.0 + 104.0) / 2)
    assert (figures["trained"], figures["joint"]) == pytest.approx((100.0, 50.0))
    with pytest.raises(RuntimeError, match=r"no row of lora, english, M = 2, seeds \[3\]"):
        script_tie.measure("lora", "english", 2, [3], 0.1, tmp_path)
