"""Lays out a snapshot for ``p2pdiloco watch``, panel by panel, as styled text for textual. Pure functions.

Rules of this file:
1. Numbers are taken from the snapshot as they are, so that the page shows the same.
2. Text of other peers goes through ``plain``: it cannot move the cursor, change colours, or begin a line.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from textual.content import Content

from p2pdiloco.observability.event_schema import plain
from p2pdiloco.observability.formatting import amount, clock, duration, loss, percent, volume
from p2pdiloco.observability.snapshot import Headline, History, PeerRow, Point, RunSnapshot
from p2pdiloco.util.logs import short

# -- Text charts -------------------------------------------------------------------------------------------------------
# Curves, bars and lanes in characters.


BRAILLE = 0x2800
# Bits of the dots of a braille character: four rows of two.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BARS = " ▁▂▃▄▅▆▇█"
# Characters left of a curve, for the axis labels.
LABEL = 7
# Maximum number of points of the training loss that are drawn.
SMOOTHED = 80

# With more peers that joined or left than this, the marks are drawn on the axis only.
CROWD = 8

# Style of a character: ``main``, ``second``, ``good``, ``warning`` or ``quiet``; "": empty.
Kind = str


class Cell(NamedTuple):
    """One character and its style."""

    letter: str
    kind: Kind


Line = list[Cell]
EMPTY = Cell(" ", "")


def curve(history: History, width: int, height: int, *, over_time: bool) -> list[Line]:
    """Draw the held-out loss and the training loss, with marks where peers came and went. No lines: nothing is measured
    yet, or there is no room."""
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
                canvas.draw_vertical(column, _tone(mark))
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
    ends = say(low) + say(high).rjust(max(0, columns - len(say(low))))
    lines.append([Cell(letter, "quiet") for letter in " " * LABEL + ends])
    return lines


def lane(given: Sequence[int], columns: int, width: int, most: float) -> str:
    """Draw the tokens that a peer gave in each of ``columns`` columns of time as small bars; ``most``: tokens of the
    tallest column of any peer."""
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
    """Return at most ``most`` points, each with the mean value of neighbouring ``points``."""
    size = max(1, math.ceil(len(points) / most))
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[-1][0], part[-1][1], sum(p[2] for p in part) / len(part)) for part in parts]


class _Canvas:
    """A canvas of braille characters, eight dots each."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._dots: dict[tuple[int, int], int] = {}
        self._kinds: dict[tuple[int, int], Kind] = {}
        self._verticals: dict[int, Kind] = {}

    def draw_vertical(self, column: int, kind: Kind) -> None:
        """Draw a vertical line where nothing else is drawn."""
        self._verticals[column] = kind

    def draw(self, places: list[tuple[float, float]], kind: Kind) -> None:
        """Draw a line through ``places``, in dots from the left and from the top, above what is drawn already."""
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
        return [
            Cell(chr(BRAILLE + self._dots[row, column]), self._kinds[row, column])
            if (row, column) in self._dots
            else Cell("┊", self._verticals[column])
            if column in self._verticals
            else EMPTY
            for column in range(self._columns)
        ]


def _tone(mark: Headline) -> Kind:
    return "good" if mark.level == "good" else "warning"


def _tokens_at(points: list[Point], at: float) -> float:
    """Tokens merged by the time ``at``, by the points before it."""
    before = [p for p in points if p[1] <= at]
    return max((p[0] for p in before), default=-1.0)


# -- Panels of the terminal view ---------------------------------------------------------------------------------------


STYLES = {
    "main": "$primary",
    "second": "$secondary",
    "good": "$success",
    "warning": "$warning",
    "error": "$error",
    "quiet": "$text-muted",
    "info": "",
    "": "",
}
RUNNING = ("training", "following")
OVER = ("finished", "done", "ended")
# Characters for a peer's lane.
LANE_LEAST, LANE_MOST = 10, 60
MERGES_SHOWN = 8
SAMPLE_LINES = 12

# Text and style.
Part = tuple[str, str]


def heading(picture: RunSnapshot, pulse: str, is_lost: bool, width: int) -> Content:
    """Lay out the run's name, what this peer does, and whether it answers."""
    title, phase = picture.title, plain(picture.course.phase)
    size = f"{amount(title.parameters)} parameters · " if title.parameters else ""
    left = [(f" {plain(title.name)}", "bold"), (f"  run {plain(title.run)[:12]} · ", STYLES["quiet"])]
    left.append((f"{size}seen by {plain(short(title.me))}", STYLES["quiet"]))
    tone = "good" if phase in RUNNING else "main" if phase in OVER else "warning"
    right = [(f"{phase}  ", f"bold {STYLES[tone]}"), ("● ", STYLES["error" if is_lost else "good"]), (f"{pulse} ", "")]
    return _apart(left, right, width)


