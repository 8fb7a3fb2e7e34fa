"""A terminal's last line, which is written over (a download's bar), while what else is written goes above it.

Rule of this file: one line in a process, on one stream. It knows nothing of what it shows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

CLEAR = "\r\x1b[K"


class BottomLine:
    """See the module. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._text = ""
        self._stream: TextIO | None = None
        """Where it stands; None: there is none."""

    def draw(self, text: str, stream: TextIO) -> None:
        """``text`` is the line now. It is one that fits in the terminal."""
        with self._lock:
            self._text, self._stream = text, stream
            self._write(CLEAR + text)

    def leave(self) -> None:
        """It stays as it is, and what is written next goes below it."""
        with self._lock:
            self._write("\n")
            self._stream = None

    def clear(self) -> None:
        """There is none any more."""
        with self._lock:
            self._write(CLEAR)
            self._stream = None

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Whole lines are written to the terminal meanwhile."""
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
"""This process's."""
