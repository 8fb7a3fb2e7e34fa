"""Figures computed from the workers' reports: rates, utilization, time to a loss.

Pure functions, except for reading the reports. A rate covers the time after the first exchange, utilization the whole
time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.wan.sites import Worker


def of_series(workers: Sequence[Worker], step_s: float, tokens: int, *, is_lockstep: bool = False) -> dict[str, Any]:
    """All workers' figures together; the curve is (seconds, steps, held-out loss). ``tokens``: a worker's in one step.

    ``is_lockstep``: all steps are alike, and the first one's set-up is left out of the rate; whether a step was late
    cannot be told from its waiting for others.
    """
    curve = [(w["at"], w["number"], min(w["whole"], w["own"])) for w in workers[0].of("evaluated")]
    words = [worker.of("step") for worker in workers]
    mine = [w for w in words if w]
    steps = sum(len(w) for w in mine)
    wall_s = max(w[-1]["at"] for w in mine)
    compute_s = steps * step_s
    skipped = 1 if is_lockstep and min(len(w) for w in mine) > 2 else 0
    pace = statistics.mean((w[-1]["at"] - _at(w, skipped)) / (len(w) - skipped) for w in mine)
    return {
        "workers": len(mine),
        "steps": steps / len(mine),
        "wall_s": wall_s,
        "seconds_a_step": pace,
        "tokens_per_s": len(mine) * tokens / pace,
        "utilisation": compute_s / sum(w[-1]["at"] for w in mine),
        "steady_utilisation": step_s / pace,
        "blocked_s": max(sum(one["blocked"] for one in w) for w in mine),
        "late_share": None if is_lockstep else sum(w[-1]["late"] for w in mine) / steps,
        "sent_mb": statistics.mean(w[-1]["sent"] for w in mine) / 1e6,
        "received_mb": statistics.mean(w[-1]["received"] for w in mine) / 1e6,
        "sent_kb_a_step": sum(w[-1]["sent"] for w in mine) / steps / 1e3,
        "lowest": min((loss for _, _, loss in curve), default=None),
        "curve": curve,
    }


def _at(words: Sequence[Mapping[str, Any]], skipped: int) -> float:
    return float(words[skipped - 1]["at"]) if skipped else 0.0


def time_to(wanted: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """When a curve of (time, loss) first reaches ``wanted``, on straight lines between points; None: it never does."""
    for i, (at, loss) in enumerate(curve):
        if loss <= wanted:
            if i == 0:
                return at
            before, higher = curve[i - 1]
            return before + (at - before) * (higher - wanted) / (higher - loss)
    return None


def brief(one: Mapping[str, Any]) -> str:
    """For the impatient."""
    late = "-" if one["late_share"] is None else f"{one['late_share']:.1%}"
    lowest = "-" if one["lowest"] is None else f"{one['lowest']:.3f}"
    return (
        f"{one['steps']:.0f} steps in {one['wall_s']:.1f} s, {one['tokens_per_s']:.0f} tokens/s, utilisation "
        f"{one['utilisation']:.1%}, blocked {one['blocked_s']:.2f} s, {one['sent_kb_a_step']:.1f} kB a step, "
        f"late {late}, lowest loss {lowest}"
    )
