"""Tables and plots behind docs/results.md, from the rows of results.

A gap is relative to data parallel with its best learning rate and the same model, tokens and global batch, seed by
seed: with the same inner optimizer, and with AdamW. With several seeds the table has the mean and, after +-, the
standard deviation over seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.plots import figure, name_points
from benchmarks.quality import sweeps
from benchmarks.quality.bases import MUON
from benchmarks.quality.runner import rows
from benchmarks.quality.settings import Setting, to_row

Figures = Mapping[str, Any]
Rows = Mapping[Setting, Figures]
MODEL = ("width", "depth", "heads", "context", "batch", "steps", "final_share", "data")
NAMES = {
    "learners": "M",
    "sync_every": "H",
    "overlap": "tau",
    "fragments": "P",
    "outer_rate": "outer lr",
    "outer_momentum": "mu",
    "learning_rate": "inner lr",
    "absent": "absent",
}
NAMED = {(0.4, 0.7), (0.7, 0.3), (0.7, 0.0), (0.7, 0.8), (0.7, 0.9)}
"""Outer rates and momenta that a plot has the room to name."""
SAID = {"seed", "method", "learners", "inner", "batch", "learning_rate"}
"""What the name of a data parallel cell says anyway."""


def seedless(setting: Setting) -> Setting:
    """The cell, whatever its seed."""
    return msgspec.structs.replace(setting, seed=0)


def by_seed(found: Rows) -> dict[Setting, dict[int, Figures]]:
    """Figures by cell and seed."""
    cells: dict[Setting, dict[int, Figures]] = {}
    for setting, figures in found.items():
        cells.setdefault(seedless(setting), {})[setting.seed] = figures
    return cells


def baseline(
    cells: Mapping[Setting, Mapping[int, Figures]], setting: Setting, inner: str = "adamw"
) -> dict[int, float]:
    """The loss by seed of data parallel with its best learning rate (in the mean over the seeds that all rates have),
    for ``setting``'s model, tokens and batch, and this inner optimizer. Parts of the data do not concern it."""
    model = {name: getattr(setting, name) for name in MODEL if name != "data"}
    found = {
        cell: {seed: figures["loss"] for seed, figures in runs.items()}
        for cell, runs in cells.items()
        if cell.method == "parallel"
        and cell.inner == inner
        and all(getattr(cell, name) == value for name, value in model.items())
    }
    if not found:
        return {}
    shared = set.intersection(*(set(losses) for losses in found.values()))
    best = min(found, key=lambda cell: statistics.fmean(found[cell][s] for s in shared) if shared else 0.0)
    return found[best]


def spread(values: Sequence[float], form: str) -> str:
    """Mean +- standard deviation."""
    mean = format(statistics.fmean(values), form)
    return f"{mean} +- {format(statistics.stdev(values), form.lstrip('+'))}" if len(values) > 1 else mean


def gaps(cells: Mapping[Setting, Mapping[int, Figures]], setting: Setting, against: Mapping[int, float]) -> list[float]:
    """Relative differences in per cent, seed by seed."""
    runs = cells[seedless(setting)]
    return [100.0 * (figures["loss"] / against[s] - 1.0) for s, figures in sorted(runs.items()) if s in against]


def table(found: Rows, wanted: Iterable[Setting], label: Callable[[Setting], str]) -> list[str]:
    """One row for each cell that was run."""
    cells = by_seed(found)
    lines = [
        "| setting | seeds | loss | gap to data parallel, % | to AdamW's, % | bytes/parameter up, down |",
        "|---|---|---|---|---|---|",
    ]
    for setting in dict.fromkeys(map(seedless, wanted)):
        runs = cells.get(setting)
        if not runs:
            continue
        own, adamw = (gaps(cells, setting, baseline(cells, setting, inner)) for inner in (setting.inner, "adamw"))
        figures = next(iter(runs.values()))
        traffic = f"{figures['up_bytes_per_parameter']:.3f}, {figures['down_bytes_per_parameter']:.3f}"
        shown = [spread(gap, "+.2f") if gap else "-" for gap in (own, adamw)]
        losses = spread([f["loss"] for f in runs.values()], ".4f")
        columns = [label(setting), str(len(runs)), losses, *shown, traffic if setting.method == "diloco" else "-"]
        lines.append(f"| {' | '.join(columns)} |")
    return lines


def label(setting: Setting) -> str:
    """What differs from the defaults, in words."""
    standard, mine = to_row(Setting()), to_row(setting)
    parallel = f"data parallel, {setting.inner}, {setting.batch} windows, lr {setting.learning_rate:g}"
    said = [parallel] if setting.method == "parallel" else []
    silent = SAID if said else {"seed"}
    shown = [name for name in mine if name not in silent and mine[name] != standard[name]]
    said += [f"{NAMES.get(name, name)} {_value(mine[name])}" for name in shown]
    return ", ".join(said) or "defaults"


