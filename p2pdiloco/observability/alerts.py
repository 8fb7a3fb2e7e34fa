"""Alerts: conditions that a person should hear of (stuck, alone, diverging, disk, membership, limit,
trouble, done). Pure.

Rules of this file:
1. An alert is reported once when it begins and once when it is over. A condition that lasts less than ``PATIENCE_S`` is
   not reported.
2. Alerts depend on the snapshot and a few values from elsewhere (free disk space, remaining membership, limits that
   the swarm approaches). Time is a parameter. If ``look`` is called every few seconds, each kind is noticed within a
   minute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from p2pdiloco.observability.snapshot import RunSnapshot

Kind = Literal["stuck", "alone", "diverging", "disk", "membership", "limit", "trouble", "done"]
PATIENCE_S = 10.0
STUCK_S = 45.0
# Stuck: no new version for STUCK_S, and for this many of the usual intervals between two versions. Before the first
# version, the protocol's own health check decides (``protocol/health.py``).
STUCK_ROUNDS = 6.0
# Number of held-out losses that the newest one is compared with.
RECENT_LOSSES = 16
# Diverging: the held-out loss is above the best recent one by this share of it,
WORSE = 0.15
# and by at least this much.
WORSE_NATS = 0.3
# The sentence that reports the end of an alert.
OVER: dict[Kind, str] = {
    "stuck": "new versions are merged again",
    "alone": "this peer is no longer alone",
    "diverging": "the held-out loss is back near its best",
    "disk": "there is enough disk space again",
    "membership": "the membership does not end soon any more",
    "limit": "the swarm is far from its limits again",
    "trouble": "the problem is solved",
    "done": "the run is not complete any more",
}
LEAST_ROOM_BYTES = 1 << 30
MEMBERSHIP_S = 86400.0


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert to report, or its end."""

    kind: Kind
    text: str
    is_over: bool = False


class Alerts:
    """The alerts of one peer."""

    def __init__(self, membership_remaining_s: Callable[[], float | None] = lambda: None) -> None:
        """``membership_remaining_s`` returns the seconds that this peer's membership is still valid; None: it does not
        expire."""
        self._membership_left_s = membership_remaining_s
        # Present alerts, as sentences.
        self.present: dict[Kind, str] = {}
        self._since: dict[Kind, float] = {}
        self._most_live = 1
        # The newest held-out losses, one per evaluated step (rule S3b).
        self._losses: deque[float] = deque(maxlen=RECENT_LOSSES)
        self._loss_step = -1
        self._newest = 0.0
        self._moved_at: float | None = None
        # Usual interval between two versions.
        self._pause_s = 0.0

    def look(
        self, now: float, picture: RunSnapshot, room_bytes: float | None = None, limits: Sequence[str] = ()
    ) -> list[Alert]:
        """Return the alerts that have begun or ended. ``now``: seconds that never go back. ``room_bytes``: free disk
        space; None: not known. ``limits``: sentences on limits that the swarm approaches."""
        found = self._found(now, picture, room_bytes)
        if limits:
            found["limit"] = "; ".join(limits)
        told = []
        for kind, text in found.items():
            since = self._since.setdefault(kind, now)
            is_news = kind not in self.present and (now - since >= PATIENCE_S or kind == "stuck")
            if is_news:
                told.append(Alert(kind=kind, text=text))
            if is_news or kind in self.present:
                self.present[kind] = text
        for kind in [kind for kind in self._since if kind not in found]:
            del self._since[kind]
            if self.present.pop(kind, None) is not None:
                told.append(Alert(kind=kind, text=OVER[kind], is_over=True))
        return told

    def _found(self, now: float, picture: RunSnapshot, room_bytes: float | None) -> dict[Kind, str]:
        found: dict[Kind, str] = {}
        trouble = "; ".join(picture.troubles)
        if trouble:
            found["trouble"] = trouble
        stuck = self._stuck(now, picture)
        if stuck:
            found["stuck"] = stuck
        live = picture.headcount.live
        self._most_live = max(self._most_live, live)
        if live == 1 and self._most_live > 1 and picture.course.phase in ("training", "following"):
            found["alone"] = (
                "all other peers are gone; this one continues alone. Check the link (if no peer can be dialled, also "
                "the bootstrap that relayed), or start another peer"
            )
        if live == 1 and self._most_live > 1 and picture.course.phase == "joining":
            found["alone"] = (
                "all other peers are gone, and this one has no model yet: it waits for them. Start one that has it "
                "(p2pdiloco resume), or check the link"
            )
        loss = picture.course.held_out_loss
        if loss is not None:
            if picture.course.held_out_step > self._loss_step:
                self._loss_step = picture.course.held_out_step
                self._losses.append(loss)
            best = min(self._losses)
            if loss - best > max(WORSE_NATS, WORSE * best):
                found["diverging"] = (
                    f"the held-out loss is {loss:.3f} and was {best:.3f}: check who joined, and the learning rates"
                )
        if room_bytes is not None and room_bytes < LEAST_ROOM_BYTES:
            found["disk"] = f"{room_bytes / 1e6:,.0f} MB are left on the disk of the state folder: free some space"
        left_s = self._membership_left_s()
        if left_s is not None and left_s < MEMBERSHIP_S:
            found["membership"] = f"the membership ends in {max(0.0, left_s) / 3600:.1f} hours: ask for a new invite"
        return found

    def _stuck(self, now: float, picture: RunSnapshot) -> str:
        newest = max((row.at for row in picture.shards), default=0.0)
        goes_on = picture.course.phase in ("training", "following") and picture.headcount.participating > 0
        if newest != self._newest or self._moved_at is None or not goes_on:
            if self._newest and newest > self._newest:
                pause_s = newest - self._newest
                self._pause_s = pause_s if not self._pause_s else self._pause_s + 0.2 * (pause_s - self._pause_s)
            self._newest, self._moved_at = newest, now
            return ""
        since_s = now - self._moved_at
        if not self._pause_s or since_s < max(STUCK_S, STUCK_ROUNDS * self._pause_s):
            return ""
        return f"no new version for {since_s:.0f} s: check for learners that contribute nothing, and the links"
