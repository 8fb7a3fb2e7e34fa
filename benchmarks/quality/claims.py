"""Claims about a model's quality, one row each; what ships comes first.

1. The held-out windows are two halves, every second 2 kB of each file: *validation* chooses settings and rates, *test*
   is shown. (A cut in the middle would put other packages into each half, one of them harder.)
2. A gap is relative to data parallel with the same inner optimizer, model, tokens and batch, at its best learning rate,
   seed by seed; and to one learner with the outer optimizer, which is better than data parallel.
3. Token efficiency is the share of its tokens after which data parallel has the same loss. It comes from runs of that
   length with schedules and best rates of their own; between two lengths, loss is linear in the logarithm.
4. A claim that was not run is a row without figures. A row says how many seeds it has.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks import record
from benchmarks.quality.bases import MUON, as_shipped
from benchmarks.quality.questions import ANY_LENGTH, EACH_SIX, EVERY_THREE, LINE, OFTEN, TWELVE
from benchmarks.quality.report import by_seed, seedless, spread
from benchmarks.quality.runner import rows
from benchmarks.quality.settings import Setting, to_row

Cells = Mapping[Setting, Mapping[int, Mapping[str, Any]]]
MIXED = ("mixture", "languages")
"""Data of which the baseline has all four languages."""
SCRIPT: dict[str, Any] = {"learning_rate": 8e-3, "agreement": True}
LARGEST_GAP = 2.0
"""Between two lengths that are joined by a line."""


class Claim(NamedTuple):
    """One row of the table."""

    name: str
    setting: Setting


def _of(name: str, base: Setting | None = None, **changes: object) -> Claim:
    setting = as_shipped(**changes) if base is None else msgspec.structs.replace(base, **changes)
    return Claim(name, seedless(setting))


def claims() -> list[Claim]:
    """Return the settings that docs/results.md speaks of, in its order: what ships, what it was chosen among, and what
    shipped before."""
    adamw = msgspec.structs.replace(MUON, inner="adamw", learning_rate=4e-3)
    adamw_line = as_shipped(**LINE, inner="adamw")
    near: dict[str, Any] = {**OFTEN, **EACH_SIX}
    return [
        *(_of(f"as shipped, M = {m}", **EVERY_THREE, learners=m) for m in (8, 4, 2)),
        *(_of(f"mean every 6 steps, M = {m}", **ANY_LENGTH, learners=m) for m in (8, 4, 2)),
        *(_of(f"overlap of one step, M = {m}", **near, learners=m) for m in (8, 4, 2)),
        *(_of(f"mean 0.7 / 0.6 every 12 steps, M = {m}", **TWELVE, learners=m) for m in (8, 4, 2)),
        *(_of(f"RDA every 24 steps (long runs), M = {m}", **LINE, agreement=True, learners=m) for m in (8, 4)),
        _of("scripts: AdamW, M = 4", adamw_line, **EVERY_THREE | SCRIPT, learners=4),
        _of("scripts: AdamW, mean every 6 steps, M = 4", adamw_line, **ANY_LENGTH | SCRIPT, learners=4),
        _of("scripts: AdamW, RDA every 24, M = 4", adamw_line, agreement=True),
        *(_of(f"before: RDA, cosine, M = {m}", learners=m) for m in (8, 4, 2)),
        _of("before: AdamW instead, M = 4", adamw, learners=4),
    ]


def halves(figures: Mapping[str, Any]) -> tuple[float, float]:
    """Validation and test loss of a run."""
    windows: Sequence[float] = figures["by_window"]
    return statistics.fmean(windows[::2]), statistics.fmean(windows[1::2])


def parallel(cells: Cells, setting: Setting, steps: int) -> dict[int, float]:
    """Data parallel's test loss by seed, with ``setting``'s model, batch and inner optimizer, in ``steps`` steps, at
    the learning rate that has the best validation loss over the seeds that all rates have."""
    text = _text(setting)
    alike = (
        "base",
        "width",
        "depth",
        "heads",
        "context",
        "vocabulary",
        "batch",
        "final_share",
        "decay_share",
        "inner",
    )
    found = [
        cell
        for cell in cells
        if cell.method == "parallel"
        and cell.steps == steps
        and _text(cell) == text
        and (cell.warmup == setting.warmup or steps != setting.steps)
        and all(getattr(cell, name) == getattr(setting, name) for name in alike)
    ]
    best = _best(cells, found)
    return {} if best is None else {seed: halves(figures)[1] for seed, figures in cells[best].items()}


def _text(setting: Setting) -> str:
    """Return the text that all learners of a setting see together, as ``data`` of data parallel."""
    return "mixture" if setting.data in MIXED else setting.data.replace("parts", "same")


def _best(cells: Cells, found: Sequence[Setting]) -> Setting | None:
    """That of the best validation loss, over the seeds that all have; None of none."""
    shared = set.intersection(*(set(cells[cell]) for cell in found)) if found else set()
    if not shared:
        return found[0] if found else None
    return min(found, key=lambda cell: statistics.fmean(halves(cells[cell][seed])[0] for seed in shared))


def tuned(cells: Cells, setting: Setting) -> Setting:
    """The cell that is ``setting`` but for its learning rate, which is the best of those that were run."""
    return _best(cells, _at_all_rates(cells, setting)) or setting


def _at_all_rates(cells: Cells, setting: Setting) -> list[Setting]:
    """The cells that are ``setting`` but for their learning rates."""
    rate = setting.learning_rate
    return [cell for cell in cells if msgspec.structs.replace(cell, learning_rate=rate) == setting]


def is_at_edge(cells: Cells, setting: Setting) -> bool:
    """Whether the best rate of ``setting`` is the lowest or the highest of those that were run."""
    rates = [cell.learning_rate for cell in _at_all_rates(cells, setting)]
    return bool(rates) and tuned(cells, setting).learning_rate in (min(rates), max(rates))


def beyond_edge(cells: Cells, setting: Setting, rates: Sequence[float]) -> Setting | None:
    """``setting`` at the one of ``rates`` beyond its best rate; None if that is not at an edge, or the last of them."""
    if not is_at_edge(cells, setting):
        return None
    best = tuned(cells, setting)
    lowest = min(cell.learning_rate for cell in _at_all_rates(cells, setting))
    at = rates.index(best.learning_rate) + (-1 if best.learning_rate == lowest else 1)
    return msgspec.structs.replace(best, learning_rate=rates[at]) if 0 <= at < len(rates) else None


def efficiency(loss: float, curve: Mapping[int, float], steps: int) -> float | None:
    """The share of ``steps`` after which data parallel has ``loss``, by its loss at other lengths; None where that lies
    beyond what was run, or between lengths too far apart (the curve is bent: a line would flatter)."""
    points = sorted(curve.items())
    for (fewer, worse), (more, better) in itertools.pairwise(points):
        if better <= loss <= worse and more <= LARGEST_GAP * fewer:
            part = (worse - loss) / (worse - better)
            return math.exp(math.log(fewer) + part * (math.log(more) - math.log(fewer))) / steps
    return None


def measured(cells: Cells, claim: Claim) -> dict[str, Any]:
    """A claim's figures, as far as there are any."""
    setting = tuned(cells, claim.setting)
    runs = cells.get(setting, {})
    found: dict[str, Any] = {"seeds": sorted(runs)}
    if not runs:
        return found
    test = {seed: halves(figures)[1] for seed, figures in runs.items()}
    found["learning_rate"] = setting.learning_rate
    found["validation"] = statistics.fmean(halves(figures)[0] for figures in runs.values())
    found["test"] = list(test.values())
    against = parallel(cells, setting, setting.steps)
    like = {
        name: getattr(setting, name)
        for name in ("width", "depth", "heads", "context", "vocabulary", "batch", "steps", "inner")
    }
    alone: Mapping[int, Mapping[str, Any]] = {}
    if setting.data not in MIXED:
        usual = ANY_LENGTH if setting.decay_share else {}
        alone = cells.get(tuned(cells, seedless(as_shipped(**usual | like, learners=1))), {})
    found["to_parallel"] = [100.0 * (x / against[s] - 1.0) for s, x in sorted(test.items()) if s in against]
    found["to_one"] = [100.0 * (x / halves(alone[s])[1] - 1.0) for s, x in sorted(test.items()) if s in alone]
    shares = []
    fewer = sorted({cell.steps for cell in cells if cell.method == "parallel" and cell.steps <= setting.steps})
    by_length = {steps: parallel(cells, setting, steps) for steps in fewer}
    for seed, loss in sorted(test.items()):
        curve = {steps: losses.get(seed, losses.get(1)) for steps, losses in by_length.items()}
        share = efficiency(loss, {steps: x for steps, x in curve.items() if x is not None}, setting.steps)
        shares += [] if share is None else [100.0 * share]
    found["token_efficiency"] = shares
    figures = next(iter(runs.values()))
    found["bytes_up"], found["bytes_down"] = figures["up_bytes_per_parameter"], figures["down_bytes_per_parameter"]
    return found


