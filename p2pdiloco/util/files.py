"""Private folders and files, atomic file replacement, file locks, and disk access past the cache.

After a crash a file has its old content or its new one, never a mixture, and no lock is left behind.

Rules of this file:
1. The temporary file lies in the target's own folder, because renames are atomic within one file system only.
2. The content reaches the disk before the new name does, and the new name before the call returns.
3. All functions block: call them in a thread, not on the event loop.
4. Only this user may enter the folders and read the files that are made here, whatever the umask.
5. What a peer opens in its state folder is a regular file (``open_regular``): opening a FIFO could wait for ever.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("p2pdiloco")

UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems that lack an operation, such as locks (Lustre, gcsfuse, 9p) or the sync of a folder."""
SECTOR_BYTES = 4096
"""Alignment of writes past the cache. If a disk needs a larger one, the write goes through the cache."""
STAGING_BYTES = 1 << 20
"""Size of the aligned buffer for writes past the cache; the caller's data need not be aligned."""
PAST_CACHE: int = getattr(os, "O_DIRECT", 0)
"""Flag for writes past the cache, or 0 if the system has none."""


def make_private_folder(folder: Path) -> None:
    """Create ``folder`` and its missing parents with mode 0700. If it exists, take all permissions from others.

    Raises:
        OSError: it cannot be created.
    """
    try:
        os.mkdir(folder, 0o700)
    except FileNotFoundError:
        if folder.parent.is_dir():
            raise  # a file system in which no folder can be made, such as /proc
        make_private_folder(folder.parent)
        make_private_folder(folder)
    except FileExistsError:
        if not folder.is_dir():
            raise
        _take_from_others(folder, folder, folder.stat())


def make_state_folder(folder: Path) -> None:
    """Create a state folder. An existing one that the user named may have other files, and keeps its mode."""
    if not folder.is_dir() or folder.absolute().is_relative_to(state_home()):
        make_private_folder(folder)


def make_parent(path: Path) -> None:
    """Create the folder of ``path``, if it is missing. An existing one may be the user's, and keeps its mode."""
    if not path.parent.is_dir():
        make_private_folder(path.parent)


def open_regular(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor, as an ``opener`` of ``open``. Others cannot read what is written.

    Raises:
        OSError: it cannot be opened, or is something else, such as a FIFO, whose other end may never be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _not_regular(path) from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        is_folder = stat.S_ISDIR(found.st_mode)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path)) if is_folder else _not_regular(path)
    if flags & (os.O_WRONLY | os.O_RDWR):
        _take_from_others(descriptor, path, found)
    return descriptor


def _not_regular(path: Path | str) -> OSError:
    return OSError(errno.ENXIO, "it is not a regular file: remove it", str(path))


def _take_from_others(target: int | Path, path: Path | str, found: os.stat_result) -> None:
    if found.st_mode & 0o077:
        try:
            os.chmod(target, stat.S_IMODE(found.st_mode) & ~0o077)
        except OSError as error:
            if found.st_dev not in _without_modes:
                _without_modes.add(found.st_dev)
                log.warning("others on this machine may read %s: its mode cannot be changed (%s)", path, error.strerror)


# File systems of which a warning has told that modes cannot be changed there.
_without_modes: set[int] = set()


def read_regular(path: Path, size: int = -1) -> bytes:
    """Return the bytes of a regular file, at most ``size`` unless that is negative.

    Raises:
        OSError: as of ``open_regular``.
    """
    with open(path, "rb", opener=open_regular) as file:
        return file.read(size)


class LockedError(Exception):
    """Another process has the lock. The text is that process's id, or "unknown"."""


