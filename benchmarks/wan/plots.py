"""Pictures of the comparisons, for a talk. Needs matplotlib.

Rules of this file:
1. Figures in, one PNG out; nothing is measured here.
2. p2pdiloco is always drawn in the same colour, the others in greys and quiet colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OURS = "#d1495b"
OTHERS = ("#30638e", "#edae49", "#00798c", "#8d96a3", "#5c4d7d", "#66a182")


def colour(name: str, index: int) -> str:
    """Of a system."""
    return OURS if name.startswith("p2pdiloco") else OTHERS[index % len(OTHERS)]


def pyplot() -> Any:
    """matplotlib without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
    plt.rcParams.update({"grid.alpha": 0.25, "legend.frameon": False})
    return plt


def save(figure: Any, path: Path) -> None:
    """As PNG."""
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def speed(
    path: Path, results: Mapping[str, Mapping[str, Any]], curve: Sequence[tuple[int, float]], wanted: float
) -> None:
    """Loss over time, and times to the fixed loss."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5.2), width_ratios=(3, 2))
    for i, (name, one) in enumerate(results.items()):
        points = [(at, loss) for at, _, loss in one["curve"]]
        style = "-"
        if name.startswith("data parallel") and curve:
            points, style = [(n * one["seconds_a_step"], loss) for n, loss in curve], "--"
        if points:
            left.plot(*zip(*points, strict=True), style, color=colour(name, i), label=name, lw=2.2)
    left.axhline(wanted, color="black", lw=1, ls=":")
    left.set(xscale="log", xlabel="seconds (log; dashed: extrapolated)", ylabel="held-out loss, nats")
    left.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2)
    names = list(results)
    times = [results[name]["to_loss_s"] or 0.0 for name in names]
    bars = right.barh(names, times, color=[colour(name, i) for i, name in enumerate(names)])
    told = [
        ("at least " if r["to_loss_kind"] == "at least" else "")
        + (f"{t:.0f} s ({r['times_p2pdiloco']:.1f}x)" if r.get("times_p2pdiloco") else f"{t:.0f} s")
        for t, r in zip(times, results.values(), strict=True)
    ]
    right.bar_label(bars, told, padding=4, fontsize=10)
    right.set(xscale="log", xlabel=f"seconds to a loss of {wanted:.3f}")
    right.margins(x=0.35)
    right.invert_yaxis()
    save(figure, path)


def bandwidth(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Utilisation by rate, and the least rates."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5.2), width_ratios=(3, 2))
    for i, (name, one) in enumerate(results.items()):
        points = sorted((p["rate_bps"] / 1e6, min(p["utilisation"], p["turns"])) for p in one["probes"])
        left.plot(*zip(*points, strict=True), "o-", color=colour(name, i), label=name, lw=2)
    left.axhline(0.95, color="black", lw=1, ls=":")
    left.set(xscale="log", xlabel="each line, Mbit/s", ylabel="compute utilisation (p2pdiloco: or turns kept)")
    left.legend(fontsize=10)
    names = list(results)
    rates = [results[name]["rate_mbps"] for name in names]
    bars = right.barh(names, rates, color=[colour(name, i) for i, name in enumerate(names)])
    right.bar_label(bars, [f"{rate:.3g} Mbit/s" for rate in rates], padding=4, fontsize=10)
    right.set(xscale="log", xlabel="slowest line for 95 %")
    right.margins(x=0.4)
    right.invert_yaxis()
    save(figure, path)


def fragments(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Time per fragment beside the line's limit and the processors'."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.8 * len(results)))
    names = list(results)
    series = {
        "measured": ("fragment_s", OURS),
        "bytes on the line": ("limit_s", OTHERS[0]),
        "CPU seconds of all peers / cores of this machine": ("processors_s", OTHERS[3]),
    }
    for i, (label, (key, shade)) in enumerate(series.items()):
        places = [n + 0.26 * (i - 1) for n in range(len(names))]
        bars = axes.barh(places, [results[name][key] for name in names], 0.25, label=label, color=shade)
        axes.bar_label(bars, fmt="%.3f", fontsize=9, padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds a fragment")
    axes.margins(x=0.12)
    axes.legend(fontsize=10)
    save(figure, path)


def utilisation(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Predicted and measured, cell by cell."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(12, 1.5 + 0.75 * len(results)))
    names = list(results)
    series = {
        "compute utilisation": ("utilisation", OURS),
        "turns committed": ("turns", OTHERS[0]),
        "turns, by the formula": ("predicted_turns", OTHERS[3]),
    }
    for i, (label, (key, shade)) in enumerate(series.items()):
        places = [n + 0.26 * (i - 1) for n in range(len(names))]
        bars = axes.barh(places, [100 * results[name][key] for name in names], 0.25, label=label, color=shade)
        axes.bar_label(bars, fmt="%.0f", fontsize=9, padding=3)
    axes.axvline(95, color="black", lw=1, ls=":")
    axes.set_yticks(range(len(names)), names, fontsize=10)
    axes.invert_yaxis()
    axes.set(xlabel="%", xlim=(0, 112))
    axes.legend(fontsize=10, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
    save(figure, path)


def hardware(path: Path, results: Mapping[str, Mapping[str, Any]], wanted: float) -> None:
    """Loss over time for each scenario, and the times to the loss."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5), width_ratios=(3, 2))
    shades = (OURS, *OTHERS)
    for shade, (name, one) in zip(shades, results.items(), strict=False):
        left.plot(
            [at for at, _, _ in one["curve"]], [loss for _, _, loss in one["curve"]], color=shade, label=name, lw=2
        )
    left.axhline(wanted, color="black", lw=1, ls=":")
    left.set(xlabel="seconds", ylabel="held-out loss, nats")
    left.legend()
    names = list(results)
    bars = right.barh(names, [results[n]["to_loss_s"] or 0.0 for n in names], color=shades[: len(names)])
    right.bar_label(bars, fmt="%.0f s", padding=4)
    right.set_xlabel(f"seconds to a loss of {wanted:.3f}")
    right.margins(x=0.2)
    right.invert_yaxis()
    save(figure, path)


