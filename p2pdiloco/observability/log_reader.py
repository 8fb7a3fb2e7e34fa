"""Log reader: reads event logs from disk, follows them, and plays a recording back like a live peer.

Rules of this file:
1. A log may be torn, rotated or hostile. Unreadable lines are ignored, and only the newest ``MOST_BYTES`` are read.
2. The logs of several peers of one run are combined. A commit that several of them report counts once (``history``).
"""

from __future__ import annotations

import heapq
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from p2pdiloco.observability.event_schema import Line, detail, plain, sentence
from p2pdiloco.observability.formatting import clock
from p2pdiloco.observability.history import RunHistory
from p2pdiloco.observability.snapshot import History, Playback, RunSnapshot, Title
from p2pdiloco.protocol.ids import RunId, digest_of
from p2pdiloco.protocol.manifest import MANIFEST, Layout, Manifest
from p2pdiloco.protocol.manifest_validation import decode_manifest
from p2pdiloco.util.files import older, open_regular, read_regular
from p2pdiloco.util.logs import short

LOG = "metrics.jsonl"
# Limit for one peer's log.
MOST_BYTES = 128 << 20
MOST_LOGS = 1024
# Where logs are searched below a folder: that of a run, a peer, or a swarm.
DEPTHS = ("", "*/", "*/*/", "*/*/*/")
SPEEDS = (0.0, 10_000.0)
NOTHING = (
    "no peer has logged anything below {}: name a state folder, a run's folder in it, or the folder of a demo or a "
    "chaos run"
)


class RecordingError(ValueError):
    """There is nothing to play back. The message says what to do."""


def logs_below(folder: Path) -> list[Path]:
    """Return all event logs below a folder.

    Raises:
        RecordingError: there are none.
    """
    found = sorted({log for depth in DEPTHS for log in folder.glob(depth + LOG)})[:MOST_LOGS]
    if not found:
        raise RecordingError(NOTHING.format(folder))
    return found


def lines(log: Path, most_bytes: int = MOST_BYTES, ends: float = math.inf) -> Iterator[Line]:
    """Yield the newest ``most_bytes`` of a log and its rotated files, oldest line first.

    Lines of the newest file that begin at offset ``ends`` or later are left out.
    """
    files = [*older(log), log]
    room, begins = most_bytes, {}
    for path in reversed(files):
        size = path.stat().st_size if path.exists() else 0
        begins[path] = max(0, size - max(0, room))
        room -= size
    decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
    for path in files:
        if not path.exists():
            continue
        with open(path, "rb", opener=open_regular) as file:
            file.seek(begins[path])
            at = begins[path]
            for raw in file:
                if path == log and at >= ends:
                    break
                at += len(raw)
                try:
                    yield decoder.decode(raw)
                except (ValueError, RecursionError):
                    continue  # torn by a kill, by a full disk, or by the seek above


class LoggedEvent(NamedTuple):
    """An event, with the peer that logged it."""

    at: float
    source: str
    line: Line


class Recording:
    """The logged events of one run's peers below a folder."""

    def __init__(self, folder: Path) -> None:
        """Read all logs.

        Raises:
            RecordingError: there is no log, or nothing in it.
        """
        logs = logs_below(folder)
        told = [events for events in map(_read, logs) if events]
        if not told:
            raise RecordingError(NOTHING.format(folder))
        runs = Counter(run for events in told for run in [_run_of(events)])
        self.run = runs.most_common(1)[0][0]
        chosen = [events for events in told if _run_of(events) == self.run]
        self.events = sorted((event for events in chosen for event in events), key=lambda event: event.at)
        self.me = chosen[0][0].source
        self.begins, self.ends = self.events[0].at, self.events[-1].at
        manifest = next((m for log in logs if (m := _manifest(log.parent, self.run)) is not None), None)
        self.name = folder.name if manifest is None else manifest.config.name
        self._layout = None if manifest is None else Layout.of(manifest)
        self._total_steps = 0 if manifest is None else manifest.config.inner.steps

    def chronicle(self) -> RunHistory:
        """Return an empty history of this run."""
        layout = self._layout
        title = Title(run=self.run, name=self.name, me=self.me, parameters=0 if layout is None else layout.elements)
        return RunHistory(title, [] if layout is None else [s.elements for s in layout.shards], self._total_steps)


