"""Event logs as they lie on the disk: read back into a chronicle, and played like a peer that lives.

Rules of this file:
1. A log may be torn, rotated or hostile: what cannot be read is left out, and only the newest ``MOST_BYTES`` are read.
2. The logs of several peers of one run are one story; commits that all of them tell count once (``chronicle``).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from p2pdiloco.protocol.ids import RunId, digest_of
from p2pdiloco.protocol.manifest import MANIFEST, Layout, Manifest
from p2pdiloco.protocol.manifest_validation import decode_manifest
from p2pdiloco.util.files import older
from p2pdiloco.watch.chronicle import Chronicle
from p2pdiloco.watch.picture import History, Picture, Playback, Title
from p2pdiloco.watch.sentences import Line

LOG = "metrics.jsonl"
MOST_BYTES = 128 << 20
"""Of one peer's log."""
MOST_LOGS = 1024
DEPTHS = ("", "*/", "*/*/", "*/*/*/")
"""Where logs are looked for below a folder: a run's, a peer's, a swarm's."""
SPEEDS = (0.0, 10_000.0)
NOTHING = (
    "no peer has logged anything below {}: name a state folder, a run's folder in it, or the folder of a demo or a "
    "chaos run"
)


class RecordingError(ValueError):
    """There is nothing to play; the message says what to do."""


def logs_below(folder: Path) -> list[Path]:
    """All event logs of a folder.

    Raises:
        RecordingError: there is none.
    """
    found = sorted({log for depth in DEPTHS for log in folder.glob(depth + LOG)})[:MOST_LOGS]
    if not found:
        raise RecordingError(NOTHING.format(folder))
    return found


def lines(log: Path, most_bytes: int = MOST_BYTES, ends: float = math.inf) -> Iterator[Line]:
    """Of a log with what was moved aside, the oldest of the newest ``most_bytes`` first; of the newest file
    nothing that begins at ``ends`` or later."""
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
        with open(path, "rb") as file:
            file.seek(begins[path])
            at = begins[path]
            for raw in file:
                if path == log and at >= ends:
                    break
                at += len(raw)
                try:
                    yield decoder.decode(raw)
                except (ValueError, RecursionError):
                    continue  # torn by a kill, a full disk, or our seek


class LoggedEvent(NamedTuple):
    """An event, and the peer whose log it is from."""

    at: float
    source: str
    line: Line


class Recording:
    """What the peers of one run have logged below a folder."""

    def __init__(self, folder: Path) -> None:
        """Read everything.

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

    def chronicle(self) -> Chronicle:
        """An empty one of this run."""
        layout = self._layout
        title = Title(run=self.run, name=self.name, me=self.me, parameters=0 if layout is None else layout.elements)
        return Chronicle(title, [] if layout is None else [s.elements for s in layout.shards], self._total_steps)


class Player:
    """A recording from some moment on, as it would have looked. ``clock``: seconds of the looker's time."""

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
        """Tell what has happened by now; the moment."""
        recording = self._recording
        moment = min(recording.ends, self._at + (self._clock() - self._began) * self._speed)
        while self._next < len(recording.events) and recording.events[self._next].at <= moment:
            event = recording.events[self._next]
            self._chronicle.take(event.line, event.source)
            self._next += 1
        return moment

    def picture(self) -> Picture:
        """Of the moment that is played."""
        moment, recording = self._look(), self._recording
        playback = Playback(begins=recording.begins, ends=recording.ends, speed=self._speed)
        return msgspec.structs.replace(self._chronicle.picture(moment), playback=playback)

    def history(self) -> History:
        """What led to it."""
        return self._chronicle.history()

    @property
    def mark(self) -> int:
        """Of the history."""
        return self._chronicle.mark


def player(recording: Recording, query: Mapping[str, str], speed: float) -> Player:
    """What a looker asks for: ``at`` (Unix time) and ``speed`` (0: it stands still).

    Raises:
        ValueError: they are no numbers.
    """
    at, asked = float(query.get("at", recording.begins)), float(query.get("speed", speed))
    if not (at == at and SPEEDS[0] <= asked <= SPEEDS[1]):
        raise ValueError(f"at: a Unix time; speed: {SPEEDS[0]:g} to {SPEEDS[1]:g}")
    return Player(recording, at, asked)


def sourced(told: Iterable[Line], source: str) -> Iterator[LoggedEvent]:
    """Lines of a log with who told them: ``source``, until the log says who."""
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
            data = path.read_bytes()
            if digest_of(data) == run or not run:
                return decode_manifest(data, RunId(digest_of(data)))
        except (OSError, ValueError):
            continue
    return None