def day(path: Path, found: Mapping[str, Any], seconds: float) -> None:
    """One row a site (steps a second), then commits and loss; what happens is written above."""
    plt = pyplot()
    names = [name for name, steps in found["steps"].items() if steps]
    figure, rows = plt.subplots(len(names) + 2, 1, figsize=(14, 2 + 1.25 * (len(names) + 2)), sharex=True)
    width = max(1.0, seconds / 100)
    edges = [width * i for i in range(int(seconds / width) + 2)]
    for i, (axes, name) in enumerate(zip(rows, names, strict=False)):
        weights = [1 / width] * len(found["steps"][name])
        axes.hist([one[0] for one in found["steps"][name]], edges, weights=weights, color=OTHERS[i % len(OTHERS)])
        axes.set_ylabel(f"{name}\nsteps/s", fontsize=10)
    rows[-2].hist(found["commits"], edges, weights=[1 / width] * len(found["commits"]), color=OURS)
    rows[-2].set_ylabel("commits/s", fontsize=10)
    if found["loss"]:
        rows[-1].plot(*zip(*found["loss"], strict=True), color=OURS, lw=2)
    rows[-1].set(xlabel="seconds", xlim=(0, seconds))
    rows[-1].set_ylabel("held-out\nloss", fontsize=10)
    for at, text in found["happenings"]:
        for axes in rows:
            axes.axvline(at, color="black", lw=0.8, ls=":")
        rows[0].annotate(
            text, (at, 1.05), xycoords=("data", "axes fraction"), rotation=28, fontsize=9, ha="left", va="bottom"
        )
    save(figure, path)
