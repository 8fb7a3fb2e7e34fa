"""A rate kept by an absolute schedule: what is late is made up for, within a bounded burst.

Every byte has its place on the schedule, so an error of one wait does not add to the next: the rate is exact in the
long run, and over any stretch of T seconds at most ``rate * (T + burst_s)`` and one slice go out.

Rules of this file:
1. Pure: time is a number (seconds on any clock that never goes back).
2. What must go at once (control) is charged without asking; the debt is bounded, so the rest is not starved for ever.
3. A rate of None is no limit, and costs nothing.
"""

from __future__ import annotations

from math import ceil

BURST_S = 0.012
"""What may be made up for: longer than a timer is late, and well under 3 % of a second."""
DEBT_S = 1.0
"""How far control may push the schedule ahead."""
SLICE_S = 0.002
"""A slice takes about this long, so that what overtakes it waits no longer."""
SLICE_LEAST, SLICE_MOST = 16 << 10, 128 << 10
"""One TLS record; what is encrypted and decrypted in a tenth of a millisecond."""
SLICE_UNLIMITED = 256 << 10
"""Where there is no budget: one chunk, for a tenth less CPU."""


class Meter:
    """See the module's rules."""

    def __init__(self, bytes_per_s: float | None = None, *, burst_s: float = BURST_S) -> None:
        assert bytes_per_s is None or bytes_per_s > 0
        self.bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._paid_s = float("-inf")
        """When all that was charged so far has had its time."""

    def set_rate(self, bytes_per_s: float | None, now: float) -> None:
        """A debt stays the same in bytes; what was saved up at the old rate is not spent at the new one."""
        assert bytes_per_s is None or bytes_per_s > 0
        debt_bytes = max(0.0, self._paid_s - now) * (self.bytes_per_s or 0.0)
        self.bytes_per_s = bytes_per_s
        self._paid_s = now + min(DEBT_S, debt_bytes / bytes_per_s) if bytes_per_s else float("-inf")

    def charge(self, count: int, now: float) -> None:
        """``count`` bytes went out, when the schedule was ready."""
        if self.bytes_per_s is not None:
            self._paid_s = max(self._paid_s, now - self._burst_s) + count / self.bytes_per_s

    def charge_control(self, count: int, now: float) -> None:
        """``count`` bytes went out without asking."""
        if self.bytes_per_s is not None:
            paid_s = max(self._paid_s, now - self._burst_s) + count / self.bytes_per_s
            self._paid_s = max(self._paid_s, min(paid_s, now + DEBT_S))

    def ready_at(self) -> float:
        """When the next slice may go; in the past: at once."""
        return self._paid_s

    def is_ready(self, now: float) -> bool:
        return self._paid_s <= now


def slice_bytes(bytes_per_s: float | None) -> int:
    """How much to send at once at this rate."""
    if bytes_per_s is None:
        return SLICE_UNLIMITED
    return min(SLICE_MOST, max(SLICE_LEAST, ceil(bytes_per_s * SLICE_S)))