def lock(path: Path, *, is_inherited: bool = True) -> int:
    """Lock the file ``path``, which is created, and return its descriptor.

    Closing the descriptor or ending the process unlocks it.

    ``is_inherited``: forked processes hold the lock, too, and a second attempt in this process fails (flock). Otherwise
    the lock belongs to this process alone, and a second attempt in it succeeds (lockf).

    If the file system has no locks, a file in the folder for temporary files is locked instead, and one warning says
    so. This does not keep other machines out.

    Raises:
        LockedError: another process has the lock.
        OSError: the file cannot be opened, or neither file system has locks.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        (fcntl.flock if is_inherited else fcntl.lockf)(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        device = os.fstat(descriptor).st_dev
        os.close(descriptor)
        if isinstance(error, BlockingIOError | PermissionError):
            raise LockedError(owner) from error
        local = _local_lock(path)
        if error.errno not in UNSUPPORTED or path == local:
            reason = f"{os.strerror(error.errno or 0)} (file lock): choose a folder on a local disk"
            raise OSError(error.errno, reason, str(path)) from error
        descriptor = lock(local, is_inherited=is_inherited)
        if device not in _without_locks:
            _without_locks.add(device)
            log.warning(
                "the file system of %s has no locks: let no peer on another machine use this folder, or choose a "
                "folder on a local disk (--state; in scripts, state=)",
                path.parent,
            )
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode("ascii"), 0)
    return descriptor


# File systems without locks, of which a warning has told.
_without_locks: set[int] = set()


def _local_lock(path: Path) -> Path:
    """Return the file on a local disk that is locked instead of ``path``; of such a file, itself."""
    base = Path(tempfile.gettempdir())
    if path.parent == base:
        return path
    name = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()
    return base / f"p2pdiloco-{os.getuid()}-{name}.lock"


Buffer = bytes | bytearray | memoryview


def write_atomically(path: Path, data: Buffer) -> None:
    """Replace ``path`` by ``data`` with mode 0600; parent folders are created with mode 0700.

    Raises:
        OSError: for example, the disk is full or the folder is not writable. The old file is then untouched.
    """
    stream_atomically(path, (data,))


def stream_atomically(path: Path, parts: Iterable[Buffer]) -> None:
    """Do ``write_atomically`` with ``parts``, one after the other: only one needs to be in memory at a time."""
    make_parent(path)
    temporary = write_temporary(path, parts)
    try:
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_temporary(path: Path, parts: Iterable[Buffer]) -> Path:
    """Write ``parts`` to disk under a temporary name beside ``path``. The caller renames or removes the file.

    Raises:
        OSError: writing failed; nothing is left behind.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def sync_folder(folder: Path) -> None:
    """Make renames and links in ``folder`` durable, where the file system can do so."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


class _Staging(threading.local):
    """Aligned buffer of a thread, in which bytes are collected for a write past the cache."""

    def __init__(self) -> None:
        self.bytes = memoryview(mmap.mmap(-1, STAGING_BYTES))


_staging = _Staging()


class _Writer:
    """Writes a new file, or whole sectors of one from ``at`` on, past the kernel's cache where possible.

    Its content is rarely read again. Through the cache it would take memory, which the host of a virtual machine has to
    provide first: 2 ns a byte, where writing past the cache takes 0.4 (benchmarks/notes.md).
    """

    def __init__(self, path: Path, at: int | None = None) -> None:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if at is None else 0)
        try:
            self.descriptor = open_regular(path, flags | PAST_CACHE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.descriptor = open_regular(path, flags)
        self._is_new = at is None
        self._staged = self._total = 0
        os.lseek(self.descriptor, at or 0, os.SEEK_SET)

    def put(self, part: Buffer) -> None:
        """Append the next bytes."""
        rest = memoryview(part).cast("B")
        while len(rest):
            count = min(len(rest), STAGING_BYTES - self._staged)
            _staging.bytes[self._staged : self._staged + count] = rest[:count]
            self._staged += count
            self._total += count
            rest = rest[count:]
            if self._staged == STAGING_BYTES:
                self._flush(STAGING_BYTES)

    def end(self) -> None:
        if self._staged:
            self._flush(-(-self._staged // SECTOR_BYTES) * SECTOR_BYTES)
            if self._is_new:
                os.ftruncate(self.descriptor, self._total)

    def _flush(self, count: int) -> None:
        rest, self._staged = _staging.bytes[:count], 0
        while len(rest):
            try:
                rest = rest[os.write(self.descriptor, rest) :]
            except OSError as error:
                flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & PAST_CACHE:
                    raise
                fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~PAST_CACHE)  # EINVAL: use the cache instead


class LocalDisk:
    """``peer.disk.Disk`` on the local file system."""

    def names(self, folder: Path) -> list[str]:
        """Return the names in ``folder``, sorted; empty if it does not exist."""
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """Return the file's bytes from ``start`` on, at most ``size``."""
        with open(path, "rb", opener=open_regular) as file:
            file.seek(start)
            try:
                return file.read(-1 if size is None else size)
            except MemoryError:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from None

    def write(self, path: Path, parts: Iterable[Buffer]) -> None:
        """Write a new file of ``parts``."""
        self._write(path, None, parts)

    def put(self, path: Path, at: int, *parts: Buffer) -> None:
        """Write ``parts`` from ``at`` on. The bytes after them, up to the sector's end, are undefined."""
        self._write(path, at, parts)

    def _write(self, path: Path, at: int | None, parts: Iterable[Buffer]) -> None:
        try:
            writer = _Writer(path, at)
        except FileNotFoundError:
            make_parent(path)
            writer = _Writer(path, at)
        try:
            for part in parts:
                writer.put(part)
            writer.end()
        finally:
            os.close(writer.descriptor)

    def append(self, path: Path, part: Buffer) -> None:
        """Append ``part`` to an existing file."""
        with os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND), "ab") as file:
            file.write(part)

    def sync(self, path: Path) -> None:
        """Make the file's content durable."""
        descriptor = open_regular(path)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Make renames in ``folder`` durable."""
        sync_folder(folder)

    def rename(self, old: Path, new: Path) -> None:
        """Rename ``old`` to ``new`` atomically."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists."""
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> None:
        """Remove a folder and its contents, as far as possible."""
        shutil.rmtree(folder, ignore_errors=True)


