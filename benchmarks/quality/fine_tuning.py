"""Fine-tuning of a small Hugging Face model together: adapters (LoRA) or all parameters, with AdamW.

1. The base (``hf_learners``) is a Llama of 181,440 parameters over bytes, trained on the standard library. It is
   fine-tuned on English and on C++, with the settings that ``peers/lora.py`` and ``peers/pretrain.py`` give their runs.
   A learner has 8 windows a step, whatever the number of learners (M).
2. A run of M learners is compared with one machine that has M times the batch in as many steps, and with one that makes
   M times the steps with one learner's batch.
3. All have learning rates of their own, tuned alike with the first seed: three, and more as long as the best is the
   lowest or highest. The best is repeated with two more seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.quality import runner
from benchmarks.quality.bases import as_shipped
from benchmarks.quality.claims import Cells, beyond_edge, halves, tuned
from benchmarks.quality.questions import LINE
from benchmarks.quality.report import by_seed, seedless, spread
from benchmarks.quality.settings import Setting
from p2pdiloco.training import founding_file

CONTEXT = 64
STEPS = 300
WINDOWS = 8
"""Windows that one learner trains on in one step."""
SEEDS = (1, 2, 3)
LEARNERS = (2, 4, 8)
QUICK = 4
"""Most learners of adapters whose exchange is also taken to end within one step."""
TEXTS = ("english", "c++")
PARAMETERS, TENSORS = 181_440, 30
WAYS = ("lora", "whole")
"""Ways to fine-tune: those of ``peers/lora.py`` and ``peers/pretrain.py``, whose runs have the defaults of scripts."""
RATES = {way: tuple(start * 2.0**step for step in range(8)) for way, start in (("lora", 1e-3), ("whole", 2.5e-4))}
FIRST_RATES = slice(2, 5)
"""Those that every row is trained at."""
BEFORE: dict[str, dict[str, Any]] = {
    "lora": {"fragments": 2, "sync_every": 6, "up": "int8", "down": "int8"},
    "whole": {"fragments": 4, "sync_every": 8},
}
"""Less frequent exchanges, which both scripts had until 2026-11-27; also the plain mean."""
SELDOM = {"merge": "rda", "sync_every": 24, "outer_rate": 0.4, "outer_momentum": 0.7}
"""The rule of larger models."""


class Row(NamedTuple):
    """M learners, or one machine."""

    name: str
    setting: Setting


def _shipped(way: str) -> dict[str, Any]:
    """Return the exchange that the script of ``way`` gives a run of a model of this size."""
    run = founding_file.settings({"run": way}, tensors=TENSORS, parameters=PARAMETERS)
    schedule, outer = run.schedule, run.outer
    times = {"fragments": schedule.fragments, "sync_every": schedule.sync_every, "overlap": schedule.overlap}
    step = {"merge": outer.merge, "outer_rate": outer.learning_rate, "outer_momentum": outer.momentum}
    return times | step | {"up": run.codec.up, "down": run.codec.down}


def _cell(text: str, way: str, m: int, **changes: Any) -> Setting:
    shape = {"width": 64, "depth": 3, "heads": 4, "context": CONTEXT, "data": text, "base": way, "inner": "adamw"}
    length = {"steps": STEPS, "warmup": STEPS // 20, "batch": m * WINDOWS, "learners": m}
    usual = {"learning_rate": RATES[way][FIRST_RATES.start], "bounded": True, "agreement": True}
    return as_shipped(**shape | length | LINE | usual | _shipped(way) | changes)


def _alone(text: str, way: str, **changes: Any) -> Setting:
    plain = {"bounded": False, "agreement": False, "correction": False, "method": "parallel"}
    defaults = Setting()  # one machine exchanges nothing: it keeps its row when the scripts' exchanges change
    unused = {name: getattr(defaults, name) for name in _shipped(way)}
    return _cell(text, way, 1, **plain | unused | changes)


def together(text: str, way: str, m: int) -> Row:
    """Return M learners, as the scripts ship."""
    return Row(f"{text}, {way}, M = {m}", _cell(text, way, m))


def before(text: str, way: str, m: int) -> Row:
    """Return M learners with the less frequent exchanges of ``BEFORE``."""
    name = f"{text}, {way}, M = {m}, mean every {BEFORE[way]['sync_every']}"
    return Row(name, _cell(text, way, m, **BEFORE[way]))


def seldom(text: str, way: str, m: int) -> Row:
    """Return M learners with the rule of larger models."""
    return Row(f"{text}, {way}, M = {m}, RDA every 24", _cell(text, way, m, **BEFORE[way] | SELDOM))


def quick(text: str, way: str, m: int) -> Row:
    """Return M learners whose exchange ends within a step. Learners take commits when they come, so that is a matter of
    lines and steps."""
    return Row(f"{text}, {way}, M = {m}, exchange within one step", _cell(text, way, m, overlap=1))


def wider(text: str, way: str, m: int) -> Row:
    """Return one machine with M times the batch."""
    return Row(f"{text}, {way}, {m} x batch", _alone(text, way, batch=m * WINDOWS))


def longer(text: str, way: str, m: int) -> Row:
    """Return one machine with M times the steps."""
    return Row(f"{text}, {way}, {m} x steps", _alone(text, way, steps=m * STEPS, warmup=m * STEPS // 20))


def rows() -> Iterator[Row]:
    """Yield all rows, the quick ones first."""
    for way in WAYS:
        yield from (wider(text, way, 1) for text in TEXTS)
    for m in LEARNERS:
        for way in WAYS:
            for text in TEXTS:
                yield from (together(text, way, m), wider(text, way, m), longer(text, way, m), before(text, way, m))
                if way == "lora" and m <= QUICK:
                    yield quick(text, way, m)
                if m == LEARNERS[0]:
                    yield seldom(text, way, m)


def cells(results: Path = runner.RESULTS) -> Iterator[Setting]:
    """Yield all cells: three rates with the first seed, then rates beyond an edge, then the best with all seeds."""
    settings = [row.setting for row in rows()]
    for setting in settings:
        for rate in RATES[setting.base][FIRST_RATES]:
            yield msgspec.structs.replace(setting, learning_rate=rate)
    for setting in settings:
        for _ in RATES[setting.base]:
            more = beyond_edge(by_seed(runner.rows(results)), seedless(setting), RATES[setting.base])
            if more is None:
                break
            yield msgspec.structs.replace(more, seed=SEEDS[0])
    for setting in settings:
        best = tuned(by_seed(runner.rows(results)), seedless(setting))
        yield from (msgspec.structs.replace(best, seed=seed) for seed in SEEDS)


def _tests(found: Cells, row: Row) -> dict[int, float]:
    """Return a row's test loss by seed, at its best rate; nothing if it was not trained at all of the first rates."""
    first = (msgspec.structs.replace(row.setting, learning_rate=rate) for rate in RATES[row.setting.base][FIRST_RATES])
    if not all(SEEDS[0] in found.get(seedless(cell), {}) for cell in first):
        return {}
    return {seed: halves(f)[1] for seed, f in found.get(tuned(found, seedless(row.setting)), {}).items()}


def lines(results: Path = runner.RESULTS) -> Iterator[str]:
    """Yield the table, in Markdown: test losses, and how far M learners end behind one machine, per cent."""
    found = by_seed(runner.rows(results))
    yield "| | seeds | rate | test loss | to M x batch, % | to M x steps, % |"
    yield "|---|---|---|---|---|---|"
    for row in rows():
        text, way, m = row.setting.data, row.setting.base, row.setting.learners
        test = _tests(found, row)
        shown = [spread(list(test.values()), ".4f") if test else "-"]
        for other in (wider(text, way, m), longer(text, way, m)):
            base = _tests(found, other) if row.setting.method == "diloco" else {}
            gaps = [100.0 * (test[seed] / base[seed] - 1.0) for seed in sorted(test) if seed in base]
            shown.append(spread(gaps, "+.2f") if gaps else "-")
        rate = tuned(found, seedless(row.setting)).learning_rate
        yield f"| {row.name} | {len(test)} | {rate:g} | {' | '.join(shown)} |"
