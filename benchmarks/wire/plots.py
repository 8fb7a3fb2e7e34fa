"""Plots of codec, transport and exchange, drawn from rows that were written earlier.

    python -m benchmarks.wire.plots                 # into docs/plots, from the rows in results/

``results/rows.jsonl`` keeps the rows behind docs/results.md; a new measurement's ``--json`` replaces them. The rows of
commit deb444e were copied from a table, with three digits.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import OTHERS, OURS, bars, colour, figure, name_points

Rows = Sequence[Mapping[str, Any]]
RESULTS = Path(__file__).parent / "results" / "rows.jsonl"
PLOTS = Path(__file__).parents[2] / "docs" / "plots"
LINKS = {"lo": "loopback", "2.5gbit": "2.5 Gbit/s", "1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}
SORTED_BY = "1gbit"
SHOWN = ("int2 rms 1.224", "int4 rms 1", "int4 rms 0.4", "e3m0", "int8 absmax", "bf16")
"""Codecs whose speeds are drawn, those of docs/results.md; of the others bytes and error alone."""
SHIPPED = "int4 rms 0.4"


def of(rows: Rows, benchmark: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Settings and figures of its rows."""
    return [(row["settings"], row["figures"]) for row in rows if row["benchmark"] == benchmark]


def codec(path: Path, rows: Rows) -> None:
    """Bytes against error, and speeds, of an outer gradient."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    found = {s["name"]: f for s, f in of(rows, "wire/codec") if s["data"] == "gradient"}
    with figure(path, 2, size=(14, 6), title=f"codecs on an outer gradient, {conditions(rows)}") as (left, right):
        points = [(f["bytes_per_parameter"], f["relative_error"], name) for name, f in found.items()]
        shades = [OURS if name == SHIPPED else OTHERS[0] for _, _, name in points]
        left.scatter([x for x, _, _ in points], [y for _, y, _ in points], s=36, c=shades, zorder=3)
        left.set(xscale="log", yscale="log", xlabel="bytes a parameter after zstd", ylabel="relative error")
        left.margins(0.12)
        left.set_xticks([0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.4])
        left.set_yticks([0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4])
        for axis in (left.xaxis, left.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        names = [name for name in SHOWN if "encode" in found.get(name, {})]
        bars(
            right,
            names,
            {key: [found[name][key] for name in names] for key in ("encode", "decode")},
            "GB/s of float32 through one thread",
            form="%.1f",
        )
        name_points(left, [(x, y, f"{name}, shipped" if name == SHIPPED else name) for x, y, name in points])


def transport(path: Path, rows: Rows) -> None:
    """Throughput and CPU, deviation from budgets, round trips. What was not measured leaves its panel empty."""
    with figure(path, 3, size=(18, 5), title=f"transport, {conditions(rows)}") as (left, middle, right):
        found = of(rows, "transport throughput")
        speed = {"Gbit/s": [f["gbit_per_s"] for _, f in found]}
        speed["CPU s per GB, both ends"] = [f["cpu_s_per_gb"] for _, f in found]
        bars(left, [size_name(s["payload_bytes"]) for s, _ in found], speed, "one pair over loopback, TLS")
        left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9)

        found = of(rows, "transport budget")
        names = [f"{rate_name(s['mbit_per_s'])} {s['direction']}" for s, _ in found]
        off = {"worst second of a run": [100 * f["worst_second"] for _, f in found]}
        bars(
            middle, names, off, "% off the budget: the worst second of a run (allowed: between the lines)", form="%+.2f"
        )
        for limit in (-3, 3):
            middle.axvline(limit, color="black", linewidth=0.8, linestyle=":")

        found = of(rows, "transport round trip")
        names = ["no budget" if s["up_mbit_per_s"] is None else rate_name(s["up_mbit_per_s"]) for s, _ in found]
        trips = {"under bulk": [f["bulk_ms"] for _, f in found], "idle": [f["idle_ms"] for _, f in found]}
        trips["allowed: 1.5 idle + a chunk"] = [1.5 * f["idle_ms"] + (f["chunk_ms"] or 0.0) for _, f in found]
        bars(right, names, trips, "round trip of a request, ms", form="%.2f")
        right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9)


def exchange(path: Path, rows: Rows) -> None:
    """Wall time by system, a panel a link, and bytes."""
    found = of(rows, "wire/exchange")
    links = [link for link in LINKS if any(s["link"] == link for s, _ in found)]
    seconds = {_system(s): f["wall_s"] for s, f in found if s["link"] == SORTED_BY}
    systems = sorted({_system(s) for s, _ in found}, key=lambda name: (seconds.get(name, math.inf), name))
    title = f"one exchange of {millions(found)} parameters, {conditions(rows)}"
    with figure(path, len(links) + 1, size=(16, 3.6), title=title, sharey=True, squeeze=False) as axes:
        for panel, link in zip(axes[0], links, strict=False):
            _by_system(panel, systems, {_system(s): f["wall_s"] for s, f in found if s["link"] == link}, "%.3g s")
            panel.set_title(LINKS[link], fontsize=10)
            panel.set_xlabel("seconds")
        most = {_system(s): 1e-6 * f["sent_bytes"] for s, f in reversed(found)}
        _by_system(axes[0][-1], systems, most, "%.0f MB")
        axes[0][-1].set_title("sent by a peer", fontsize=10)
        axes[0][-1].set_xlabel("MB")
        axes[0][0].invert_yaxis()


def _system(settings: Mapping[str, Any]) -> str:
    name = "raw sockets" if settings["system"] == "raw" else settings["system"]
    return f"{name}, {settings['codec']}"


def _by_system(axes: Any, systems: Sequence[str], values: Mapping[str, float], form: str) -> None:
    """A bar each, in its colour; a dash where nothing was measured."""
    for index, name in enumerate(systems):
        if name in values:
            drawn = axes.barh([index], [values[name]], color=colour(name), height=0.7)
            axes.bar_label(drawn, fmt=form, fontsize=9, padding=3)
        else:
            axes.text(0.0, index, " not measured", va="center", fontsize=8, color="0.5")
    axes.set_yticks(range(len(systems)), systems)
    axes.margins(x=0.35)


def millions(found: Sequence[tuple[Mapping[str, Any], object]]) -> str:
    """Of the first row's model."""
    return f"{found[0][0]['parameters'] / 1e6:g}M" if found else "no"


