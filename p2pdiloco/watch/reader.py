"""Event logs read as they grow, and told again as they went (``p2pdiloco events``).

Rules of this file:
1. Nothing is kept but the part of a line that is not written to its end, and of that at most ``LONGEST_LINE``.
2. A log that is moved aside is read to its end before the new one; what cannot be read is left out.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from p2pdiloco.util.files import older
from p2pdiloco.util.logs import short
from p2pdiloco.watch.playback import LoggedEvent, lines, logs_below, sourced
from p2pdiloco.watch.sentences import Line, detail, plain, sentence
from p2pdiloco.watch.words import clock

LONGEST_LINE = 1 << 20
SLICE = 1 << 20


class Choice(NamedTuple):
    """Which events are wanted. ``kinds`` empty: all; ``peer``: the end of the id of who tells; times: Unix."""

    kinds: Collection[str] = ()
    peer: str = ""
    since: float = 0.0

    def has(self, event: LoggedEvent) -> bool:
        """Whether this one is."""
        is_kind = not self.kinds or event.line.get("event") in self.kinds
        return is_kind and event.source.endswith(self.peer) and event.at >= self.since


class Tail:
    """A log from its present end on."""

    def __init__(self, log: Path, *, from_begin: bool = False) -> None:
        """``from_begin``: it came while we looked."""
        self._log = log
        self._file: BinaryIO | None = None
        self._rest = b""
        self._open()
        self.began = 0 if from_begin else self._skip()
        """Bytes of the log before it."""

    def _open(self) -> None:
        with suppress(OSError):
            self._file = open(self._log, "rb")  # noqa: SIM115 (closed in close)

    def _skip(self) -> int:
        """To the end of the last whole line."""
        if self._file is None:
            return 0
        begins = max(0, self._file.seek(0, os.SEEK_END) - LONGEST_LINE)
        self._file.seek(begins)
        return self._file.seek(begins + self._file.read(LONGEST_LINE).rfind(b"\n") + 1)

    def new(self) -> list[Line]:
        """What was written since."""
        found = self._read()
        if self._is_moved_aside():
            self.close()
            self._open()
            found += self._read()
        return found

    def close(self) -> None:
        """No more."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def _is_moved_aside(self) -> bool:
        with suppress(OSError):
            now = self._log.stat()
            if self._file is None:
                return True
            mine = os.fstat(self._file.fileno())
            return (now.st_ino, now.st_dev) != (mine.st_ino, mine.st_dev) or now.st_size < self._file.tell()
        return False

    def _read(self) -> list[Line]:
        found: list[Line] = []
        while self._file is not None and (data := self._file.read(SLICE)):
            *whole, rest = (self._rest + data).split(b"\n")
            self._rest = rest if len(rest) <= LONGEST_LINE else b""
            for raw in whole:
                with suppress(ValueError, RecursionError):
                    found.append(msgspec.json.decode(raw, type=dict))
        return found


class Tails:
    """Of all logs below a folder, also of those that come."""

    def __init__(self, folder: Path) -> None:
        """Raises:
        RecordingError: there is none.
        """
        self._folder = folder
        self._tails = {log: Tail(log) for log in logs_below(folder)}
        self._sources = {log: _source(log) for log in self._tails}

    def before(self) -> Iterator[LoggedEvent]:
        """What the logs held, in the order of its time; each log's own order stays."""
        each = (sourced(lines(log, ends=tail.began), self._sources[log]) for log, tail in self._tails.items())
        return heapq.merge(*each, key=lambda event: event.at)

    def new(self) -> list[LoggedEvent]:
        """What was written since, in the order of its time."""
        for log in logs_below(self._folder):
            if log not in self._tails:
                self._tails[log], self._sources[log] = Tail(log, from_begin=True), log.parent.name
        found: list[LoggedEvent] = []
        for log, tail in self._tails.items():
            told = list(sourced(tail.new(), self._sources[log]))
            found += told
            if told:
                self._sources[log] = told[-1].source
        return sorted(found, key=lambda event: event.at)


def told(event: LoggedEvent) -> str:
    """One line for people."""
    kind = plain(event.line.get("event", ""))
    try:
        news = sentence(event.line)
        text = detail(event.line) if news is None else news.text
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        text = None
    if text is None:  # of a kind that a later release has, or damaged
        fields = {name: value for name, value in event.line.items() if name not in ("time", "event")}
        text = plain(" ".join(f"{name}={value}" for name, value in fields.items()))
    return f"{clock(event.at)}  {plain(short(event.source)):<8}{kind:<18}{text}"


def _source(log: Path) -> str:
    """Who writes it."""
    for path in (log, *reversed(older(log))):
        source = ""
        with suppress(OSError), open(path, "rb") as file:
            for raw in file:
                if b'"started"' in raw:
                    with suppress(ValueError, RecursionError):
                        source = str(msgspec.json.decode(raw, type=dict).get("peer") or source)
        if source:
            return source
    return log.parent.name
