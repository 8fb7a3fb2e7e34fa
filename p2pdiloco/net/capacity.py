"""What the link carries, learned from what it delivered, and the budget that follows: that less a headroom.

As in BBR (Cardwell et al., 2016) the estimate is the best rate of late, and now and then a little more is tried. A
window counts if bulk waited all through it, for only then the link was the limit; one that was not so busy counts only
if it was better than all.

    no limit until the first busy window
    searching   SEARCH_GAIN x estimate, until it did not grow by GROWTH in PATIENCE windows
    cruising    HEADROOM x estimate, for CRUISE_WINDOWS busy windows
    probing     PROBE_GAIN x estimate, for one window: a link that has become faster is noticed

Rules of this file:
1. Pure, and without a clock: windows in, bytes per second out. Only busy windows make the estimate older.
2. A link that has become slower is believed after MEMORY_WINDOWS busy windows.
3. Never below FLOOR_BYTES_PER_S.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

HEADROOM = 0.9
SEARCH_GAIN, PROBE_GAIN = 2.0, 1.25
GROWTH = 1.1
PATIENCE = 3
"""Windows: a process that does not get its turn in time measures little in one of them."""
CRUISE_WINDOWS = 20
MEMORY_WINDOWS = 100
FLOOR_BYTES_PER_S = 125_000.0


class Capacity:
    """See the module's rules."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=MEMORY_WINDOWS)
        self._phase: Literal["searching", "cruising", "probing"] = "searching"
        self._cruised = 0
        self._stagnated = 0

    @property
    def estimate(self) -> float | None:
        """Bytes per second; None: nothing was busy yet."""
        return max(self._rates, default=None)

    @property
    def budget(self) -> float | None:
        """Bytes per second to send at until the next window ends; None: no limit."""
        estimate = self.estimate
        if estimate is None:
            return None
        gain = {"searching": SEARCH_GAIN, "cruising": HEADROOM, "probing": PROBE_GAIN}[self._phase]
        return max(FLOOR_BYTES_PER_S, gain * estimate)

    def saw(self, delivered_bytes: int, passed_s: float, *, is_busy: bool) -> None:
        """A window of ``passed_s`` is over, in which so much was delivered; ``is_busy``: bulk waited all through it."""
        rate, before = delivered_bytes / passed_s, self.estimate
        if not is_busy and (before is None or rate <= before):
            return
        self._rates.append(rate)
        if before is None or (self._phase != "cruising" and rate > GROWTH * before):
            self._phase, self._stagnated = "searching", 0
        elif self._phase == "cruising":
            self._cruised += 1
            if self._cruised >= CRUISE_WINDOWS:
                self._phase = "probing"
        else:
            self._stagnated += 1
            if self._phase == "probing" or self._stagnated >= PATIENCE:
                self._phase, self._cruised = "cruising", 0
