"""One picture of a chaos run: how the model went on, and, a row a peer, who lived when and what was done to whom."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.checks import Verdict, goodput, quiet_windows
from tests.chaos.evidence import Evidence, PeerEvidence, Struck
from tests.chaos.schedule import DARK_KINDS, LINK_KINDS, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

INK = "#1f2933"
FAINT = "#9aa5b1"
STARTING = "#c3d5ea"
QUIET = "#e6f4ea"
LOOKS: dict[Kind, tuple[str, str, str]] = {
    "kill": ("X", "#d62728", "node killed (SIGKILL)"),
    "kill-saving": ("X", "#f28e2b", "node killed in a checkpoint"),
    "rollback": ("<", "#59a14f", "old checkpoints put back"),
    "twins": ("D", "#4e79a7", "started twice, from a copy"),
    "region": ("X", "#8c1515", "whole region killed"),
    "blackout": ("X", "#000000", "everybody killed, then resume"),
    "power-cut": ("X", "#4b4b4b", "everybody and the bootstrap lose power"),
    "learner": ("v", "#e377c2", "learner killed (SIGKILL)"),
    "leave": ("P", "#2ca02c", "leaves, comes back"),
    "stop": ("s", "#ff7f0e", "node stopped (SIGSTOP)"),
    "freeze": ("s", "#b30000", "node stopped for over a minute"),
    "stop-learner": ("d", "#bc8f00", "learner stopped"),
    "disk": ("h", "#8c564b", "disk full"),
    "starve": ("h", "#1f77b4", "no descriptors, learner killed"),
    "memory": ("h", "#9467bd", "no more memory for the node"),
    "unwritable": ("h", "#bcbd22", "folder gone, learner killed"),
    "no-process": ("h", "#17becf", "no process, learner killed"),
    "cut": ("_", "#7b2cbf", "cut off"),
    "mute": ("_", "#b58be0", "not heard (cut one way)"),
    "one-way": ("1", "#b58be0", "connections that carry nothing one way"),
    "split": ("_", "#3c096c", "region cut off"),
    "slow": ("_", "#17a2b8", "slow link"),
    "corrupt": ("*", "#d4a017", "bytes spoilt"),
    "break": ("|", "#1f2933", "connections reset"),
}
"""Marker, colour and name of each kind."""
PALETTE = ("#2b6cb0", "#2f855a", "#b7791f", "#6b46c1", "#c05621", "#2c7a7b", "#97266d", "#4a5568")
SIZES = {"*": 140}
LEGEND_GAP = 36.0
"""Points between the rows and the legend: the axis's numbers and label."""
PROCESS_LINE = 0.0
LINK_LINES = {
    "cut": 0.30,
    "split": 0.30,
    "mute": 0.36,
    "one-way": 0.36,
    "slow": -0.33,
    "corrupt": -0.33,
    "break": -0.33,
}
"""Position in its peer's row of a fault of a link; faults of processes are drawn on the bar."""