def progress(picture: RunSnapshot) -> tuple[float, Content]:
    """Return the fraction that is done of the run (or of the recording), and a line with the step and the time left."""
    course = picture.course
    done, told = course.done, f"step {course.step:,}" + (f" of {course.total_steps:,}" if course.total_steps else "")
    if course.left_s is not None and course.phase not in OVER:
        told += f" · {duration(course.left_s)} left"
    if picture.playback is not None:
        tape = picture.playback
        told += f" · {duration(picture.at - tape.begins)} of {duration(tape.ends - tape.begins)}"
        if done is None:
            done = (picture.at - tape.begins) / max(1e-9, tape.ends - tape.begins)
    return done or 0.0, Content(f" {percent(done):>7}  {told} ")


def cards(picture: RunSnapshot) -> list[tuple[str, str, str]]:
    """Return title, number and footnote of each card."""
    course, count, link, costs = picture.course, picture.headcount, picture.link, picture.costs
    mine = next((row for row in picture.peers if row.is_me), None)
    gave = f"this machine {percent(mine.share)}" if mine and mine.share > 0 else "none from this one"
    below = f"{volume(link.up_bytes)} in all"
    if link.up_budget:
        below = f"{percent(min(1.0, link.up_per_s / link.up_budget), 0)} of {volume(link.up_budget)}/s"
    spent = costs.compute_s + costs.overhead_s
    held = "not measured yet" if course.held_out_loss is None else f"at step {course.held_out_step:,}"
    return [
        ("held-out loss", loss(course.held_out_loss), held),
        ("tokens in the model", amount(course.tokens_merged), gave),
        ("tokens/s, all peers", amount(course.swarm_tokens_per_s), f"this machine {amount(course.tokens_per_s)}"),
        (
            "peers live",
            str(count.live),
            f"{count.participating} {'train' + 's' * (count.participating == 1)}, {count.weight_averaged} merged",
        ),
        ("sending", f"{volume(link.up_per_s)}/s", below),
        (
            "overhead",
            percent(costs.overhead_s / spent) if spent else "-",
            f"node {percent(costs.node_cpu_s / spent)} of a core" if spent else "no steps here yet",
        ),
    ]


def card(told: tuple[str, str, str]) -> Content:
    """Lay out one card."""
    what, number, below = told
    parts = (f"{what}\n", STYLES["quiet"]), (f"{number}\n", "bold"), (below, STYLES["quiet"])
    return Content.assemble(*parts)


def losses(history: History, width: int, height: int, *, over_time: bool) -> Content:
    """Lay out the loss curves with their legend."""
    lines = curve(history, width, height - 1, over_time=over_time)
    if not lines:
        return Content.styled("no loss has been measured yet", STYLES["quiet"])
    parts: list[Part] = []
    for line in lines:
        for kind, cells in groupby(line, key=lambda cell: cell.kind):
            parts.append(("".join(cell.letter for cell in cells), STYLES[kind]))
        parts.append(("\n", ""))
    parts += [("       ━ ", STYLES["main"]), ("held out   ", ""), ("━ ", STYLES["second"]), ("training", "")]
    return Content.assemble(*parts)


def headlines(picture: RunSnapshot, width: int, height: int) -> Content:
    """Lay out the headlines, newest first."""
    parts: list[Part] = []
    for told in picture.headlines[:height]:
        parts.append((f"{clock(told.at)} ", STYLES["quiet"]))
        parts.append((_fit(plain(told.text), width - 9) + "\n", STYLES.get(told.level, "")))
    return Content.assemble(*(parts or [("nothing yet", STYLES["quiet"])]))


class Column(NamedTuple):
    """A column of a table."""

    name: str
    width: int
    is_number: bool = False
    least_room: int = 0
    """Least width of the table that shows this column."""


PEER_COLUMNS = (
    Column("peer", 8),
    Column("role", 10),
    Column("share", 8, True),
    Column("gave", 0),
    Column("tokens/s", 9, True),
    Column("loss", 7, True, 70),
    Column("versions", 11, True, 84),
    Column("merged", 7, True, 96),
    Column("sent", 10, True, 112),
    Column("connected", 24, False, 124),
    Column("trip", 8, True, 136),
)


