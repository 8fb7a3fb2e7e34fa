"""How long peers wait for each other: pure functions of what was measured and who has answered.

An owner merges once nobody is missing, or its grace window is over (arXiv 2604.21428, "adaptive grace window"; it
publishes neither gamma nor the smoothing: ours are ``grace_share`` of the manifest and ``SMOOTHING``). The paper's
window is a share of tau steps. On a long or slow path answers regularly take longer than that: each version would then
hold one learner's progress, and the contributions of the others would be refused and sent again. So owners often wait
longer (docs/adr/0035-owners-wait-for-usual-answers.md), but not for a peer that usually takes longer than they wait: it
contributes at its next round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.state import ProtocolConfig
from p2pdiloco.protocol.support import Support

LEAST_WAIT_STEPS = 3
"""Least number of steps that an owner waits for usual answers. Learners answer at the end of a step, and some are
slower, so half of a short round is not enough."""
LONGEST_WAIT = 0.75
"""Share of the takeover time that an owner waits at most for groups: its commit must come before the next one merges,
and groups' merges are on their way to that one by then."""
ARRIVALS = 1.5
"""Times of arrival for which a peer waits for a commit that others have: somebody may be about to send it."""
LEFT_OUT_TAKEOVERS = 2
"""Takeover times for which a peer does not apply a suspected owner's commit. The next owner merges what it lacks in the
second."""


class Times(NamedTuple):
    """Times that this peer has measured, in seconds."""

    step_s: float
    """Shortest step time of a learner that trains."""
    median_step_s: float
    usual_round_trip_s: float
    slowest_round_trip_s: float
    round_s: float
    """From the announcement of a round to its last commit."""
    arrival_s: float
    """From the first news of a head to its commit, which came unasked."""


class Waits(NamedTuple):
    """How long to wait, in seconds."""

    takeover_s: float
    """How long an owner may take before the next in rank takes over (W4)."""
    usual_s: float
    """How long after the opening of a round its owner waits for those that usually answer until then (W3b)."""
    nearly_all_s: float
    """How long it waits at least while fewer than nearly all prompt peers have answered (M4d)."""
    few_s: float
    """Least time between two small commits whose owners' turn has not come (O5b)."""
    commit_s: float
    """How long to wait for a commit that other peers have (W5a)."""


def waits(config: ProtocolConfig, times: Times, *, is_any_leaving: bool) -> Waits:
    """Return all waits.

    Where steps are shorter than a round trip, nobody can answer within some steps, so ``usual_s`` covers two median
    round trips: a single peer that answers heartbeats late must not make all owners wait. It is at most half of the
    takeover time, so that the commit arrives before the next owner would merge, too. While a peer leaves, no owner
    waits for nearly all.
    """
    wanted_s = config.overlap * times.step_s + 3 * times.round_s + 4 * times.slowest_round_trip_s
    takeover_s = min(max(wanted_s, config.takeover_floor_s), config.takeover_ceiling_s)
    steps = max(config.sync_every / 2, LEAST_WAIT_STEPS)
    is_waiting = bool(config.grace_share) and not is_any_leaving
    on_the_way_s = min(ARRIVALS * times.arrival_s, takeover_s / 4) or min(times.round_s, config.heartbeat_s)
    return Waits(
        takeover_s=takeover_s,
        usual_s=min(steps * times.step_s + 2 * times.usual_round_trip_s, takeover_s / 2),
        nearly_all_s=min(config.sync_every * times.median_step_s, takeover_s) / 2 if is_waiting else 0.0,
        few_s=max(takeover_s, config.sync_every * times.step_s / 2),
        commit_s=on_the_way_s + 2 * times.slowest_round_trip_s,
    )


def grace_window_s(
    *, grace_share: float, overlap_steps: int, step_time_s: float, quorum_s: float, sync_s: float
) -> float:
    """Return gamma * (tau * step time - (quorum time + sync time)), in seconds, at least 0."""
    return max(0.0, grace_share * (overlap_steps * step_time_s - (quorum_s + sync_s)))


