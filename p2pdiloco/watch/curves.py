"""Bounded memories of an unbounded run: curves that thin out, lanes whose columns widen.

Rule of this file: however long a run is, what is kept covers all of it, in at most so many points or columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

MOST_POINTS = 400
MOST_COLUMNS = 160
FIRST_COLUMN_S = 1.0
MOST_LANES = 256
"""Peers of a run; of more those that came first are shown."""

Point = tuple[float, float, float]


class Curve:
    """Points in the order of their time; when there are too many, each second one goes, and from then on each second
    one that comes, and so on."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._points: list[Point] = []
        self._last: Point | None = None
        self._most = most
        self._stride = 1
        self._seen = 0

    def add(self, tokens: float, at: float, value: float) -> None:
        """One more. What is not finite is no point."""
        if not (math.isfinite(tokens) and math.isfinite(at) and math.isfinite(value)):
            return
        self._last = (tokens, at, value)
        if self._seen % self._stride == 0:
            self._points.append(self._last)
        self._seen += 1
        if len(self._points) >= self._most:
            self._points = self._points[::2]
            self._stride *= 2

    def __iter__(self) -> Iterator[Point]:
        yield from self._points
        if self._last is not None and self._points[-1] is not self._last:
            yield self._last

    def __len__(self) -> int:
        return len(self._points)


class LaneBook:
    """Of each peer what it gave and what it merged, in columns of equal time. When the columns do not reach any more,
    two become one."""

    def __init__(self) -> None:
        self.began = 0.0
        self.column_s = FIRST_COLUMN_S
        self.lanes: dict[str, tuple[list[int], list[int]]] = {}

    def column(self, at: float) -> int:
        """Of a time; the columns are made to reach it."""
        if not self.began:
            self.began = at
        while at - self.began >= self.column_s * MOST_COLUMNS:
            self.column_s *= 2
            for lanes in self.lanes.values():
                for lane in lanes:
                    lane[:] = [sum(lane[i : i + 2]) for i in range(0, len(lane), 2)]
        return max(0, int((at - self.began) / self.column_s))

    def gave(self, peer: str, at: float, tokens: int) -> None:
        """Tokens of a peer were merged."""
        self._add(peer, 0, at, tokens)

    def merged(self, peer: str, at: float) -> None:
        """A peer has merged a version."""
        self._add(peer, 1, at, 1)

    def _add(self, peer: str, which: int, at: float, amount: int) -> None:
        column = self.column(at)
        if peer not in self.lanes:
            if len(self.lanes) >= MOST_LANES:
                return
            self.lanes[peer] = ([], [])
        lane = self.lanes[peer][which]
        lane.extend([0] * (column + 1 - len(lane)))
        lane[column] += amount
