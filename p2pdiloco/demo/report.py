"""Report of the demo: numbers, a plot, a text sample, and the guarantees that were not kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from p2pdiloco.demo.local_swarm import Member, SwarmError
from p2pdiloco.demo.scenario import Story
from p2pdiloco.peer.checkpoint import Checkpoint, load
from p2pdiloco.protocol.ids import LearnerId, peer_of
from p2pdiloco.protocol.manifest import Layout, RunConfig
from p2pdiloco.training.corpus import load_corpus
from p2pdiloco.training.evaluation import held_out_loss
from p2pdiloco.training.models import build_model, generate
from p2pdiloco.training.parameters import FlatParameters
from p2pdiloco.util.files import write_atomically
from p2pdiloco.util.logs import printable

# -- Plot --------------------------------------------------------------------------------------------------------------
# Draws the demo: the held-out loss, and below it a lane for each peer.


TRAINS, STARTS, KILLED, MERGED, FAINT = "#2b6cb0", "#cbd5e0", "#c53030", "#f6e05e", "#718096"
LANE = 0.5


def draw(story: Story, start: float, end: float, path: Path) -> str:
    """Write the plot (PNG). Return its path, or the reason why there is none.

    Args:
        start: held-out loss of version 0.
        end: held-out loss of the final model.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        return f"none ({error}: pip install 'p2pdiloco[plot]')"

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, lanes) = plt.subplots(
        2, 1, sharex=True, figsize=(9, 5.6), dpi=150, height_ratios=(3.0, 0.4 + 0.3 * len(story.members))
    )
    _loss(story, start, end, top)
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


def _loss(story: Story, start: float, end: float, axis: Any) -> None:
    measured: dict[int, tuple[float, float]] = {}
    for at, loss, version in sorted(p for m in story.members for p in m.view.held_out):
        measured.setdefault(version, (at - story.began_unix, loss))
    points = [*sorted(point for point in measured.values() if point[0] < story.took_s), (story.took_s, end)]
    axis.plot([t for t, _ in points], [loss for _, loss in points], marker="o", markersize=4, color=TRAINS)
    axis.annotate(f"final model: {end:.3f}", points[-1], (0, -9), textcoords="offset points", ha="right", va="top")
    axis.axhline(start / 2, color=FAINT, linewidth=0.8, linestyle=":")
    place = (0.995, start / 2)
    axis.annotate("half of the start", place, xycoords=("axes fraction", "data"), ha="right", va="bottom", color=FAINT)
    axis.set_ylabel("held-out loss (nats per byte)")
    axis.set_title("One model, trained by a swarm whose peers come and go")
    axis.set_ylim(bottom=0)


def _lane(story: Story, axis: Any, row: int, member: Member) -> None:
    """Draw a peer's lane: pale while it starts, then full, with a line at each commit that contains its progress."""
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


# -- Report ------------------------------------------------------------------------------------------------------------
# Evaluates the demo, and prints and saves its report.


PROMPT = b"    def __init__(self, "
SAMPLE_TOKENS = 400
# Without a longest run, a model of this size writes lines of blanks; at a higher temperature, noise.
TEMPERATURE = 0.6
LONGEST_RUN = 8
FP32_BYTES = 4.0


def make_report(story: Story, config: RunConfig, out: Path) -> dict[str, Any]:
    """Evaluate the demo and save ``report.json`` and the plot. Return the report.

    Raises:
        SwarmError: the founder saved no checkpoint.
    """
    founder = story.members[0]
    folder = founder.run_folder()
    checkpoint = None if folder is None else load(folder / "checkpoint")
    if checkpoint is None:
        raise SwarmError("the founder saved no checkpoint")
    start, end, sample = _evaluate(checkpoint, config)
    reports = [r for m in story.members if not m.was_killed and (r := m.report()) is not None]
    survivors = [m for m in story.members if not m.was_killed]
    per_parameter = [r[key] for r in reports for key in ("up_bytes_per_parameter", "down_bytes_per_parameter")]
    largest = max(per_parameter, default=0.0)
    merged = max((r["tokens_merged"] for r in reports), default=0)
    # The killed learner may have contributed its last tokens before it reported their number, so at least the merged
    # tokens are counted.
    trained = sum(m.view.tokens for m in story.members if m.was_killed) + sum(r["tokens_trained"] for r in reports)
    report: dict[str, Any] = {
        "held_out_loss_start": start,
        "held_out_loss_end": end,
        "digests_equal": len(reports) == len(survivors) and all(r["digests"] == reports[0]["digests"] for r in reports),
        "overhead": {
            m.name: m.view.overhead_s / max(1e-9, m.view.compute_s + m.view.overhead_s) for m in story.members
        },
        "blocked_seconds": {m.name: m.view.blocked_s for m in story.members},
        "blocked_seconds_max": max([*(m.view.blocked_s for m in story.members), *(r["blocked_s"] for r in reports)]),
        "wire_bytes_per_parameter_max": largest,
        "wire_ratio_to_fp32": FP32_BYTES / largest if largest else None,
        "versions": founder.view.version,
        "versions_after_kill": founder.view.version - story.version_at_kill,
        "late_joiner_merged_tokens": _merged_tokens(founder, story.late),
        "late_joiner_in_last_commits": _is_in_last_commits(founder, story.late),
        "tokens_trained": max(trained, merged),
        "tokens_merged": merged,
        "tokens_unmerged_by_survivors": sum(r["tokens_unmerged"] for r in reports),
        "bytes_sent": {m.name: m.view.sent_bytes for m in story.members},
        "bootstrap_killed": story.bootstrap_killed_unix > 0.0,
        "leftover_processes": len(story.leftovers),
        "leftovers": story.leftovers,
        "sample": sample,
        "parameters": Layout.of(checkpoint.manifest).elements,
        "seconds": story.took_s,
    }
    write_atomically(out / "report.json", json.dumps(report, indent=2).encode())
    report["plot"] = draw(story, start, end, out / "loss.png")
    return report


