"""The demo as a picture: the loss, and below it a lane a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from p2pdiloco.demo.local_swarm import Member
from p2pdiloco.demo.story import Story
from p2pdiloco.protocol.ids import LearnerId, peer_of

TRAINS, STARTS, KILLED, MERGED, FAINT = "#2b6cb0", "#cbd5e0", "#c53030", "#f6e05e", "#718096"
LANE = 0.5


def draw(story: Story, start: float, path: Path) -> str:
    """Write the picture (PNG): where it is, or why there is none. ``start``: version 0's held-out loss."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        return f"none ({error}: pip install 'p2pdiloco[plot]')"

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, lanes) = plt.subplots(
        2, 1, sharex=True, figsize=(9, 5.6), dpi=150, height_ratios=(3.0, 0.4 + 0.3 * len(story.members))
    )
    _loss(story, start, top)
    for row, member in enumerate(story.members):
        _lane(story, lanes, row, member)
    lanes.set_yticks(range(len(story.members)), [f"peer {member.name}" for member in story.members])
    lanes.set_ylim(len(story.members) - 0.4, -0.6)
    lanes.set_xlabel("seconds since the start")
    lanes.tick_params(axis="y", length=0)
    if story.bootstrap_killed_unix:
        at = story.bootstrap_killed_unix - story.began_unix
        for axis in (top, lanes):
            axis.axvline(at, color=FAINT, linewidth=1.0, linestyle=":", zorder=1)
        top.annotate(
            "bootstrap node killed ", (at, 0.96), xycoords=("data", "axes fraction"), ha="right", va="top", color=FAINT
        )
    for axis in (top, lanes):
        axis.grid(alpha=0.25, axis="x")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(left=0.0)
    _legend(lanes)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return str(path)


def _loss(story: Story, start: float, axis: Any) -> None:
    measured: dict[int, tuple[float, float]] = {}
    for at, loss, version in sorted(p for m in story.members for p in m.view.held_out):
        measured.setdefault(version, (at - story.began_unix, loss))
    points = sorted(measured.values())
    axis.plot([t for t, _ in points], [loss for _, loss in points], marker="o", markersize=4, color=TRAINS)
    axis.axhline(start / 2, color=FAINT, linewidth=0.8, linestyle=":")
    place = (0.995, start / 2)
    axis.annotate("half of the start", place, xycoords=("axes fraction", "data"), ha="right", va="bottom", color=FAINT)
    axis.set_ylabel("held-out loss (nats a byte)")
    axis.set_title("One model, trained by a swarm whose peers come and go")
    axis.set_ylim(bottom=0)


def _lane(story: Story, axis: Any, row: int, member: Member) -> None:
    """Pale while it starts, then full; a line wherever a commit holds progress of its own."""
    view = member.view
    ended = story.killed_unix if member is story.killed else max(view.trained_at, member.began_unix)
    began, trained, ended = (
        at - story.began_unix for at in (member.began_unix, min(view.began_training_at or ended, ended), ended)
    )
    axis.barh(row, trained - began, left=began, height=LANE, color=STARTS, zorder=2)
    axis.barh(row, ended - trained, left=trained, height=LANE, color=TRAINS, zorder=2)
    commits = {
        commit["version"]: commit["time"] - story.began_unix
        for other in story.members
        for commit in other.view.commits
        if any(peer_of(LearnerId(learner)) == view.peer for learner in commit["contributors"])
    }
    axis.vlines(list(commits.values()), row - LANE / 2, row + LANE / 2, color=MERGED, linewidth=1.4, zorder=3)
    if member is story.killed:
        axis.scatter([ended], [row], marker="X", s=90, color=KILLED, edgecolors="white", linewidths=0.8, zorder=4)


def _legend(axis: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(color=STARTS, label="starts"),
        Patch(color=TRAINS, label="trains"),
        Line2D([], [], color=MERGED, linewidth=1.4, label="its progress is merged (fragment 0)"),
        Line2D([], [], color=KILLED, marker="X", linestyle="", markersize=8, label="killed"),
    ]
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.42), ncols=4, frameon=False, fontsize=8.5)
