"""The exchange that the product chooses by planned steps and size, against every other row with as many bytes.

1. Rows with the same model, text, batch, steps, number of learners and inner optimizer are alternatives. Each has its
   best learning rate by validation; test is shown.
2. The rule (``manifest_defaults.in_rounds``) is asked twice: for the model's own size, for which traffic does not
   matter, and as for a large model, for which it chooses by the planned steps alone.
3. An alternative sends at most ``MORE_BYTES`` times the rule's bytes per parameter and step, and its exchanges take as
   many steps. It may have any merge, codec, H or correction, and need not ship; what averages for nothing is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.quality import runner
from benchmarks.quality.claims import Cells, halves, parallel, tuned
from benchmarks.quality.report import by_seed
from benchmarks.quality.settings import Setting
from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.protocol.manifest_defaults import WARMUP_SHARE, in_rounds

MORE_BYTES = 1.05
ALIKE = ("width", "depth", "heads", "context", "vocabulary", "batch", "steps", "data", "learners", "inner")


class Row(NamedTuple):
    """One exchange at its best learning rate."""

    setting: Setting
    gap: float
    """Per cent above data parallel, mean over the seeds that both have."""
    bytes: float
    """Sent and received, per parameter and step."""


def chosen(setting: Setting, *, is_large: bool) -> Setting:
    """Return ``setting`` with the H, overlap and outer step that the product gives a run of this length."""
    inner = msgspec.structs.replace(setting.inner_config, tokens=msgspec.UNSET)  # the laboratory's runs have steps
    config = RunConfig(name="rule", model=setting.model_config, inner=inner)
    run = in_rounds(config, (), parameters=math.inf if is_large else None)
    return msgspec.structs.replace(
        setting,
        sync_every=run.schedule.sync_every,
        overlap=run.schedule.overlap,
        merge=run.outer.merge,
        outer_rate=run.outer.learning_rate,
        outer_momentum=run.outer.momentum,
    )


def is_as_chosen(setting: Setting, *, is_large: bool) -> bool:
    """Whether ``setting`` is what the product chooses, in how often and how it merges, with its usual codec."""
    plain = (setting.up, setting.down, setting.heading, setting.outer, setting.spectrum, setting.penalty)
    usual = plain == ("int4", "int4", "", "nesterov", 1.0, False) and not setting.sends_momentum
    same = not (setting.inner_momentum or setting.predicts or setting.alone_until) and setting.rest_rate == 1.0
    is_usual = usual and same and setting.warmup in usual_warmups(setting) and setting.owners == "one"
    return is_usual and setting == chosen(setting, is_large=is_large)


def usual_warmups(setting: Setting) -> tuple[int, ...]:
    """Return the warm-ups of a run that count as the product's: that of AdamW, and those of the sweeps with Muon."""
    if setting.inner == "adamw":
        return (int(WARMUP_SHARE * setting.steps),)
    return setting.steps // 20, min(96, setting.steps // 5)


def alternatives(found: Cells) -> dict[tuple[Any, ...], list[Row]]:
    """Return all rows with the current schedule, by what makes them comparable."""
    groups: dict[tuple[Any, ...], dict[Setting, Row]] = {}
    for cell in found:
        is_usual = (cell.method, cell.base, cell.decay_share, cell.final_share) == ("diloco", "", 0.95, 0.0)
        if not (is_usual and cell.is_in_step and cell.bounded) or cell.learners < 2 or cell.pools:
            continue
        best = tuned(found, cell)
        row = _row(found, best)
        if row is not None:
            groups.setdefault(tuple(getattr(cell, name) for name in ALIKE), {})[best] = row
    return {key: list(rows.values()) for key, rows in groups.items()}


def _row(found: Cells, setting: Setting) -> Row | None:
    runs: Mapping[int, Mapping[str, Any]] = found[setting]
    against = parallel(found, setting, setting.steps)
    gaps = [100.0 * (halves(run)[1] / against[seed] - 1.0) for seed, run in runs.items() if seed in against]
    figures = next(iter(runs.values()))
    sent = (figures["up_bytes_per_parameter"] + figures["down_bytes_per_parameter"]) / setting.sync_every
    return Row(setting, statistics.fmean(gaps), sent) if gaps else None


def lines(results: Path = runner.RESULTS) -> Iterator[str]:
    """Yield the table, in Markdown."""
    yield "| cell | chosen as | chosen | gap, % | best row with its bytes | gap, % | lost, points |"
    yield "|---|---|---|---|---|---|---|"
    worst, cells, compared = 0.0, 0, 0
    for key, rows in sorted(alternatives(by_seed(runner.rows(results))).items(), key=str):
        for is_large in (False, True):
            mine = [row for row in rows if is_as_chosen(row.setting, is_large=is_large)]
            if not mine:
                continue
            own = min(mine, key=lambda row: row.gap)
            others = [
                row
                for row in rows
                if row.bytes <= MORE_BYTES * own.bytes and row.setting.overlap >= own.setting.overlap
            ]
            best = min(others, key=lambda row: row.gap)
            lost = own.gap - best.gap
            worst, cells, compared = max(worst, lost), cells + 1, compared + (len(others) > 1)
            cell = ", ".join(f"{name} {value}" for name, value in zip(ALIKE, key, strict=True) if value)
            size = "large" if is_large else "its size"
            yield f"| {cell} | {size} | {_name(own)} | {own.gap:+.1f} | {_name(best)} | {best.gap:+.1f} | {lost:.1f} |"
    yield f"\n{compared} of {cells} cells have another row with as few bytes; largest loss: {worst:.1f} points"


def _name(row: Row) -> str:
    s = row.setting
    said = f"{'RDA' if s.merge == 'rda' else 'mean'}, {s.outer_rate:g}/{s.outer_momentum:g}, H = {s.sync_every}"
    extra = {
        "codec": f"{s.up}, {s.down}" if (s.up, s.down) != ("int4", "int4") else "",
        "sends momentum": s.sends_momentum,
        "outer": s.outer if s.outer != "nesterov" else "",
        "spectrum": s.spectrum if s.spectrum != 1.0 else "",
        "penalty": s.penalty,
        "heading": s.heading,
        "predicts": s.predicts,
        "momentum": s.inner_momentum,
        "warm-up": s.warmup if s.warmup not in usual_warmups(s) else 0,
        "alone until": s.alone_until,
        "rest's rate": s.rest_rate if s.rest_rate != 1.0 else 0,
    }
    return ", ".join([said, *(f"{name} {value}" for name, value in extra.items() if value)])
