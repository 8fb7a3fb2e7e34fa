"""A peer's disk: what it holds survives the peer's lives, and it fails as disks do.

Rules of this file:
1. What a process wrote is there for its next life, synced or not; a power cut leaves what was synced, and of the rest
   anything: the old bytes, the new ones, a part of them.
2. A rename survives a power cut for sure only when its folder was synced. That makes the name durable, not the bytes:
   a file that was never synced may be empty then.
3. Every operation may be the last of its process (``dies_in``), or fail (``room``, ``is_failing``, ``shortage``), or
   do what it does not say (``lie``).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Literal

from p2pdiloco.peer.host import Buffer

MEMORY_BYTES = 1 << 30
"""Of a process; a read takes its memory first."""

Shortage = Literal["no-process", "no-descriptor", "no-memory", "unwritable"]
"""A kind of operation that the simulated machine refuses for a while."""
START = "start"
"""The operation that begins a process, which also opens its log for writing."""
REFUSED: dict[Shortage, tuple[int, frozenset[str]]] = {
    "no-process": (errno.EAGAIN, frozenset({START})),
    "no-descriptor": (
        errno.EMFILE,
        frozenset({START, "names", "read", "write", "put", "append", "sync", "sync_folder"}),
    ),
    "no-memory": (
        errno.ENOMEM,
        frozenset({START, "names", "read", "write", "put", "append", "sync", "sync_folder", "rename", "remove"}),
    ),
    "unwritable": (errno.EROFS, frozenset({START, "write", "put", "append", "rename", "remove"})),
}
"""The error of each, and the operations that fail with it. Removing a folder ignores errors."""


class ProcessDied(BaseException):
    """The process ends inside an operation on its disk."""


class SimulatedDisk:
    """One peer's."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.files: dict[str, bytes] = {}
        self._durable: dict[str, bytes] = {}
        """Contents that survive a power cut, by path."""
        self._synced: dict[str, bytes] = {}
        """The bytes of each file when it was last synced, whatever it was called then."""
        self.dies_in: int | None = None
        """Operations until the process dies in one."""
        self.room: int | None = None
        """Bytes that still fit; None: enough."""
        self.is_failing = False
        """fsync says EIO."""
        self.shortage: Shortage | None = None
        self.is_unreliable = False
        """It took nothing for a while, or was put back to what it had been."""
        self.healed_at = 0.0
        """Since when it takes everything (again)."""
        self.lie = ""
        """What becomes of the next file that is written: "lost" (zeros are read back) or "misdirected" (the same, and
        its bytes are in the place of another file's)."""
        self.lied: Callable[[], object] = lambda: None
        self.altered: set[str] = set()
        """Files of which something is not what was written there."""

    # -- peer.disk.Disk ------------------------------------------------------------------------------------------------

    def names(self, folder: Path) -> list[str]:
        """What lies in ``folder``, sorted."""
        self._operation("names")
        prefix = f"{folder}/"
        return sorted({path[len(prefix) :].split("/")[0] for path in self.files if path.startswith(prefix)})

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """The file's bytes from ``start``; at most ``size``, or all."""
        self._operation("read")
        if size is not None and size > MEMORY_BYTES:
            raise MemoryError
        try:
            return self.files[str(path)][start : None if size is None else start + size]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path)) from None

    def write(self, path: Path, parts: Iterable[Buffer]) -> None:
        """A new file; a full disk takes the beginning of it."""
        self.refuse("write")
        self._put(path, b"", b"".join(bytes(part) for part in parts))

    def put(self, path: Path, at: int, *parts: Buffer) -> None:
        """Into a file; a full disk takes the beginning of it."""
        self.refuse("put")
        old, name = self.files.get(str(path), b""), str(path)
        was_altered = bool(old) and name in self.altered
        try:
            self._put(path, old[:at].ljust(at, b"\0"), b"".join(parts))
        finally:
            if name in self.files:
                self.files[name] += old[len(self.files[name]) :]
            self.altered |= {name} if was_altered else set()

    def append(self, path: Path, part: Buffer) -> None:
        """More of a file; a full disk takes the beginning of it."""
        self.refuse("append")
        if str(path) not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        self._put(path, self.files[str(path)], bytes(part))
        if self.room is not None:
            self.room -= len(part)

    def _put(self, path: Path, there: bytes, data: bytes) -> None:
        if self.room is not None and len(data) > self.room:
            self.files[str(path)] = there + data[: self.room]
            self.room = 0
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.dies_in == 1:
            self.files[str(path)] = there + data[: self._random.randrange(len(data) + 1)]
        self._operation()
        if not there:
            self.altered.discard(str(path))
        if self.lie:
            self.altered.add(str(path))
            self._misdirect(data, {*self.files} - {str(path)} if self.lie == "misdirected" else set())
            data, self.lie = bytes(len(data)), ""
            self.lied()
        self.files[str(path)] = there + data

    def _misdirect(self, data: bytes, others: set[str]) -> None:
        if others:
            other = self._random.choice(sorted(others))
            there = self.files[other]
            self.files[other] = self._durable[other] = self._synced[other] = data[: len(there)] + there[len(data) :]
            self.altered.add(other)

    def sync(self, path: Path) -> None:
        """The file's bytes are durable."""
        self._operation("sync")
        if self.is_failing:
            raise OSError(errno.EIO, "Input/output error")
        self._durable[str(path)] = self._synced[str(path)] = self.files[str(path)]

    def sync_folder(self, folder: Path) -> None:
        """The names in ``folder`` are durable."""
        self._operation("sync_folder")
        if self.is_failing:
            raise OSError(errno.EIO, "Input/output error")
        prefix = f"{folder}/"
        for path in [path for path in self._durable if path.startswith(prefix) and path not in self.files]:
            del self._durable[path]
        for path in self.files:
            if path.startswith(prefix):
                self._durable[path] = self._synced.get(path, b"")

    def rename(self, old: Path, new: Path) -> None:
        """``new`` is what ``old`` was."""
        self._operation("rename")
        try:
            self.files[str(new)] = self.files.pop(str(old))
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(old)) from None
        self._synced.pop(str(new), None)
        if str(old) in self._synced:
            self._synced[str(new)] = self._synced.pop(str(old))
        self.altered.discard(str(new))
        if str(old) in self.altered:
            self.altered ^= {str(old), str(new)}

    def remove(self, path: Path) -> None:
        """A file; nothing if it is not there."""
        self._operation("remove")
        self.files.pop(str(path), None)
        self._synced.pop(str(path), None)

    def remove_folder(self, folder: Path) -> None:
        """With all that is in it, as far as possible."""
        self._operation()
        if self.shortage not in (None, "no-process"):
            return
        for path in [path for path in self.files if path.startswith(f"{folder}/")]:
            del self.files[path]
            self._synced.pop(path, None)

    def refuse(self, operation: str) -> None:
        """Fail as this operation does in the present shortage, if there is one.

        Raises:
            OSError: the machine has not what it takes.
        """
        if self.shortage is None:
            return
        number, refused = REFUSED[self.shortage]
        if operation in refused:
            raise OSError(number, os.strerror(number))

    def _operation(self, name: str = "") -> None:
        self.refuse(name)
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in <= 0:
                self.dies_in = None
                raise ProcessDied

    # -- what happens to it --------------------------------------------------------------------------------------------

    def cut_power(self) -> None:
        """What was not durable is anything."""
        files = dict(self._durable)
        for path, data in self.files.items():
            if self._durable.get(path) == data:
                continue
            synced = self._synced.get(path, b"")
            match self._random.randrange(3):
                case 0:
                    files[path] = data
                case 1 if synced != data:  # else only its name is unsure
                    kept = len(synced) if data.startswith(synced) else 0  # only its end is new
                    files[path] = data[: kept + self._random.randrange(len(data) - kept + 1)]
                case _:
                    pass
        self.altered |= {path for path in {*files, *self.files} if files.get(path) != self.files.get(path)}
        self.files, self._durable, self._synced = files, dict(files), dict(files)

    def flip(self, first_bytes: int | None = None, within: str = "") -> str | None:
        """One bit of one file, within its ``first_bytes``, becomes another one; which file, of those whose paths begin
        so."""
        paths = sorted(path for path, data in self.files.items() if data and path.startswith(within))
        if not paths:
            return None
        path = self._random.choice(paths)
        data = bytearray(self.files[path])
        data[self._random.randrange(min(len(data), first_bytes or len(data)))] ^= 1 << self._random.randrange(8)
        self.files[path] = self._durable[path] = self._synced[path] = bytes(data)
        self.altered.add(path)
        return path

    def keep(self) -> tuple[dict[str, bytes], set[str]]:
        """A copy of everything, to be put back later; and what of it is altered."""
        return dict(self.files), set(self.altered)

    def put_back(self, files: dict[str, bytes], altered: Iterable[str] = ()) -> None:
        """An old copy takes the place of all that is there."""
        self.files, self._durable, self._synced, self.altered = dict(files), dict(files), dict(files), {*altered}