LOCAL = LocalDisk()


# -- Rotation ----------------------------------------------------------------------------------------------------------
# Keeps the last few versions of files that would grow without limit or be overwritten.


def rotate(path: Path, *, keep: int, most_bytes: int) -> None:
    """Move ``path`` aside, if it exists, and remove old versions.

    The newest ``keep`` versions stay, as far as they fit ``most_bytes`` together; the newest always stays.

    Raises:
        OSError: the file cannot be moved.
    """
    if not path.exists():
        return
    last = next(number for number in range(1, keep + 2) if number > keep or not _numbered(path, number).exists())
    for number in range(min(last, keep), 1, -1):
        _numbered(path, number - 1).replace(_numbered(path, number))
    path.replace(_numbered(path, 1))
    room = most_bytes
    for number in range(1, keep + 1):
        with contextlib.suppress(FileNotFoundError):
            room -= _numbered(path, number).stat().st_size
            if room < 0 and number > 1:
                _numbered(path, number).unlink()


def older(path: Path) -> list[Path]:
    """Return the versions that were moved aside, the oldest first."""
    found = [other for other in path.parent.glob(f"{path.stem}.*{path.suffix}") if _number(path, other)]
    return sorted(found, key=lambda other: _number(path, other), reverse=True)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _number(path: Path, other: Path) -> int:
    middle = other.name.removeprefix(f"{path.stem}.").removesuffix(path.suffix)
    return int(middle) if middle.isdecimal() else 0


# -- Default state folder ----------------------------------------------------------------------------------------------
# Used by commands and training scripts unless the user names another folder.


def state_home() -> Path:
    """Return ``$XDG_STATE_HOME/p2pdiloco``, or ``~/.local/state/p2pdiloco``. Each script has its own folder in it."""
    return Path(os.environ.get("XDG_STATE_HOME") or home_folder() / ".local" / "state") / "p2pdiloco"


def home_folder() -> Path:
    """Return the user's home folder. In containers a user may have none: then the current folder, with a warning."""
    try:
        return Path.home()
    except RuntimeError:
        here = Path.cwd()
        log.warning(
            "HOME is not set, and this user has no home folder: p2pdiloco keeps its files below %s. Set HOME, or name "
            "a state folder (--state; in scripts, state=)",
            here,
        )
        return here
