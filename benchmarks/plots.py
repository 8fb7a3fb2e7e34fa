"""Shared parts of the benchmarks' plots; needs matplotlib (``pip install -e '.[plot]'``).

Figures go in, one PNG comes out; nothing is measured here. A system has the same colour in every plot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OURS = "#d1495b"
RADII = (8, 14, 24, 36, 50, 66)
"""Points from a point to its name; and directions, in the order in which they are tried."""
ANGLES = [math.radians(degrees) for degrees in (0, 180, 35, -35, 145, -145, 90, -90, 65, -65, 115, -115)]
OTHERS = ("#30638e", "#edae49", "#00798c", "#8d96a3", "#5c4d7d", "#66a182")


SYSTEMS = {
    "p2pdiloco": OURS,
    "torchft": "#00798c",
    "hivemind": "#66a182",
    "elastic": "#8fb3d1",
    "data parallel": "#30638e",
    "gloo": "#30638e",
    "Decoupled DiLoCo": "#b98b1f",
    "Streaming DiLoCo": "#00798c",
    "DiLoCo": "#5c4d7d",
    "raw": "#8d96a3",
}
"""The colour of a system whose name contains the key; the first one counts."""


def colour(name: str, index: int = 0) -> str:
    """Return the colour of a system by its name, or of the scenario with this index."""
    return next((shade for key, shade in SYSTEMS.items() if key in name), OTHERS[index % len(OTHERS)])


@contextmanager
def figure(
    path: Path, columns: int = 1, rows: int = 1, *, size: tuple[float, float], title: str = "", **more: Any
) -> Iterator[Any]:
    """Axes to draw on, one or an array; written to ``path`` when that is done. ``size``: inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
    }
    with pyplot.rc_context(style):
        made, axes = pyplot.subplots(rows, columns, figsize=size, **more)
        yield axes
        made.suptitle(title, fontsize=9)
        made.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, dpi=110)
        pyplot.close(made)


def bars(
    axes: Any, names: Sequence[str], series: Mapping[str, Sequence[float]], unit: str, *, form: str = "%.3g"
) -> None:
    """Horizontal groups of bars: one group a name, one bar a series, the first in our colour."""
    height = 0.8 / max(1, len(series))
    for index, (label, values) in enumerate(series.items()):
        places = [i + height * (index - (len(series) - 1) / 2) for i in range(len(names))]
        shade = (OURS, OTHERS[0], *OTHERS[3:], *OTHERS[1:3])[index]
        axes.bar_label(axes.barh(places, values, height, label=label, color=shade), fmt=form, fontsize=8, padding=2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.margins(x=0.12)
    if len(series) > 1:
        axes.legend(fontsize=9)


def name_points(
    axes: Any,
    points: Sequence[tuple[float, float, str]],
    *,
    avoid: Sequence[tuple[float, float]] = (),
    fontsize: float = 9,
) -> None:
    """A text beside each point (x, y, text), where it covers no point, none of those to ``avoid``, and no other text;
    far ones with a thin line. Limits, scales and legend of the axes are set before."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    made = axes.figure
    made.tight_layout()
    made.canvas.draw()
    renderer, inside = made.canvas.get_renderer(), axes.get_window_extent()
    places = [axes.transData.transform(at) for at in [*((x, y) for x, y, _ in points), *avoid]]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in places]
    if axes.get_legend() is not None:
        taken.append(axes.get_legend().get_window_extent(renderer))
    for x, y, text in points:
        for radius, angle in ((radius, angle) for radius in RADII for angle in ANGLES):
            cosine, sine = math.cos(angle), math.sin(angle)
            side = "left" if cosine > 0.3 else "right" if cosine < -0.3 else "center"
            far = {"arrowprops": {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6}} if radius > RADII[1] else {}
            label = axes.annotate(
                text,
                (x, y),
                (radius * cosine, radius * sine),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=fontsize,
                **far,
            )
            label.update_positions(renderer)
            box = Text.get_window_extent(label, renderer).padded(2)
            if not any(box.overlaps(other) for other in taken) and _holds(inside, box):
                taken.append(box)
                break
            label.remove()


def _holds(outer: Any, inner: Any) -> bool:
    return bool(outer.x0 <= inner.x0 and inner.x1 <= outer.x1 and outer.y0 <= inner.y0 and inner.y1 <= outer.y1)


def named_bars(axes: Any, labels: Mapping[str, tuple[float, str]], unit: str, *, margin: float = 0.35) -> None:
    """One bar a system, the shortest first, in its colour, with a text at its end, for which ``margin`` leaves room."""
    names = sorted(labels, key=lambda name: labels[name][0])
    drawn = axes.barh(names, [labels[n][0] for n in names], color=[colour(n, i) for i, n in enumerate(names)])
    axes.bar_label(drawn, [labels[n][1] for n in names], padding=4, fontsize=10)
    axes.set_xlabel(unit)
    axes.margins(x=margin)
    axes.invert_yaxis()
