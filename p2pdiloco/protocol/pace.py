"""How fast others' claims may take the global step forward.

The fastest learner is the first to say a new step, so one peer's claim must count; and nothing proves it. So a claim
counts for as much as a learner ``HASTE`` times as fast as the median could have done meanwhile, or for what more than
half of all live peers say of themselves.

Rules of this file:
1. The allowance fills with time and is used up by claims; it holds two turns' steps at most, so that patience buys no
   leap. Time during which this peer stood still fills it without that bound: it must catch up with what it missed.
2. Those who believed a claim say it in turn. That is no second witness to a leap, since each of them was held to the
   same pace.
"""

from __future__ import annotations

HASTE = 8.0
BURST_TURNS = 2
USUAL_STEP_S = 1.0
"""Until somebody has said how long its steps take."""


class Pace:
    """The allowance for claims, in steps."""

    __slots__ = ("_at", "_burst", "_held")

    def __init__(self, sync_every: int) -> None:
        self._burst = float(BURST_TURNS * sync_every)
        self._held = self._burst
        self._at = 0.0

    def _fill(self, now: float, step_s: float) -> None:
        passed_s, self._at = now - self._at, max(now, self._at)
        filled = self._held + max(0.0, passed_s) * HASTE / (step_s or USUAL_STEP_S)
        self._held = max(self._held, min(filled, self._burst))

    def stood_still(self, seconds: float, step_s: float) -> None:
        """This peer missed so many seconds."""
        self._held += seconds * HASTE / (step_s or USUAL_STEP_S)

    def allowed(self, now: float, step_s: float) -> int:
        """How far beyond the own step a claim counts now; ``step_s``: the median step time, 0 if none is known."""
        self._fill(now, step_s)
        return int(self._held)

    def used(self, steps: int) -> None:
        """So many were believed."""
        self._held = max(0.0, self._held - steps)
