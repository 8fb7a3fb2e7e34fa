"""How far a download is: bytes, rate, and the time that is left.

Rules of this file:
1. Pure: time is a number. The rate is that of the last WINDOW_S, so that it follows a donor that died.
2. The line for a terminal fits in its width, and is ASCII.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 5.0
BAR_MOST = 30
FIXED = 44
"""Characters of a line beside its bar, at most."""


class TransferProgress:
    """Of ``total_bytes``."""

    def __init__(self, total_bytes: int, now: float) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.began_at = now
        self._points: deque[tuple[float, int]] = deque([(now, 0)])
        """Time and bytes until then: one before the window, the others in it."""

    def add(self, count: int, now: float) -> None:
        """So many more bytes are here."""
        self.done_bytes += count
        self._points.append((now, self.done_bytes))
        while len(self._points) > 2 and self._points[1][0] <= now - WINDOW_S:
            self._points.popleft()

    @property
    def share(self) -> float:
        """Of the bytes that are here."""
        return min(1.0, self.done_bytes / self.total_bytes) if self.total_bytes else 1.0

    def bytes_per_s(self, now: float) -> float:
        """Of late."""
        began, before = self._points[0]
        return (self.done_bytes - before) / max(now - began, 1e-3)

    def left_s(self, now: float) -> float | None:
        """Until the rest is here at this rate; None: nothing comes."""
        left = max(0, self.total_bytes - self.done_bytes)
        rate = self.bytes_per_s(now)
        return 0.0 if not left else left / rate if rate > 0 else None

    def line(self, now: float, width: int) -> str:
        """``[=====     ]  48 % of 800.0 MB, 114.2 MB/s, 0:04 left``, in at most ``width`` characters."""
        left_s = self.left_s(now)
        text = (
            f" {self.share:4.0%} of {self.total_bytes / 1e6:.1f} MB, {self.bytes_per_s(now) / 1e6:.1f} MB/s, "
            f"{'stalled' if left_s is None else clock(left_s) + ' left'}"
        )
        room = min(BAR_MOST, width - max(FIXED, len(text)) - 2)
        if room < 5:
            return text.strip()[: max(0, width)]
        filled = round(self.share * room)
        return f"[{'=' * filled}{' ' * (room - filled)}]{text}"

    def fields(self, now: float) -> dict[str, object]:
        """For the log and for the event log."""
        left_s = self.left_s(now)
        return {
            "done_mb": round(self.done_bytes / 1e6, 1),
            "of_mb": round(self.total_bytes / 1e6, 1),
            "mb_per_s": round(self.bytes_per_s(now) / 1e6, 2),
            "left_s": None if left_s is None else round(left_s, 1),
        }


def clock(seconds: float) -> str:
    """``0:07``, ``1:02:09``."""
    minutes, rest = divmod(round(min(seconds, 359_999.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