def table(path: Path | None, wanted: Iterable[Claim] | None = None, results: Path | None = None) -> list[str]:
    """The table as Markdown; each row's figures are appended to ``path``, if there is one. ``results``: rows of other
    cells than those in the repository."""
    cells = by_seed(rows() if results is None else rows(results))
    lines = [
        "| | seeds | test loss | to data parallel, % | to one learner, % | token efficiency, % | bytes; H |",
        "|---|---|---|---|---|---|---|",
    ]
    written = []
    for claim in claims() if wanted is None else wanted:
        found = measured(cells, claim)
        written.append(record.row("quality-table", {"name": claim.name, **to_row(claim.setting)}, found))
        shown = [_shown(found.get(key), form) for key, form in COLUMNS]
        every = claim.setting.sync_every
        size = f"{found['bytes_up']:.2f}, {found['bytes_down']:.2f}; {every}" if "bytes_up" in found else "-"
        lines.append(f"| {claim.name} | {len(found['seeds'])} | {' | '.join(shown)} | {size} |")
    if path is not None:
        record.append(path, written)
    return lines


COLUMNS = (("test", ".4f"), ("to_parallel", "+.2f"), ("to_one", "+.2f"), ("token_efficiency", ".0f"))


def _shown(values: Sequence[float] | None, form: str) -> str:
    return spread(values, form) if values else "-"
