"""When an owner closes a version: quorum K, everyone in, the grace window, the turn of its rank. One pure function.

Source: arXiv 2604.21428, "adaptive grace window"; gamma and the smoothing are unpublished, see docs/decisions.md.
"""

from __future__ import annotations

from typing import NamedTuple


class QuorumView(NamedTuple):
    """What the decision depends on. Times are the owner's own clock, in seconds."""

    now: float
    opened_at: float
    quorum_at: float | None
    """When the K-th contribution with tokens came, if it has."""
    given: int
    """Contributions with tokens."""
    missing: int
    """Participating peers that have not answered."""
    min_quorum: int
    rank: int
    """This peer's rank among the owners: 0 merges at once, the next after the takeover time, and so on."""
    takeover_s: float
    grace_s: float


class Decision(NamedTuple):
    """Close now, or look again at ``look_again_at`` (None: when something changes)."""

    is_close: bool
    look_again_at: float | None
    reason: str


def grace_window_s(
    *, grace_share: float, overlap_steps: int, step_time_s: float, quorum_s: float, sync_s: float
) -> float:
    """gamma * (tau * step time - (quorum time + sync time)), never below 0."""
    return max(0.0, grace_share * (overlap_steps * step_time_s - (quorum_s + sync_s)))


def decide(view: QuorumView) -> Decision:
    """Whether to merge what is in."""
    if view.given < view.min_quorum:
        return Decision(False, None, f"quorum not reached: {view.given} of {view.min_quorum}")
    turn_of_rank = view.opened_at + view.rank * view.takeover_s
    if view.now < turn_of_rank:
        return Decision(False, turn_of_rank, f"rank {view.rank} waits for the owners before it")
    if view.missing == 0:
        return Decision(True, None, f"all participants answered, {view.given} give tokens")
    assert view.quorum_at is not None
    window_ends = view.quorum_at + view.grace_s
    if view.now >= window_ends:
        return Decision(True, None, f"grace window of {view.grace_s:.3f} s is over, {view.missing} missing")
    return Decision(False, window_ends, f"grace window: {view.missing} may still answer")
