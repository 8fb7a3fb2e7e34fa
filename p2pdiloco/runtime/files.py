"""Writing files so that a crash leaves the old bytes or the new ones, never a mixture.

Rules of this file:
1. The temporary file lies in the target's own folder (rename is atomic within one file system only).
2. Bytes reach the disk before the name does, and the name before the call returns.
3. Everything here blocks: on the event loop call it through a thread.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, data: bytes | bytearray | memoryview, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data`` with permission bits ``mode``; parent folders are made.

    Raises:
        OSError: the disk is full, the folder is not writable. The old file is then untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = write_temporary(path, data, mode=mode)
    try:
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_temporary(path: Path, data: bytes | bytearray | memoryview, *, mode: int) -> Path:
    """``data`` on the disk under a new name beside ``path``. The caller renames or unlinks it.

    Raises:
        OSError: as above; nothing is left behind.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def sync_folder(folder: Path) -> None:
    """Make renames and links in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
