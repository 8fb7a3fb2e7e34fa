"""Pictures are drawn from the rows that are kept, and no label covers a point or another label."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import plots
from benchmarks.wire import plots as wire
from p2pdiloco.demo import report
from p2pdiloco.demo.local_swarm import View
from p2pdiloco.demo.scenario import Story

pytestmark = pytest.mark.heavy
matplotlib = pytest.importorskip("matplotlib")


def test_names_cover_no_point_and_no_other_name(tmp_path: Path) -> None:
    crowd = [(1.0 + 0.02 * (i % 4), 1.0 + 0.03 * (i // 4), f"codec number {i}") for i in range(12)]
    with plots.figure(tmp_path / "crowd.png", size=(7, 5)) as axes:
        axes.scatter([x for x, _, _ in crowd], [y for _, y, _ in crowd])
        axes.margins(0.5)
        plots.name_points(axes, crowd)
        renderer = axes.figure.canvas.get_renderer()
        for text in axes.texts:
            text.update_positions(renderer)
        boxes = [matplotlib.text.Text.get_window_extent(text, renderer) for text in axes.texts]
        dots = [axes.transData.transform((x, y)) for x, y, _ in crowd]
        assert len(boxes) == len(crowd), "all have room here"
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        assert not any(box.contains(*dot) for box in boxes for dot in dots)
    assert (tmp_path / "crowd.png").stat().st_size > 5000


def test_bars_are_sorted_with_their_labels_inside_and_a_system_keeps_its_colour(tmp_path: Path) -> None:
    seconds = {"data parallel (torch DDP, gloo, float32)": 2042.0, "p2pdiloco, int4": 73.0, "hivemind, 8 bit": 201.0}
    shades = []
    for names in (list(seconds), list(reversed(seconds))):
        with plots.figure(tmp_path / "bars.png", size=(9, 3)) as axes:
            labels = {name: (seconds[name], f"{seconds[name]:,.0f} s (28.0x)") for name in names}
            plots.named_bars(axes, labels, "seconds")
            axes.figure.tight_layout()
            axes.figure.canvas.draw()
            renderer, inside = axes.figure.canvas.get_renderer(), axes.get_window_extent()
            assert all(inside.contains(*text.get_window_extent(renderer).max) for text in axes.texts)
            assert axes.get_xscale() == "linear"
            widths = [bar.get_width() for bar in axes.patches]
            assert widths == sorted(widths)
        shades.append([bar.get_facecolor() for bar in axes.patches])
    assert shades[0] == shades[1]
    assert len(set(shades[0])) == 3
    assert plots.colour("hivemind, uint8") == plots.colour("hivemind.Optimizer, local updates")


def test_the_demo_s_curve_ends_at_the_loss_that_its_report_names() -> None:
    from matplotlib.figure import Figure

    view = View()
    for at, loss, version in ((1.0, 5.5, 0), (9.0, 2.0, 8)):
        view.apply({"event": "evaluation", "time": at, "loss": loss, "version": version})
    view.trained_at = 10.0
    story = Story(0.0)
    story.members = [SimpleNamespace(view=view)]  # type: ignore[list-item]
    axes = Figure().subplots()
    report._loss(story, 5.5, 1.459, axes)
    assert [tuple(map(float, point)) for point in axes.lines[0].get_xydata()] == [(1.0, 5.5), (9.0, 2.0), (10.0, 1.459)]
    assert "1.459" in " ".join(text.get_text() for text in axes.texts)


def test_the_wire_s_pictures_are_drawn_from_the_rows_that_are_kept(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in wire.RESULTS.read_text(encoding="utf-8").splitlines()]
    for draw in (wire.codec, wire.transport, wire.exchange):
        draw(tmp_path / f"{draw.__name__}.png", [row for row in rows if draw.__name__ in row["benchmark"]])
        assert (tmp_path / f"{draw.__name__}.png").stat().st_size > 20000