def peers(picture: RunSnapshot, history: History, width: int) -> Content:
    """Lay out a row for each peer, with the tokens that it gave over time."""
    shown = [column for column in PEER_COLUMNS if column.least_room <= width]
    if not any(row.reach for row in picture.peers):  # a recording
        shown = [column for column in shown if column.name != "trip"]
    fixed = sum(column.width + 1 for column in shown if column.width)
    room = max(LANE_LEAST, min(LANE_MOST, width - fixed - 4))
    given = {row.peer: row.given for row in history.lanes}
    columns = max((len(row) for row in given.values()), default=0)
    most = max((max(row, default=0) for row in given.values()), default=0)
    parts: list[Part] = [("   ", "")]
    parts += [(_cell(c.name, c.width or room, c.is_number), STYLES["quiet"]) for c in shown]
    for row in picture.peers:
        parts += [("\n", ""), (" ● ", hue(row.peer) if row.is_live else STYLES["quiet"])]
        words = _peer_words(row, picture.at, lane(given.get(row.peer, ()), columns, room, most))
        for column in shown:
            text, style = words[column.name]
            parts.append((_cell(text, column.width or room, column.is_number), style))
    return Content.assemble(*parts)


def _peer_words(row: PeerRow, at: float, gave: str) -> dict[str, Part]:
    words, reach = row.words, row.reach
    normal = "" if row.is_live else STYLES["quiet"]
    gone = "ended" if row.is_me else "left"
    role = gone if not row.is_live else "trains" if row.is_participating else "follows"
    if row.is_live and words is not None and words.phase != "training":
        role = plain(words.phase)
    way = ""
    if reach is not None:
        way = f"{plain(reach.how)}, {duration(at - reach.since)}"
    elif row.is_me:
        way = "this machine"
    elif not row.is_live and row.seen:
        way = f"{duration(at - row.seen)} ago"
    trip = "-" if reach is None or reach.round_trip_s is None else f"{1000 * reach.round_trip_s:.1f} ms"
    has_trouble = words is not None and words.trouble
    versions = "-"
    if words is not None:
        least, most = words.version_min, words.version_max
        versions = str(most) if least == most else f"{least}-{most}"
    return {
        "peer": (plain(short(row.peer)), "bold" if row.is_me else normal),
        "role": ("! " + role if has_trouble else role, STYLES["error"] if has_trouble else normal),
        "share": (percent(row.share), normal),
        "gave": (gave, STYLES["main"] if row.is_live else STYLES["quiet"]),
        "tokens/s": ("-" if words is None else amount(words.tokens_per_s), normal),
        "loss": ("-" if words is None else loss(words.loss), normal),
        "versions": (versions, normal),
        "merged": (str(row.commits), normal),
        "sent": ("-" if words is None else volume(words.up_bytes), normal),
        "connected": (way, STYLES["quiet"]),
        "trip": ("" if row.is_me else trip, normal),
    }


def merges(picture: RunSnapshot) -> Content:
    """Lay out the latest merges."""
    parts: list[Part] = [("when      shard  version  merged by  learners     tokens", STYLES["quiet"])]
    for row in picture.merges[:MERGES_SHOWN]:
        parts.append((f"\n{clock(row.at)}  {row.shard:>5}  {row.version:>7}  ", ""))
        parts += [("● ", hue(row.owner)), (f"{plain(short(row.owner)):<9}", "")]
        parts.append((f"{row.contributors:>8} {row.tokens:>10,}", ""))
    return Content.assemble(*parts)


def counted(picture: RunSnapshot, width: int) -> Content:
    """Lay out the counts of events, and the newest sample of the model."""
    parts: list[Part] = []
    for what, number in list(picture.counts.items())[:SAMPLE_LINES]:
        parts.append((f"{number:>6}  {_fit(plain(what), width - 8)}\n", ""))
    if picture.sample is not None:
        parts.append((f"the model writes, at step {picture.sample.step:,}\n", STYLES["quiet"]))
        lines = picture.sample.text.splitlines()[:SAMPLE_LINES]
        parts += [(_fit(plain(line), width) + "\n", "") for line in lines]
    return Content.assemble(*(parts or [("no fork, no refusal, no fault", STYLES["quiet"])]))


def hue(peer: str) -> str:
    """Return the peer's colour, the same as on the page."""
    number = 0
    for letter in peer[-8:]:
        number = (number * 31 + ord(letter)) & 0xFFFFFFFF
    red, green, blue = colorsys.hls_to_rgb(number % 360 / 360, 0.5, 0.55)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _cell(text: str, width: int, is_number: bool) -> str:
    fitted = _fit(text, width)
    return (fitted.rjust(width) if is_number else fitted.ljust(width)) + " "


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _apart(left: Sequence[Part], right: Sequence[Part], width: int) -> Content:
    """Lay out ``left`` and ``right`` at the ends of one line."""
    room = max(0, width - sum(len(text) for text, _ in right))
    kept: list[Part] = []
    for text, style in left:
        fitted = _fit(text, room)
        room -= len(fitted)
        kept.append((fitted, style))
    return Content.assemble(*kept, " " * room, *right)
