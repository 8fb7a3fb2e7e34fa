"""Memory of a process by kind, as the kernel reports it (Linux).

Only the standard library, because the measured process reads this about itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SAMPLE_S = 0.004


def components() -> dict[str, int]:
    """PSS of this process in bytes: ``shared`` (nameless files: what node and learner share), ``files`` (programs and
    libraries), ``own`` (everything else)."""
    found, kind = {"shared": 0, "files": 0, "own": 0}, "own"
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        for text in file:
            words = text.split()
            if not words[0].endswith(":"):
                path = words[5] if len(words) > 5 else ""
                kind = "shared" if path.startswith(("/memfd:", "/dev/zero")) else "files" if path[:1] == "/" else "own"
            elif words[0] == "Pss:":
                found[kind] += int(words[1]) * 1024
    return found


def vectors(names: Sequence[str]) -> dict[str, int]:
    """Bytes that each of the equal parts ``names`` of this process's nameless file holds."""
    links = (path for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    descriptor = next(int(path.name) for path in links if "memfd:p2pdiloco" in os.readlink(path))
    size = os.fstat(descriptor).st_size // len(names)
    found, at = dict.fromkeys(names, 0), 0
    while True:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:  # no more
            return found
        at = os.lseek(descriptor, begin, os.SEEK_HOLE)
        for index, name in enumerate(names):
            first, last = max(begin, index * size), min(at, (index + 1) * size)
            found[name] += max(0, last - first)


def resident(*fields: str, pid: int | None = None) -> int:
    """Bytes of a process (this one) now: the sum of some of ``RssAnon``, ``RssShmem``, ``RssFile``.

    Raises:
        OSError: it has ended.
    """
    wanted = tuple(f"{field}:" for field in fields)
    with open(f"/proc/{pid or 'self'}/status", encoding="ascii") as file:
        return sum(int(text.split()[1]) * 1024 for text in file if text.startswith(wanted))


class Peaks:
    """The most of ``resident`` of some processes while it is open, by phases and names, looked at all ``SAMPLE_S``."""

    def __init__(self) -> None:
        self.phase = ""
        self.bytes: dict[tuple[str, str], int] = {}
        self._processes: dict[str, tuple[int | None, tuple[str, ...]]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="peaks")

    def look_at(self, name: str, *fields: str, pid: int | None = None) -> None:
        """From now on."""
        self._processes = {**self._processes, name: (pid, fields)}

    def look(self) -> None:
        """Once."""
        for name, (pid, fields) in self._processes.items():
            with contextlib.suppress(OSError):
                key = (self.phase, name)
                self.bytes[key] = max(self.bytes.get(key, 0), resident(*fields, pid=pid))

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.look()

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()


class Peak(Peaks):
    """Of this process."""

    def __init__(self, *fields: str) -> None:
        super().__init__()
        self.look_at("", *fields)

    @property
    def most(self) -> int:
        """Bytes."""
        return self.bytes["", ""]
