"""Upload bandwidth of the link, estimated from the kernel's delivery counters.

Rules of this file:
1. The module is pure: time is a number; connections are any hashable names.
2. Acknowledged bytes of all connections count, except connections within this machine, which use no link. Without these
   counters (on all systems but Linux) there is no limit.
3. The receiver's budget is not learned: senders slow down according to what they see delivered.
4. While no bulk data waits, samples are IDLE_LOOK_S apart, and nothing is measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, Literal, TypeVar

from msgspec import Struct

# -- Bandwidth estimator -----------------------------------------------------------------------------------------------
# Estimate of the link's rate, from windows of delivered bytes, and the budget that follows from it:
#
#     no limit until the first busy window
#     searching   SEARCH_GAIN x estimate, until it did not grow by GROWTH in PATIENCE windows
#     cruising    HEADROOM x estimate, for CRUISE_WINDOWS busy windows
#     probing     PROBE_GAIN x estimate, for one window: a link that has become faster is noticed
#
# 1. Only busy windows age the estimate.
# 2. A lower rate of the link is accepted after MEMORY_WINDOWS busy windows.
# 3. The budget is never below FLOOR_BYTES_PER_S.


HEADROOM = 0.9
SEARCH_GAIN, PROBE_GAIN = 2.0, 1.25
GROWTH = 1.1
PATIENCE = 3
"""Windows without growth that end the search. One is not enough: a process that is scheduled late measures little in
it. With one, a busy machine stayed at 1,180 of 2,380 Mbit/s for ten seconds (2026-11-21)."""
CRUISE_WINDOWS = 20
MEMORY_WINDOWS = 100
FLOOR_BYTES_PER_S = 4_000.0
"""At 125,000, heartbeats waited behind bulk on a line of 64 kbit/s until each peer took the other for dead."""


class BandwidthEstimator:
    """Estimator of the link's rate, without a clock: windows in, bytes per second out."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=MEMORY_WINDOWS)
        self._phase: Literal["searching", "cruising", "probing"] = "searching"
        self._cruised = 0
        self._stagnated = 0

    @property
    def estimate(self) -> float | None:
        """Estimated rate in bytes per second; None before the first busy window."""
        return max(self._rates, default=None)

    @property
    def budget(self) -> float | None:
        """Send budget in bytes per second until the next window ends; None: no limit."""
        estimate = self.estimate
        if estimate is None:
            return None
        gain = {"searching": SEARCH_GAIN, "cruising": HEADROOM, "probing": PROBE_GAIN}[self._phase]
        return max(FLOOR_BYTES_PER_S, gain * estimate)

    def add_window(self, delivered_bytes: int, passed_s: float, *, is_busy: bool) -> None:
        """Add a window of ``passed_s`` seconds. ``is_busy``: bulk data waited all through it."""
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


# -- Path information --------------------------------------------------------------------------------------------------


class Path(Struct, frozen=True):
    """Kernel's measurements of one connection's path."""

    congestion: str
    """Congestion control in use."""
    round_trip_s: float
    """Smoothed round trip, in seconds."""
    least_round_trip_s: float = 0.0
    """Smallest recent round trip, without queues and busy processors; ``round_trip_s`` if the kernel has none."""
    acked_bytes: int | None = None
    """Bytes acknowledged since the connection's start; None: the kernel does not count them."""
    is_local: bool = False
    """Whether both ends are on this machine."""


# -- Delivery-rate sampler ---------------------------------------------------------------------------------------------


WINDOW_S, WINDOW_ROUND_TRIPS = 0.1, 4
"""A window is the longer of the two, so that a change at its beginning shows in it."""
LOOKS = 4
"""Number of samples in a window."""
IDLE_LOOK_S = 0.25

Name = TypeVar("Name", bound=Hashable)


class DeliveryRateSampler(Generic[Name]):
    """Makes windows for a ``BandwidthEstimator`` from the kernel's measurements of all connections."""

    def __init__(self) -> None:
        self.estimator = BandwidthEstimator()
        self.interval_s = IDLE_LOOK_S
        """Seconds until the next ``sample``."""
        self.is_local = False
        """Whether there are connections and all of them are within this machine."""
        self._start: Mapping[Name, Path] | None = None
        """Paths at the start of the current window; None: no window is open."""
        self._started_at = 0.0
        self._looks = 0
        self._is_busy = False

    def sample(self, paths: Mapping[Name, Path], is_waiting: Callable[[Name], bool], now: float) -> bool:
        """Take a sample. Return whether a window ended, so that the budget may have changed.

        ``is_waiting`` returns whether a connection has bulk data that waits for the link, not for the other side.
        """
        self.is_local = bool(paths) and all(path.is_local for path in paths.values())
        linked = {name: path for name, path in paths.items() if not path.is_local and path.acked_bytes is not None}
        if self._start is None:
            if any(map(is_waiting, linked)):
                self._begin(linked, now)
            return False
        self._is_busy &= any(map(is_waiting, self._start))
        self._looks += 1
        if self._looks < LOOKS:
            return False
        start, self._start, self.interval_s = self._start, None, IDLE_LOOK_S
        is_over = now > self._started_at and all(name in linked for name in start)
        if is_over:
            delivered = sum((linked[name].acked_bytes or 0) - (start[name].acked_bytes or 0) for name in start)
            self.estimator.add_window(delivered, now - self._started_at, is_busy=self._is_busy)
        if any(map(is_waiting, linked)):
            self._begin(linked, now)
        return is_over

    def reset(self) -> None:
        """Drop the current window."""
        self._start, self.interval_s = None, IDLE_LOOK_S

    def _begin(self, linked: Mapping[Name, Path], now: float) -> None:
        round_trip_s = max(path.round_trip_s for path in linked.values())
        self._start, self._started_at = linked, now
        self._looks, self._is_busy = 0, True
        self.interval_s = max(WINDOW_S, WINDOW_ROUND_TRIPS * round_trip_s) / LOOKS


# -- Byte counters -----------------------------------------------------------------------------------------------------


class Traffic(Struct):
    """Bytes of frames since the start, without the overhead of TLS and TCP.

    ``bulk`` is payload, ``control`` all other frames.
    """

    sent_control: int = 0
    sent_bulk: int = 0
    received_control: int = 0
    received_bulk: int = 0

    def add(self, other: Traffic) -> None:
        self.sent_control += other.sent_control
        self.sent_bulk += other.sent_bulk
        self.received_control += other.received_control
        self.received_bulk += other.received_bulk
