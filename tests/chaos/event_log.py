"""The log of a chaos run while it runs: lines of ``happened.jsonl`` for the judge, and its status for a person."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self, TextIO

import msgspec

LOOK_S = 0.5
"""Between two looks into the peers' event logs."""

What = Literal[
    "began",
    "launched",
    "struck",
    "undone",
    "skipped",
    "back",
    "ended",
    "twin",
    "settling",
    "settled",
    "leaving",
    "over",
]


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``happened.jsonl``."""

    time: float
    """Unix time."""
    what: What
    peer: str = ""
    fault: int = 0
    """Number in the schedule, for struck, undone, skipped and twin."""
    status: int | None = None
    """Exit status, for ended and twin (None: it had not ended)."""
    is_expected: bool = True
    """Whether a peer that ended was killed or asked to leave."""
    text: str = ""
    """A description of the fault, or why a twin ended."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the run, for a person."""

    phase: str
    seconds: float
    """Since all peers trained."""
    peers: tuple[tuple[str, str], ...]
    """Name and state of each."""
    version: int
    last: str
    """The last fault."""


class Diary:
    """Writes happenings of a run to a file with their times, and reports its status. A context manager."""

    def __init__(self, path: Path, tell: Callable[[Status], None]) -> None:
        self._path = path
        self._tell = tell
        self._file: TextIO
        self._began = time.monotonic()
        self._looked_at = 0.0
        self.phase = "starting"
        self.last = "nothing yet"

    def __enter__(self) -> Self:
        self._file = open(self._path, "w", buffering=1)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self) -> None:
        """Time counts from here."""
        self._began, self._looked_at = time.monotonic(), 0.0
        self.note("began")

    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def note(self, what: What, **fields: Any) -> None:
        """Write a line."""
        line = Happening(time=round(time.time(), 3), what=what, **fields)
        self._file.write(msgspec.json.encode(line).decode() + "\n")

    def is_due(self) -> bool:
        """Whether it is time for another look at the peers' event logs."""
        is_due = self.now() - self._looked_at >= LOOK_S
        if is_due:
            self._looked_at = self.now()
        return is_due

    def tell(self, peers: tuple[tuple[str, str], ...], version: int) -> None:
        """Report the status of the run. ``peers``: name and state."""
        self._tell(Status(phase=self.phase, seconds=self.now(), peers=peers, version=version, last=self.last))
