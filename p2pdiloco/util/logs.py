"""Structured logs: one event a line, as text for people or JSON for machines; and a terminal's status line.

Rules of this file:
1. A line has the time (UTC), the level, the short id of the peer that logs it, the logger, the event's name, and
   fields. In a terminal it has the time of day, the event's name, and fields.
2. Text of a remote peer is quoted and its control characters are escaped, so that it cannot forge a line. That includes
   those beyond ASCII: C1 controls, line separators, and marks that change the direction of writing.
3. It is built on the standard library's logging, so that hivemind, asyncio and warnings have the same format.

    log = logs.get("transport")
    log.info("connected", peer=peer, address=address)
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TextIO

# -- Status line of a terminal -----------------------------------------------------------------------------------------
# The last line of a terminal, such as a download's progress bar. It is redrawn in place; other lines go above it.


CLEAR = "\r\x1b[K"


class BottomLine:
    """A status line at the bottom of a terminal. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._text = ""
        self._stream: TextIO | None = None
        """The terminal that shows the line; None if no line is shown."""

    def draw(self, text: str, stream: TextIO) -> None:
        """Show ``text``, which must fit in one line of the terminal."""
        with self._lock:
            self._text, self._stream = text, stream
            self._write(CLEAR + text)

    def leave(self) -> None:
        """Leave the line as it is; further lines go below it."""
        with self._lock:
            self._write("\n")
            self._stream = None

    def clear(self) -> None:
        """Remove the line."""
        with self._lock:
            self._write(CLEAR)
            self._stream = None

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Hide the line while the caller writes whole lines to the terminal."""
        with self._lock:
            self._write(CLEAR)
            try:
                yield
            finally:
                self._write(self._text)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):  # the terminal is gone, and its line with it
                self._stream = None


bottom_line = BottomLine()
"""The status line of this process."""


# -- Logs --------------------------------------------------------------------------------------------------------------


LogFormat = Literal["text", "json"]

ROOT = "p2pdiloco"
FOREIGN = ("asyncio", "py.warnings", "zeroconf")
"""Loggers of libraries whose warnings belong in this log."""

LEVELS = {10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical"}
PLAIN = re.compile(r"[A-Za-z0-9_.,:/@+\-\[\]%…]+")
LEFT_BEHIND = re.compile(r"Task was destroyed but it is pending!\ntask: <[^<]*coro=<Event\.wait\(\)")
"""hivemind's search through the directory leaves a pending task behind (``traverse.py``), which asyncio reports as an
error when it is collected. None of our tasks only waits for an event."""
FIELD_LIMIT = 2048
"""Maximum characters of a field's value; the rest is cut."""

_speaker: ContextVar[str] = ContextVar("p2pdiloco_log_speaker", default="-")


class EventLog:
    """A named source of events. It is cheap; make one per module."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: object) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write(logging.ERROR, event, fields)

    def failure(self, event: str, error: BaseException, **fields: object) -> None:
        """Log a defect of this program as an error, with the traceback of ``error``."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._logger.error(event, exc_info=error, extra={"fields": fields})

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields})


def get(name: str) -> EventLog:
    """Return the log called ``name`` (``transport``, ``directory``, ...)."""
    return EventLog(logging.getLogger(f"{ROOT}.{name}"))


def speak_as(peer: str) -> None:
    """Set the peer id for log lines of the current task and of the tasks that it starts."""
    _speaker.set(short(peer))


def short(peer: str) -> str:
    """Return the last 6 characters of a peer id; the first ones are the same for all peers."""
    return peer[-6:] if len(peer) > 12 else peer or "-"


def printable(text: str, keeps: str = "") -> str:
    """Replace control characters in ``text`` by spaces, except those in ``keeps``, to protect the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keeps else " " for c in text)


def escaped(text: str) -> str:
    """Escape the characters of ``text``, a line of JSON, that are not printable."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def configure(level: str = "info", format: LogFormat = "text", stream: TextIO | None = None) -> None:
    """Log this process's events of at least ``level`` to ``stream`` (default: standard error). May be called again.

    Raises:
        ValueError: ``level`` or ``format`` is not one of the allowed words.
    """
    numbers = {name: number for number, name in LEVELS.items()}
    if level not in numbers:
        raise ValueError(f"log level {level!r}: use one of {', '.join(numbers)}")
    if format not in ("text", "json"):
        raise ValueError(f"log format {format!r}: use text or json")
    is_watched = bool(getattr(stream or sys.stderr, "isatty", bool)())
    handler = TerminalHandler(stream) if is_watched else logging.StreamHandler(stream)
    formatter = TerminalFormatter() if is_watched else TextFormatter()
    handler.setFormatter(JsonFormatter() if format == "json" else formatter)
    handler.addFilter(_is_worth_telling)
    logging.captureWarnings(True)
    for name in (ROOT, *FOREIGN):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(numbers[level] if name == ROOT else logging.WARNING)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    return record.name != "asyncio" or not LEFT_BEHIND.match(record.getMessage())


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Writes above the status line, if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record`` while the status line is hidden."""
        with bottom_line.lifted():
            super().emit(record)


class TextFormatter(logging.Formatter):
    """``2026-10-28T11:08:27.123Z info    a1b2c3 transport connected peer=d4e5f6 address=/ip4/...``."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [*self._head(record), _clean(_event_of(record))]
        for key, value in _fields_of(record).items():
            parts.append(f"{key}={_quoted(short(value) if key == 'peer' and isinstance(value, str) else value)}")
        if record.exc_info:
            parts.append(f"traceback={json.dumps(self.formatException(record.exc_info))}")
        return " ".join(parts)

    def _head(self, record: logging.LogRecord) -> list[str]:
        """Return the parts of the line before the event's name."""
        return [_time_of(record), f"{_level_of(record):<7}", _speaker.get(), _name_of(record)]


class TerminalFormatter(TextFormatter):
    """Format for a person at a terminal: ``11:08:27 connected peer=d4e5f6 address=/ip4/...``.

    It uses local time and leaves out what is the same in each line. A level above ``info`` is shown.
    """

    def _head(self, record: logging.LogRecord) -> list[str]:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return [clock] if record.levelno <= logging.INFO else [clock, f"{_level_of(record)}:"]


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time``, ``level``, ``self``, ``log``, ``event`` and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time_of(record),
            "level": _level_of(record),
            "self": _speaker.get(),
            "log": _name_of(record),
            "event": _event_of(record),
        }
        for key, value in _fields_of(record).items():
            line.setdefault(key, value if isinstance(value, int | float | bool | None) else str(value)[:FIELD_LIMIT])
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return escaped(json.dumps(line, ensure_ascii=False))


def _time_of(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _level_of(record: logging.LogRecord) -> str:
    return LEVELS.get(record.levelno, str(record.levelno))


def _name_of(record: logging.LogRecord) -> str:
    return record.name.removeprefix(ROOT + ".")


def _event_of(record: logging.LogRecord) -> str:
    return record.getMessage()[:FIELD_LIMIT]


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _clean(event: str) -> str:
    return event if event.isprintable() else json.dumps(event)


def _quoted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)[:FIELD_LIMIT]
    return text if PLAIN.fullmatch(text) else escaped(json.dumps(text, ensure_ascii=False))
