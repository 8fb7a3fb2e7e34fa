"""Plots of the comparisons over throttled links: figures in, one PNG out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import bars, colour, figure, named_bars

Results = Mapping[str, Mapping[str, Any]]


def speed(path: Path, results: Results, curve: Sequence[tuple[int, float]], wanted: float) -> None:
    """Loss over time, and times to the fixed loss; without curves, the times alone."""
    if not any(one["curve"] for one in results.values()):
        with figure(path, size=(9, 0.8 + 0.45 * len(results))) as axes:
            _times(axes, results, wanted)
        return
    with figure(path, 2, size=(14, 5.2), width_ratios=(3, 2)) as (left, right):
        for name, one in results.items():
            points = [(at, loss) for at, _, loss in one["curve"]]
            style = "-"
            if name.startswith("data parallel") and curve:
                points = [(n * one["seconds_a_step"], loss) for n, loss in curve]
                style = ":" if "float32" in name else "--"
            if points:
                left.plot(*zip(*points, strict=True), style, color=colour(name), label=name, lw=2.2)
        left.axhline(wanted, color="black", lw=1, ls=":")
        left.set(xscale="log", xlabel="seconds (log; dashed: extrapolated)", ylabel="held-out loss, nats")
        left.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2)
        _times(right, results, wanted)


def _times(axes: Any, results: Results, wanted: float) -> None:
    times = {}
    for name, one in results.items():
        seconds, kind, ratio = one["to_loss_s"] or 0.0, one["to_loss_kind"], one.get("times_p2pdiloco")
        told = ("at least " if kind == "at least" else "") + f"{seconds:,.0f} s"
        times[name] = (seconds, told + (f" ({ratio:.1f}x)" if ratio else ""))
    named_bars(axes, times, f"seconds to a loss of {wanted:.3f}")


def bandwidth(path: Path, results: Results) -> None:
    """Utilisation by rate, and the least rates."""
    with figure(path, 2, size=(14, 5.2), width_ratios=(3, 2)) as (left, right):
        for i, (name, one) in enumerate(results.items()):
            points = sorted((p["rate_bps"] / 1e6, min(p["utilisation"], p["turns"])) for p in one["probes"])
            left.plot(*zip(*points, strict=True), "o-", color=colour(name, i), label=name, lw=2)
        left.axhline(0.95, color="black", lw=1, ls=":")
        left.set(xscale="log", xlabel="each line, Mbit/s", ylabel="compute utilisation (p2pdiloco: or turns kept)")
        left.legend(fontsize=10)
        rates = {name: (one["rate_mbps"], f"{one['rate_mbps']:.3g} Mbit/s") for name, one in results.items()}
        named_bars(right, rates, "slowest line for 95 %, Mbit/s", margin=0.4)


def fragments(path: Path, results: Results) -> None:
    """Time per fragment beside the line's limit and the processors'."""
    with figure(path, size=(11, 1.2 + 0.8 * len(results))) as axes:
        series = {
            "measured": [one["fragment_s"] for one in results.values()],
            "bytes on the line": [one["limit_s"] for one in results.values()],
            "CPU seconds of all peers / cores of this machine": [one["processors_s"] for one in results.values()],
        }
        bars(axes, list(results), series, "seconds a fragment", form="%.3f")


def utilisation(path: Path, results: Results) -> None:
    """Predicted and measured, cell by cell."""
    with figure(path, size=(12, 1.5 + 0.75 * len(results))) as axes:
        series = {
            "compute utilisation": [100 * one["utilisation"] for one in results.values()],
            "turns committed": [100 * one["turns"] for one in results.values()],
            "turns, by the formula": [100 * one["predicted_rounds"] for one in results.values()],
        }
        bars(axes, list(results), series, "%", form="%.0f")
        axes.axvline(95, color="black", lw=1, ls=":")
        axes.set_xlim(0, 112)
        axes.legend(fontsize=10, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)


def hardware(path: Path, results: Results, wanted: float) -> None:
    """Loss over time for each scenario, and the times to the loss."""
    with figure(path, 2, size=(14, 5), width_ratios=(3, 2)) as (left, right):
        for i, (name, one) in enumerate(results.items()):
            points = [(at, loss) for at, _, loss in one["curve"]]
            left.plot(*zip(*points, strict=True), color=colour(name, i), label=name, lw=2)
        left.axhline(wanted, color="black", lw=1, ls=":")
        left.set(xlabel="seconds", ylabel="held-out loss, nats")
        left.legend()
        times = {name: (one["to_loss_s"] or 0.0, f"{one['to_loss_s'] or 0.0:.0f} s") for name, one in results.items()}
        named_bars(right, times, f"seconds to a loss of {wanted:.3f}", margin=0.2)
