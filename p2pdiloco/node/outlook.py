"""How long a run will take, and how much of it is done here, by what was seen in the last minute."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from p2pdiloco.wire.bodies import PeerStatus

WINDOW = 12
"""Looks that are remembered."""
FEWEST = 3
LONGEST_S = 3650 * 86400.0
"""Who never says how many steps a run has (a script) is told nothing of its end."""


class _Look(NamedTuple):
    now: float
    step: int
    trained: int
    merged: int


class Outlook:
    """Looks at one peer's status."""

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque(maxlen=WINDOW)

    def look(self, now: float, status: PeerStatus) -> dict[str, str]:
        """Percent done, time left, this peer's share of what is merged, each where it is known. ``now``: seconds."""
        self._looks.append(_Look(now, status.step, status.tokens_trained, status.tokens_merged))
        first, last = self._looks[0], self._looks[-1]
        told = {}
        left_s = _left_s(first, last, status.total_steps)
        if left_s is None or left_s <= LONGEST_S:
            told["done"] = f"{min(1.0, status.step / max(1, status.total_steps)):.1%}"
        if left_s is not None and left_s <= LONGEST_S and len(self._looks) >= FEWEST:
            told["left"] = duration(left_s)
        merged, trained = last.merged - first.merged, last.trained - first.trained
        if len(self._looks) >= FEWEST and merged > 0 and trained >= 0:
            told["my_share"] = f"{min(1.0, trained / merged):.0%}"
        return told


def _left_s(first: _Look, last: _Look, total_steps: int) -> float | None:
    if last.step <= first.step or last.now <= first.now:
        return None
    return max(0, total_steps - last.step) * (last.now - first.now) / (last.step - first.step)


def duration(seconds: float) -> str:
    """For people: two units at most."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"
