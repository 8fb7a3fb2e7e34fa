"""Curves, bars and lanes in letters. Pure: numbers in, lines of text out; colours are the terminal's.

Rule of this file: whatever comes is drawn in exactly the room that is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from p2pdiloco.watch.picture import Headline, History, Point
from p2pdiloco.watch.words import amount, duration

BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Of a letter four rows of two."""
BARS = " ▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉█"
LABEL = 7
"""Letters left of a curve."""
SMOOTHED = 80
"""Points of the training loss that are drawn."""

CROWD = 8
"""Of more comings and goings only the axis tells."""

Kind = str
"""``main``, ``second``, ``good``, ``error``, ``quiet``: what a letter belongs to; "": empty."""


class Cell(NamedTuple):
    """One letter."""

    letter: str
    kind: Kind


Line = list[Cell]
EMPTY = Cell(" ", "")


def curve(history: History, width: int, height: int, *, over_time: bool) -> list[Line]:
    """The held-out loss and the training loss, with who came and went; nothing measured yet: no lines."""
    held, train = list(history.held_out), thinned(history.train, SMOOTHED)
    points = held + train
    if not points or width < LABEL + 8 or height < 4:
        return []
    pick = 1 if over_time else 0
    low, high = min(p[pick] for p in points), max(p[pick] for p in points)
    least, most = min(p[2] for p in points), max(p[2] for p in points)
    high, pad = max(high, low + 1e-9), max((most - least) * 0.06, 1e-3)
    least, most = max(0.0, least - pad), most + pad
    columns, rows = width - LABEL, height - 2
    canvas = _Canvas(columns, rows)

    def place(point: Point) -> tuple[float, float]:
        across = (point[pick] - low) / (high - low) * (2 * columns - 1)
        return across, (most - point[2]) / (most - least) * (4 * rows - 1)

    axis = [Cell("─", "quiet")] * columns
    for mark in history.marks:
        at = mark.at if over_time else _tokens_at(points, mark.at)
        if low <= at <= high:
            column = int((at - low) / (high - low) * (columns - 1))
            axis[column] = Cell("┴", _tone(mark))
            if len(history.marks) <= CROWD:
                canvas.stand(column, _tone(mark))
    canvas.draw([place(p) for p in train], "second")
    canvas.draw([place(p) for p in held], "main")
    lines = []
    for row in range(rows):
        is_told = row in (0, rows - 1) or (rows >= 7 and row == rows // 2)
        label = (
            f"{most - (row + 0.5) / rows * (most - least):>{LABEL - 2}.2f} ┤" if is_told else " " * (LABEL - 1) + "│"
        )
        lines.append([*(Cell(letter, "quiet") for letter in label), *canvas.row(row)])
    lines.append([*(Cell(letter, "quiet") for letter in " " * (LABEL - 1) + "╰"), *axis])
    say: Callable[[float], str] = (lambda x: duration(x - low)) if over_time else amount
    lines.append([Cell(letter, "quiet") for letter in " " * LABEL + _ends(say(low), say(high), columns)])
    return lines


def bar(share: float, width: int) -> str:
    """Of a share, 0 to 1, in eighths of letters."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)[:width]


def lane(given: Sequence[int], columns: int, width: int, most: float) -> str:
    """What a peer gave in ``columns`` columns of time, as small bars; ``most``: of a column of any peer."""
    if columns <= 0 or width <= 0:
        return " " * max(0, width)
    width_of = max(columns / width, 1.0)
    letters = []
    for at in range(min(width, columns)):
        begins, ends = int(at * width_of), max(int(at * width_of) + 1, int((at + 1) * width_of))
        amounts = given[begins:ends]
        tallest = max(amounts, default=0)
        letters.append(BARS[max(1, round(8 * min(1.0, tallest / most)))] if tallest > 0 and most > 0 else " ")
    return "".join(letters).ljust(width)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many, each the mean of its neighbours' values."""
    size = max(1, math.ceil(len(points) / most))
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[-1][0], part[-1][1], sum(p[2] for p in part) / len(part)) for part in parts]


class _Canvas:
    """Letters of eight dots each."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._dots: dict[tuple[int, int], int] = {}
        self._kinds: dict[tuple[int, int], Kind] = {}
        self._stands: dict[int, Kind] = {}

    def stand(self, column: int, kind: Kind) -> None:
        """A line from top to bottom, where nothing is drawn."""
        self._stands[column] = kind

    def draw(self, places: list[tuple[float, float]], kind: Kind) -> None:
        """Through places in dots, from the left and from the top; what is drawn later lies above."""
        if len(places) == 1:
            self._dot(*places[0], kind)
        for (x0, y0), (x1, y1) in pairwise(places):
            steps = max(1, int(max(abs(x1 - x0), abs(y1 - y0))))
            for step in range(steps + 1):
                self._dot(x0 + (x1 - x0) * step / steps, y0 + (y1 - y0) * step / steps, kind)

    def _dot(self, x: float, y: float, kind: Kind) -> None:
        across = min(2 * self._columns - 1, max(0, round(x)))
        down = min(4 * self._rows - 1, max(0, round(y)))
        cell = (down // 4, across // 2)
        if self._kinds.get(cell) != kind:
            self._dots[cell] = 0
        self._dots[cell] |= DOTS[down % 4][across % 2]
        self._kinds[cell] = kind

    def row(self, row: int) -> Line:
        """One line of letters."""
        return [
            Cell(chr(BRAILLE + self._dots[row, column]), self._kinds[row, column])
            if (row, column) in self._dots
            else Cell("┊", self._stands[column])
            if column in self._stands
            else EMPTY
            for column in range(self._columns)
        ]


def _tone(mark: Headline) -> Kind:
    return "good" if mark.level == "good" else "error"


def _tokens_at(points: list[Point], at: float) -> float:
    """Merged by then, by the points around."""
    before = [p for p in points if p[1] <= at]
    return max((p[0] for p in before), default=-1.0)


def _ends(left: str, right: str, width: int) -> str:
    return left + right.rjust(max(0, width - len(left)))