def _evaluate(checkpoint: Checkpoint, config: RunConfig) -> tuple[float, float, str]:
    """Return the held-out losses of version 0 and of the checkpoint, and a text sample of the checkpoint."""
    torch.set_num_threads(2)
    corpus = load_corpus(config.data, context=config.model.context)
    model = build_model(config.model, config.seed)
    samples, device = 4 * config.evaluation.samples, torch.device("cpu")
    start = held_out_loss(model, corpus, config.model.context, samples, device)
    flat = FlatParameters(model.named_parameters(), checkpoint.manifest.tensors, Layout.of(checkpoint.manifest))
    flat.copy_from(checkpoint.theta, flat.everything)
    end = held_out_loss(model, corpus, config.model.context, samples, device)
    text = generate(model, PROMPT, SAMPLE_TOKENS, TEMPERATURE, seed=0, longest_run=LONGEST_RUN)
    lines = text.decode("utf-8", "replace").splitlines()[:-1]  # the last one is cut
    return start, end, "\n".join(line.rstrip() for line in lines if line.strip())


def _merged_tokens(founder: Member, late: Member | None) -> int:
    """Return the tokens of the late joiner in shard 0's chain."""
    if late is None:
        return 0
    return sum(
        tokens
        for commit in founder.view.commits
        for learner, tokens in commit["contributors"].items()
        if peer_of(LearnerId(learner)) == late.view.peer
    )


def _is_in_last_commits(founder: Member, late: Member | None) -> bool:
    last = [peer_of(LearnerId(learner)) for commit in founder.view.commits[-3:] for learner in commit["contributors"]]
    return late is not None and late.view.peer in last


def judge(report: dict[str, Any]) -> list[str]:
    """Return the guarantees that were not kept, one sentence each."""
    checks = [
        (report["held_out_loss_end"] <= report["held_out_loss_start"] / 2, "held-out loss did not fall to half"),
        (report["digests_equal"], "the peers' digests differ"),
        (report["blocked_seconds_max"] == 0.0, f"a learner was blocked for {report['blocked_seconds_max']} s"),
        (0.0 < report["wire_bytes_per_parameter_max"] <= 0.60, "more than 0.60 bytes a parameter on the wire"),
        (report["versions_after_kill"] > 0, "versions did not advance after the kill"),
        (report["late_joiner_in_last_commits"], "the late joiner is not in the last commits"),
        (report["tokens_unmerged_by_survivors"] == 0, "tokens of surviving learners were not merged"),
        (report["leftover_processes"] == 0, f"processes are left: {report['leftovers']}"),
    ]
    return [text for is_kept, text in checks if not is_kept]


def print_report(report: dict[str, Any], out: Path) -> None:
    """Print the report for people."""
    ratio, wire = report["wire_ratio_to_fp32"], report["wire_bytes_per_parameter_max"]
    start, end = report["held_out_loss_start"], report["held_out_loss_end"]
    print(f"\nthe run is complete after {report['seconds']:.0f} s")
    print(f"  held-out loss          {start:.3f} -> {end:.3f} nats per byte")
    print(f"  tokens                 {report['tokens_trained']:,} trained, {report['tokens_merged']:,} merged")
    print(f"  versions               {report['versions']}, {report['versions_after_kill']} of them after the kill")
    print(f"  late joiner            {report['late_joiner_merged_tokens']:,} tokens merged")
    print(f"  same model everywhere  {'yes, bit for bit' if report['digests_equal'] else 'NO'}")
    print(
        f"  on the wire            at most {wire:.3f} bytes per parameter and exchange"
        + (f", 1/{ratio:.1f} of fp32" if ratio else "")
    )
    print(
        f"  learners' overhead     at most {max(report['overhead'].values()):.1%} of their time was between steps, and "
        f"{report['blocked_seconds_max']:.3f} s waiting for the network"
    )
    print(f"  processes left         {report['leftover_processes']}")
    print(f"  a model of {report['parameters'] / 1e3:.0f}k parameters that was trained for so short a time writes:")
    for line in report["sample"].splitlines()[:12]:
        print(f"    | {printable(line[:110].rstrip())}")
    print(f"  plot: {report['plot']}")
    print(f"  saved in {out}: report.json, and every peer's logs and checkpoint")
    state = out / "peer-A"
    print(f"  play it back in a browser: p2pdiloco watch {out} --page auto")
    print(f"  have it write more: p2pdiloco generate {state}; make files of it: p2pdiloco export {state} --out model")