class QuorumView(NamedTuple):
    """Input of ``decide``. Times are the owner's own clock, in seconds."""

    now: float
    opened_at: float
    quorum_at: float | None
    """Time at which the K-th contribution with tokens arrived; None: not yet."""
    given: int
    """Number of contributions with tokens."""
    answers: Support
    """How many prompt participants have answered."""
    missing: Mapping[PeerId, float]
    """Participants that have not answered, and how long each usually takes (0: it is new)."""
    min_quorum: int
    rank: int
    """This peer's rank among the owners: rank 0 merges at once, the next after the takeover time, and so on."""
    grace_s: float
    """The paper's grace window."""
    waits: Waits
    is_extended: bool = True
    """Whether the owner waits longer than the grace window: gamma is not 0."""
    departing_s: float | None = None
    """How long it waits instead because a missing participant leaves. That has no later round: it goes when its own
    time is up, and what waits here goes with it."""


class Decision(NamedTuple):
    """Result of ``decide``: close now, or check again at ``look_again_at`` (None: when something changes)."""

    is_close: bool
    look_again_at: float | None
    reason: str
    late: frozenset[PeerId] = frozenset()
    """Peers that were waited for until they are late."""


def decide(view: QuorumView) -> Decision:
    """Decide whether to merge the contributions collected so far."""
    if view.given < view.min_quorum:
        return Decision(False, None, f"quorum not reached: {view.given} of {view.min_quorum}")
    turn_of_rank = view.opened_at + view.rank * view.waits.takeover_s
    if view.now < turn_of_rank:
        return Decision(False, turn_of_rank, f"rank {view.rank} waits for the owners before it")
    if not view.missing:
        return Decision(True, None, f"all participants answered, {view.given} give tokens")
    assert view.quorum_at is not None
    window_s = _window_s(view, view.quorum_at - view.opened_at)
    window_ends = view.quorum_at + window_s
    if view.now < window_ends:
        return Decision(False, window_ends, f"grace window: {len(view.missing)} may still answer")
    is_late = view.now >= view.opened_at + view.waits.usual_s
    reason = f"grace window of {window_s:.3f} s is over, {len(view.missing)} missing"
    return Decision(True, None, reason, frozenset(view.missing if is_late else ()))


def _window_s(view: QuorumView, quorum_s: float) -> float:
    """Return how long after the quorum the owner waits for those that are missing, in seconds."""
    window_s = view.grace_s
    if view.is_extended and any(usual_s <= view.waits.usual_s for usual_s in view.missing.values()):
        window_s = max(window_s, view.waits.usual_s - quorum_s)
    if view.is_extended and not view.answers.is_nearly_all:
        window_s = max(window_s, view.waits.nearly_all_s - quorum_s)
    return min(window_s if view.departing_s is None else view.departing_s, view.waits.takeover_s)


class CommitView(NamedTuple):
    """Input of ``due``: another owner's commit on the head. Times are this peer's own clock, in seconds."""

    now: float
    began_at: float
    """When the head came, or earlier if commits of few have used up that time."""
    opened_at: float | None
    """When the round opened here; None: it has not."""
    rank: int
    """The owner's rank."""
    took_part: Support
    """How many prompt peers took part."""
    is_suspect: bool
    """The owner may have left contributions out, or named keys of its own (``suspicion``)."""
    waits: Waits


class CommitDue(NamedTuple):
    """When a commit may be applied."""

    at: float
    is_unusual: bool = False
    """It uses up the time for small commits."""
    is_suspect: bool = False
    """Its owner comes last from now on."""


def due(view: CommitView) -> CommitDue:
    """Decide when to apply a commit.

    Its owner may merge at once if nearly all took part, since a peer contributes to the owner that it considers next;
    of two peers, only at rank 0. If most took part, or at rank 0, its owner has to wait a while for the others, else
    until its turn comes. A suspected owner's commit comes after that of the next owner, which gets all contributions
    after the takeover time, and those to the next versions at once.
    """
    if view.is_suspect:
        since = view.began_at if view.opened_at is None else view.opened_at
        return CommitDue(max(view.now, since + LEFT_OUT_TAKEOVERS * view.waits.takeover_s), is_suspect=True)
    is_in_turn = view.took_part.is_most or view.rank == 0
    if is_in_turn and view.took_part.is_nearly_all:
        return CommitDue(view.now)
    wait_s = view.waits.nearly_all_s if is_in_turn else view.rank * view.waits.takeover_s
    if view.opened_at is not None and view.now >= view.opened_at + wait_s:
        return CommitDue(view.now)
    at = view.began_at + view.waits.few_s
    return CommitDue(at if view.opened_at is None else min(at, view.opened_at + wait_s), is_unusual=at <= view.now)