def draw(evidence: Evidence, verdicts: Sequence[Verdict], path: Path) -> None:
    """Write the picture (PNG). Needs matplotlib, from the extra ``plot``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plan = evidence.schedule.plan
    height = 3.4 + 0.62 * plan.peers
    with plt.rc_context({"font.family": "DejaVu Sans", "font.size": 10, "axes.edgecolor": FAINT, "text.color": INK}):
        figure, (top, rows) = plt.subplots(
            2,
            1,
            figsize=(14, height),
            dpi=150,
            sharex=True,
            gridspec_kw={"height_ratios": [2.3, 0.62 * plan.peers], "hspace": 0.06},
        )
        _shade(evidence, top, rows)
        _versions(evidence, top)
        for index, peer in enumerate(evidence.peers):
            _row(evidence, rows, index, peer)
        kinds = _faults(evidence, rows)
        _frame(evidence, top, rows)
        _legend(rows, kinds)
        _title(evidence, verdicts, figure, top)
        figure.savefig(path, bbox_inches="tight", facecolor="white")
        plt.close(figure)


def _at(evidence: Evidence, unix: float) -> float:
    return unix - evidence.began


def _end(evidence: Evidence) -> float:
    return _at(evidence, max(life.ended for peer in evidence.peers for life in peer.lives))


def _shade(evidence: Evidence, *axes: Any) -> None:
    """The quiet times, in which versions must advance, and the blackouts."""
    for axis in axes:
        for window in quiet_windows(evidence):
            axis.axvspan(_at(evidence, window.began), _at(evidence, window.ended), color=QUIET, linewidth=0, zorder=0)
        for fault in evidence.faults:
            if fault.kind in DARK_KINDS:
                axis.axvline(_at(evidence, fault.began), color="black", linewidth=1.2, zorder=1)


def _versions(evidence: Evidence, axis: Any) -> None:
    """Shard 0 at every peer: they lie on one another, but for who is cut off or comes back."""
    for index, peer in enumerate(evidence.peers):
        points = [(_at(evidence, c.time), c.version) for c in peer.commits if c.shard == 0]
        runs: list[list[tuple[float, int]]] = [[]]
        breaks = sorted(_at(evidence, life.began) for life in peer.lives)
        for before, point in zip([(-1e9, 0), *points], points, strict=False):
            if any(before[0] < b <= point[0] for b in breaks) and runs[-1]:
                runs.append([])
            runs[-1].append(point)
        for number, run in enumerate(runs):
            axis.plot(
                *zip(*run, strict=True),
                drawstyle="steps-post",
                linewidth=1.6,
                alpha=0.8,
                color=PALETTE[index % len(PALETTE)],
                label=peer.name if not number else None,
            ) if run else None


def _row(evidence: Evidence, axis: Any, index: int, peer: PeerEvidence) -> None:
    """A bar a life: pale while it starts, full while its learner trains."""
    color = PALETTE[index % len(PALETTE)]
    for life in peer.lives:
        began, ended = _at(evidence, life.began), _at(evidence, life.ended)
        trained = ended if life.trained is None else _at(evidence, life.trained)
        axis.barh(index, trained - began, left=began, height=0.36, color=STARTING, zorder=2)
        axis.barh(index, ended - trained, left=trained, height=0.36, color=color, alpha=0.85, zorder=2)


def _faults(evidence: Evidence, axis: Any) -> set[Kind]:
    names = [peer.name for peer in evidence.peers]
    for fault in evidence.faults:
        for name in set(fault.peers).intersection(names):  # of the honest
            _mark(evidence, axis, names.index(name), fault)
    return {fault.kind for fault in evidence.faults}


def _mark(evidence: Evidence, axis: Any, row: int, fault: Struck) -> None:
    from matplotlib.lines import Line2D

    marker, color, _ = LOOKS[fault.kind]
    began, ended = _at(evidence, fault.began), _at(evidence, fault.ended)
    line = row + LINK_LINES.get(fault.kind, PROCESS_LINE)
    lasts = fault.kind in ("stop", "freeze", "rollback", "stop-learner", "disk", "cut", "mute", "split", "slow")
    if lasts and fault.kind in LINK_KINDS:
        axis.plot([began, ended], [line, line], color=color, linewidth=4, solid_capstyle="butt", zorder=4)
        return
    if lasts:
        axis.barh(row, ended - began, left=began, height=0.36, color="none", edgecolor=color, hatch="////", zorder=3)
    is_line = marker not in Line2D.filled_markers
    edge = {"linewidths": 2.0} if is_line else {"edgecolors": "white", "linewidths": 0.8}
    axis.scatter([began], [line], marker=marker, s=SIZES.get(marker, 70), color=color, zorder=5, **edge)


def _frame(evidence: Evidence, top: Any, rows: Any) -> None:
    plan = evidence.schedule.plan
    start = min(_at(evidence, life.began) for peer in evidence.peers for life in peer.lives)
    rows.set_xlim(start, _end(evidence))
    rows.set_ylim(plan.peers - 0.45, -0.55)
    rows.set_yticks(range(plan.peers), [f"{name}  {plan.region_of(name)}" for name in plan.names])
    rows.set_xlabel("seconds since all peers trained")
    top.set_ylabel("version of shard 0")
    top.set_ylim(bottom=0)
    for axis in (top, rows):
        axis.grid(axis="x", color="#e4e7eb", linewidth=0.8, zorder=0)
        axis.tick_params(length=0, colors=INK)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    words = (
        (evidence.began, "faults begin", -10),
        (evidence.settling, "quiet", -10),
        (evidence.settled, "all leave", -22),
    )
    for unix, text, below in words:
        at = _at(evidence, unix)
        top.axvline(at, color=FAINT, linewidth=1, linestyle=":")
        rows.axvline(at, color=FAINT, linewidth=1, linestyle=":")
        top.annotate(
            text, (at, 1.0), xycoords=("data", "axes fraction"), xytext=(3, below), textcoords="offset points", size=8.5
        )


def _legend(axis: Any, kinds: set[Kind]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=STARTING, label="starting, catching up"),
        Patch(facecolor=PALETTE[0], alpha=0.85, label="training"),
        Patch(facecolor=QUIET, label="quiet: versions must advance"),
    ]
    for kind, (marker, color, text) in LOOKS.items():
        if kind not in kinds:
            continue
        if marker == "_":
            handles.append(Line2D([], [], color=color, linewidth=4, label=text))
        else:
            handles.append(Line2D([], [], color=color, marker=marker, linestyle="", markersize=8, label=text))
    points = 72 * axis.figure.get_figheight() * axis.get_position().height
    below = (0.5, -LEGEND_GAP / points)
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=below, ncols=5, frameon=False, fontsize=9)


def _title(evidence: Evidence, verdicts: Sequence[Verdict], figure: Any, top: Any) -> None:
    plan, seed = evidence.schedule.plan, evidence.schedule.seed
    broken = [verdict.name for verdict in verdicts if not verdict.is_kept]
    told = "every promise kept" if not broken else f"NOT KEPT: {', '.join(broken)}"
    last = max((c.version for peer in evidence.peers for c in peer.commits if c.shard == 0), default=0)
    top.set_title(
        f"{len(evidence.faults)} faults to {plan.peers} peers: {told}",
        loc="left",
        fontsize=15,
        fontweight="bold",
        pad=24,
        color=INK if not broken else "#b00020",
    )
    top.text(
        0,
        1.035,
        f"plan {plan.name}, seed {seed}; {last} versions, goodput {goodput(evidence).of_living:.0%}, "
        f"one model at the end" * (not broken),
        transform=top.transAxes,
        fontsize=10.5,
        color="#52606d",
    )