def _value(value: object) -> str:
    return (
        ":".join(f"{x:g}" for x in value)
        if isinstance(value, tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def print_tables() -> None:
    """All sweeps, as Markdown."""
    found = rows()
    for name, make in sweeps.SWEEPS.items():
        doc = " ".join((make.__doc__ or "").split())
        print(f"\n**{name}**: {doc}\n")
        print("\n".join(table(found, make(), label)))


def draw(folder: Path) -> None:
    """The plots."""
    found = rows()
    cells = by_seed(found)

    def points(names: Sequence[str], keep: Callable[[Setting], bool]) -> list[tuple[Setting, float, float]]:
        """Cells with their mean gap and its deviation."""
        wanted = [s for s in dict.fromkeys(map(seedless, sweeps.cells(names))) if s in cells and keep(s)]
        measured = [(s, gaps(cells, s, baseline(cells, s, s.inner))) for s in wanted]
        return [(s, statistics.fmean(g), statistics.stdev(g) if len(g) > 1 else 0.0) for s, g in measured if g]

    usual = MUON.final_share, MUON.learning_rate, MUON.batch
    _draw_outer(points(["muon", "gain"], lambda s: (s.final_share, s.learning_rate, s.batch) == usual), folder)
    by_batch = ["inner", "batches", "learners", "muon", "gain"]
    _draw_batches(points(by_batch, lambda s: s.method == "diloco" and s.final_share == 0.1), folder)
    _draw_codecs(cells, points(["codec", "few-bytes"], lambda s: len(cells[s]) > 1), folder)


def _draw_outer(points: Sequence[tuple[Setting, float, float]], folder: Path) -> None:
    named: list[tuple[float, float, str]] = []
    others: list[tuple[float, float]] = []
    with figure(folder / "quality-outer.png", size=(7, 4.2)) as axes:
        shapes = {
            ("rda", 2): "^",
            ("rda", 4): "o",
            ("rda", 8): "s",
            ("direct", 2): "^",
            ("direct", 4): "o",
            ("direct", 8): "s",
        }
        for (merge, learners), shape in shapes.items():
            here = [
                (s, gap) for s, gap, _ in points if (s.merge, s.learners) == (merge, learners) and s.method == "diloco"
            ]
            reach = [s.outer_rate / (1.0 - s.outer_momentum) for s, _ in here]
            colour = "tab:blue" if merge == "rda" else "tab:orange"
            axes.plot(
                reach, [gap for _, gap in here], shape, color=colour, label=f"{merge}, M = {learners}", markersize=5
            )
            for at, (s, gap) in zip(reach, here, strict=True):
                if learners == 4 and (s.outer_rate, s.outer_momentum) in NAMED:
                    named.append((at, gap, f"{s.outer_rate:g} / {s.outer_momentum:g}"))
                others.append((at, gap))
        axes.set(xlabel="outer rate / (1 - momentum)", ylabel="gap to data parallel, %")
        _scale(axes, (0.7, 1, 1.4, 2, 3, 5, 7))
        axes.legend(fontsize=8)
        name_points(axes, named, avoid=others, fontsize=8)


def _scale(axes: Any, ticks: Sequence[float]) -> None:
    """A logarithmic x axis with these numbers on it, and no others."""
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _draw_batches(points: Sequence[tuple[Setting, float, float]], folder: Path) -> None:
    """The best inner rate of each number of learners, batch and optimizer."""
    best: dict[tuple[str, int, int], tuple[float, float]] = {}
    for s, gap, error in points:
        key = (s.inner, s.learners, s.batch)
        best[key] = min(best.get(key, (gap, error)), (gap, error))
    with figure(folder / "quality-batch.png", size=(7, 4.2)) as axes:
        for inner, marker in (("adamw", "o--"), ("muon", "s-")):
            for learners, colour in ((2, "tab:green"), (4, "tab:blue"), (8, "tab:red")):
                here = sorted((batch, *best[i, m, batch]) for i, m, batch in best if (i, m) == (inner, learners))
                if here:
                    sizes, heights, errors = zip(*here, strict=True)
                    axes.errorbar(
                        sizes,
                        heights,
                        yerr=errors,
                        fmt=marker,
                        color=colour,
                        label=f"M = {learners}, {inner}",
                        capsize=3,
                    )
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set(
            xlabel="windows of 32 tokens a step, all learners together",
            ylabel="gap to data parallel with the same optimizer, %",
        )
        _scale(axes, (16, 64, 256))
        axes.legend(fontsize=8)


def _draw_codecs(cells: Mapping[Setting, Any], points: Sequence[tuple[Setting, float, float]], folder: Path) -> None:
    """Those with several seeds, by what goes up and comes down together."""
    with figure(folder / "quality-codecs.png", size=(7, 4.2)) as axes:
        sized = []
        for s, _, _ in points:
            figures = next(iter(cells[s].values()))
            usual = cells[msgspec.structs.replace(s, up="int4", down="int4", owed=0.0, owners="one")]
            found = gaps(cells, s, {seed: run["loss"] for seed, run in usual.items()})
            gap, error = statistics.fmean(found), statistics.stdev(found)
            size = figures["up_bytes_per_parameter"] + figures["down_bytes_per_parameter"]
            axes.errorbar(
                [size], [gap], yerr=[error], fmt=("s" if s.owners == "drawn" else "D") if s.owed else "o", capsize=3
            )
            sized.append((size, gap, s.up if s.up == s.down else f"{s.up}, {s.down}"))
        axes.set(
            xlabel="bytes a parameter, both ways\n(squares: owners make up for rounding; diamonds: one owner)",
            ylabel="loss to int4 both ways, seed by seed, %",
        )
        _scale(axes, (0.4, 0.6, 1, 2, 4, 8))
        axes.margins(0.1)
        name_points(axes, sized)