class Player:
    """Plays a recording from a given time on, as it would have looked live. ``clock`` returns the viewer's time in
    seconds."""

    def __init__(
        self, recording: Recording, at: float, speed: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._recording = recording
        self._clock = clock
        self._began, self._at, self._speed = clock(), min(max(at, recording.begins), recording.ends), speed
        self._chronicle = recording.chronicle()
        self._next = 0
        self._look()

    def _look(self) -> float:
        """Feed the events up to the present moment of the recording; return that moment."""
        recording = self._recording
        moment = min(recording.ends, self._at + (self._clock() - self._began) * self._speed)
        while self._next < len(recording.events) and recording.events[self._next].at <= moment:
            event = recording.events[self._next]
            self._chronicle.take(event.line, event.source)
            self._next += 1
        return moment

    def picture(self) -> RunSnapshot:
        """Return the snapshot of the present moment."""
        moment, recording = self._look(), self._recording
        playback = Playback(begins=recording.begins, ends=recording.ends, speed=self._speed)
        return msgspec.structs.replace(self._chronicle.picture(moment), playback=playback)

    def history(self) -> History:
        """Return the history up to the present moment."""
        return self._chronicle.history()

    @property
    def mark(self) -> int:
        """Changes whenever the history does."""
        return self._chronicle.mark


def player(recording: Recording, query: Mapping[str, str], speed: float) -> Player:
    """Return a player for a viewer's query: ``at`` (Unix time) and ``speed`` (0: paused).

    Raises:
        ValueError: they are not numbers, or out of range.
    """
    at, asked = float(query.get("at", recording.begins)), float(query.get("speed", speed))
    if not (at == at and SPEEDS[0] <= asked <= SPEEDS[1]):
        raise ValueError(f"at: a Unix time; speed: {SPEEDS[0]:g} to {SPEEDS[1]:g}")
    return Player(recording, at, asked)


def sourced(told: Iterable[Line], source: str) -> Iterator[LoggedEvent]:
    """Yield lines of a log with the peer that logged them: ``source``, until the log names it."""
    for line in told:
        at = line.get("time")
        if not isinstance(at, int | float):
            continue
        if line.get("event") == "started" and isinstance(line.get("peer"), str):
            source = line["peer"]
        yield LoggedEvent(float(at), source, line)


def _read(log: Path) -> list[LoggedEvent]:
    found = list(sourced(lines(log), ""))
    named = (found[-1].source if found else "") or str(log.parent)
    return [event if event.source else event._replace(source=named) for event in found]


def _run_of(events: list[LoggedEvent]) -> str:
    return next((str(e.line["run"]) for e in events if e.line.get("event") == "started" and "run" in e.line), "")


def _manifest(folder: Path, run: str) -> Manifest | None:
    for path in (folder / MANIFEST, folder / "checkpoint" / MANIFEST):
        try:
            data = read_regular(path)
            if digest_of(data) == run or not run:
                return decode_manifest(data, RunId(digest_of(data)))
        except (OSError, ValueError):
            continue
    return None


# -- Reading event logs ------------------------------------------------------------------------------------------------
# Follows event logs as they grow, and prints them (``p2pdiloco watch --events``).
# Rules of this section:
# 1. Only the beginning of an incomplete line is kept in memory, at most ``LONGEST_LINE`` of it.
# 2. A rotated log is read to its end before the new one. Unreadable lines are ignored.


LONGEST_LINE = 1 << 20
SLICE = 1 << 20


class Choice(NamedTuple):
    """Filter for events. ``kinds``: empty for all; ``peer``: the end of the logging peer's ID; ``since``: Unix time."""

    kinds: Collection[str] = ()
    peer: str = ""
    since: float = 0.0

    def has(self, event: LoggedEvent) -> bool:
        """Return whether the event passes the filter."""
        is_kind = not self.kinds or event.line.get("event") in self.kinds
        return is_kind and event.source.endswith(self.peer) and event.at >= self.since


class Tail:
    """Follows a log from its present end."""

    def __init__(self, log: Path, *, from_begin: bool = False) -> None:
        """``from_begin``: read the log from its beginning, because it appeared while others were followed."""
        self._log = log
        self._file: BinaryIO | None = None
        self._rest = b""
        self._open()
        self.began = 0 if from_begin else self._skip()
        # Offset of the log at which this tail begins.

    def _open(self) -> None:
        with suppress(OSError):
            self._file = open(self._log, "rb", opener=open_regular)  # noqa: SIM115 (closed in close)

    def _skip(self) -> int:
        """Seek to the end of the last complete line; return its offset."""
        if self._file is None:
            return 0
        begins = max(0, self._file.seek(0, os.SEEK_END) - LONGEST_LINE)
        self._file.seek(begins)
        return self._file.seek(begins + self._file.read(LONGEST_LINE).rfind(b"\n") + 1)

    def new(self) -> list[Line]:
        """Return the lines written since the last call."""
        found = self._read()
        if self._is_moved_aside():
            self.close()
            self._open()
            found += self._read()
        return found

    def close(self) -> None:
        """Close the file."""
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
    """Follows all logs below a folder, including new ones."""

    def __init__(self, folder: Path) -> None:
        """Find the logs.

        Raises:
            RecordingError: there are none.
        """
        self._folder = folder
        self._tails = {log: Tail(log) for log in logs_below(folder)}
        self._sources = {log: _source(log) for log in self._tails}

    def before(self) -> Iterator[LoggedEvent]:
        """Yield the events that were logged before, in order of time. Each log's own order is kept."""
        each = (sourced(lines(log, ends=tail.began), self._sources[log]) for log, tail in self._tails.items())
        return heapq.merge(*each, key=lambda event: event.at)

    def new(self) -> list[LoggedEvent]:
        """Return the events logged since the last call, in order of time."""
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


def describe(event: LoggedEvent) -> str:
    """Return an event as one line for people."""
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
    """Return the peer that writes a log."""
    for path in (log, *reversed(older(log))):
        source = ""
        with suppress(OSError), open(path, "rb", opener=open_regular) as file:
            for raw in file:
                if b'"started"' in raw:
                    with suppress(ValueError, RecursionError):
                        source = str(msgspec.json.decode(raw, type=dict).get("peer") or source)
        if source:
            return source
    return log.parent.name