def rate_name(mbit_per_s: float) -> str:
    """For an axis."""
    return f"{mbit_per_s / 1000:g} Gbit/s" if mbit_per_s >= 1000 else f"{mbit_per_s:g} Mbit/s"


def size_name(payload_bytes: str) -> str:
    """For an axis, or a table."""
    if payload_bytes == "raw":
        return "raw TLS socket"
    size = int(payload_bytes) >> 10
    return f"{size} KiB" if size < 1024 else f"{size >> 10} MiB"


def conditions(rows: Rows) -> str:
    """Commit and machine, for a title."""
    if not rows:
        return "nothing measured"
    loads, machine = [row["load_1min"] for row in rows], rows[0]["machine"]
    cores = f"{machine['cores']} cores {machine['cpu']}"
    load = "load not recorded" if None in loads else f"load {min(loads):.1f}-{max(loads):.1f}"
    return f"{rows[0]['commit'][:10]}, {cores}, {load}"


def main() -> None:
    """Draw what is kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire.plots", description="Draw docs/plots/wire-*.png.")
    parser.add_argument("--rows", type=Path, default=RESULTS, help="rows written by --json (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=PLOTS, help="output folder (default: %(default)s)")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines()]
    for name, draw in (("codec", codec), ("transport", transport), ("exchange", exchange)):
        mine = [row for row in rows if name in row["benchmark"]]
        if mine:
            draw(options.out / f"wire-{name}.png", mine)


if __name__ == "__main__":
    main()
