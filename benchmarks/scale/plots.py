"""Plots of the scale benchmarks: figures in, one PNG out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.plots import OTHERS, OURS, colour, figure

Rows = Mapping[str, Mapping[str, Any]]
SHADES = {"M = 2": "#f0b8bf", "M = 4": "#e58c97", "M = 8": OURS, "M = 16": "#96293a", "M = 32": "#5f1a25"}


def goodput(path: Path, rows: Rows) -> None:
    """Lines are ours, circles the paper's."""
    lines: dict[str, list[tuple[int, float, float | None]]] = defaultdict(list)
    for name, one in rows.items():
        system, _, count = name.rpartition(", ")
        lines[system].append((int(count), one["goodput_percent"], one["published"]))
    with figure(path, size=(11, 6)) as axes:
        for system, points in lines.items():
            size = system.rpartition(", ")[2]
            is_ours = system.startswith("p2pdiloco")
            if (is_ours and size not in SHADES) or len(points) < 2:
                continue
            shade = SHADES[size] if is_ours else colour(system)
            points.sort()
            chips, ours, papers = zip(*points, strict=True)
            axes.plot(chips, ours, "-", color=shade, lw=2.4)
            told = [(c, p) for c, p in zip(chips, papers, strict=True) if p is not None]
            if told:
                axes.plot(*zip(*told, strict=True), "o", mfc="white", mec=shade, mew=1.8, ms=8)
            axes.annotate(
                system,
                (chips[-1], ours[-1]),
                (10, 0),
                textcoords="offset points",
                va="center",
                color=shade,
                fontsize=11,
            )
        axes.set(xscale="log", xlabel="chips, each failing once a year", ylabel="goodput, %", ylim=(0, 102))
        axes.set_xticks([150e3, 300e3, 600e3, 1.2e6, 2.4e6], ["150k", "300k", "600k", "1.2M", "2.4M"])
        axes.minorticks_off()
        axes.set_xlim(140e3, 7e6)
        axes.set_title("Lines: simulated here. Circles: arXiv 2604.21428.", fontsize=11, loc="left")


def bandwidth(path: Path, rates: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    """Utilisation over the line's rate."""
    with figure(path, size=(11, 6)) as axes:
        for name, shares in curves.items():
            shade = colour(name)
            wide, style = (3.0, "-") if name == "p2pdiloco" else (2.0, "--")
            axes.plot(rates, [100 * share for share in shares], style, color=shade, lw=wide, label=name)
        axes.axhline(95, color="black", lw=1, ls=":")
        axes.set(xscale="log", xlabel="each peer's line", ylabel="compute utilisation, %", ylim=(0, 104))
        ticks = {1e7: "10 Mbit/s", 1e8: "100 Mbit/s", 1e9: "1 Gbit/s", 1e10: "10 Gbit/s", 1e11: "100 Gbit/s"}
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.minorticks_off()
        axes.legend(fontsize=11, loc="upper left", bbox_to_anchor=(0.0, 0.9))
        axes.set_title("12B parameters, 8 peers, 1 s a step; by the public model", fontsize=11, loc="left")


def regions(path: Path, found: Rows) -> None:
    """What is merged a minute, of what all would train; grey: the outage."""
    with figure(path, 1, len(found), size=(11, 3.1 * len(found)), squeeze=False) as rows:
        for axes, (name, one) in zip(rows[:, 0], found.items(), strict=True):
            points = one["curve"]
            unit, told = (3600.0, "hours") if points[-1][0] > 36_000 else (60.0, "minutes")
            wide = max(1, len(points) // 400)
            chosen = points[::wide]
            pairs = list(pairwise(chosen))
            times = [(b[0] - one["struck_at"]) / unit for _, b in pairs]
            shares = [100 * (b[1] - a[1]) / (b[0] - a[0]) / one["ideal"] for a, b in pairs]
            axes.axvspan(0, (one["over_at"] - one["struck_at"]) / unit, color="#e8e8e8", lw=0)
            axes.axhline(100 * one["share_there"], color="black", lw=1, ls=":")
            axes.plot(times, shares, color=OURS, lw=2)
            axes.set(xlabel=f"{told} since it began", ylabel="merged, % of all", ylim=(0, 130))
            axes.set_title(f"{name}. Dotted: the share that is there", fontsize=11, loc="left")


VOLUNTEERS = (
    ("t99_s", 1, "s until 99 % have a commit"),
    ("fork_share", 100, "forks, % of versions"),
    ("bytes_most_over_mean", 1, "busiest peer's upload / mean"),
    ("connections_most", 1, "connections, most of a peer"),
)


def volunteers(path: Path, lines: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
    """Figures over the number of peers, a line for each file of rows; the last line is ours."""
    with figure(path, 2, 2, size=(11, 7)) as axes:
        sizes = sorted({peers for rows in lines.values() for peers in rows})
        for panel, (key, times, title) in zip(axes.flat, VOLUNTEERS, strict=True):
            most = 1e-6
            for index, (name, rows) in enumerate(lines.items()):
                points = [(n, times * rows[n][key]) for n in sorted(rows) if rows[n].get(key) is not None]
                shade = OURS if index == len(lines) - 1 else OTHERS[index % len(OTHERS)]
                if points:
                    most = max(most, *(value for _, value in points))
                    panel.plot(*zip(*points, strict=True), "o-", color=shade, lw=2, ms=5, label=name)
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
            panel.minorticks_off()
            panel.set_ylim(0.0, 1.1 * most)
            panel.set_title(title, fontsize=11, loc="left")
        axes[0, 0].legend(fontsize=10, loc="upper left")
        for panel in axes[1]:
            panel.set_xlabel("peers")
