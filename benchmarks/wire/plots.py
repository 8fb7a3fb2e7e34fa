"""Pictures of what the transport and the exchange measured. Needs matplotlib (``pip install -e '.[plot]'``).

Rules of this file:
1. Rows in (as ``benchmarks.record`` writes them), one PNG out; nothing is measured here.
2. What was not measured leaves its panel empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Figures = Mapping[str, float | None]


def bars(axes: Any, names: Sequence[str], series: Mapping[str, Sequence[float]], unit: str) -> None:
    """Horizontal groups of bars: one group a name, one bar a series."""
    height = 0.8 / max(1, len(series))
    for index, (label, values) in enumerate(series.items()):
        places = [i + height * (index - (len(series) - 1) / 2) for i in range(len(names))]
        drawn = axes.barh(places, values, height, label=label)
        axes.bar_label(drawn, fmt="%.3g", fontsize=7, padding=2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.margins(x=0.12)
    if len(series) > 1:
        axes.legend(fontsize=8)


def save(path: Path, panels: int, draw: Mapping[int, Any], title: str) -> None:
    """A row of ``panels``; ``draw`` fills each by number."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, panels, figsize=(6 * panels, 5))
    for number, axes in enumerate(all_axes):
        draw[number](axes)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def transport(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Throughput and CPU, deviation from budgets, round trips."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["benchmark"], []).append(row)

    def throughput(axes: Any) -> None:
        chosen = found.get("transport throughput", [])
        names = [size_name(row["settings"]["payload_bytes"]) for row in chosen]
        series = {
            "Gbit/s": [row["figures"]["gbit_per_s"] for row in chosen],
            "CPU s per GB, both ends": [row["figures"]["cpu_s_per_gb"] for row in chosen],
        }
        bars(axes, names, series, "one pair over loopback, TLS")

    def budget(axes: Any) -> None:
        chosen = found.get("transport budget", [])
        names = [f"{row['settings']['mbit_per_s']} Mbit/s {row['settings']['direction']}" for row in chosen]
        series = {
            "mean": [100 * row["figures"]["mean"] for row in chosen],
            "worst second": [100 * row["figures"]["worst_second"] for row in chosen],
        }
        bars(axes, names, series, "% off the budget")
        for limit in (-3, 3):
            axes.axvline(limit, color="black", linewidth=0.5)

    def round_trip(axes: Any) -> None:
        chosen = found.get("transport round trip", [])
        names = [
            "no budget" if row["settings"]["up_mbit_per_s"] is None else f"{row['settings']['up_mbit_per_s']} Mbit/s"
            for row in chosen
        ]
        series = {
            "idle": [row["figures"]["idle_ms"] for row in chosen],
            "under bulk": [row["figures"]["bulk_ms"] for row in chosen],
            "1.5 idle + a chunk": [1.5 * r["figures"]["idle_ms"] + (r["figures"]["chunk_ms"] or 0.0) for r in chosen],
        }
        bars(axes, names, series, "round trip of a request, ms")

    every = [row for group in found.values() for row in group]
    save(path, 3, {0: throughput, 1: budget, 2: round_trip}, "transport, " + conditions(every))


def exchange(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Wall time, CPU and bytes by system, grouped by link."""
    names = [f"{row['settings']['link']} {row['settings']['system']} {row['settings']['codec']}" for row in rows]

    def panel(unit: str, **fields: tuple[str, float]) -> Any:
        series = {
            label.replace("_", " "): [scale * (row["figures"][field] or 0.0) for row in rows]
            for label, (field, scale) in fields.items()
        }
        return lambda axes: bars(axes, names, series, unit)

    draw = {
        0: panel("seconds", wall=("wall_s", 1.0), CPU_of_all_peers=("cpu_s", 1.0)),
        1: panel("MB sent by a peer", sent=("sent_bytes", 1e-6)),
        2: panel("CPU seconds per GB on the wire", CPU=("cpu_s_per_wire_gb", 1.0)),
    }
    save(path, 3, draw, "one exchange, " + conditions(rows))


def size_name(payload_bytes: str) -> str:
    """For an axis."""
    return "raw TLS socket" if payload_bytes == "raw" else f"{int(payload_bytes) >> 10} KiB"


def conditions(rows: Sequence[Mapping[str, Any]]) -> str:
    """Commit and machine, for a title."""
    if not rows:
        return "nothing measured"
    loads = [row["load_1min"] for row in rows]
    machine = rows[0]["machine"]
    return (
        f"{rows[0]['commit'][:10]}, {machine['cores']} cores {machine['cpu']}, load {min(loads):.1f}-{max(loads):.1f}"
    )
