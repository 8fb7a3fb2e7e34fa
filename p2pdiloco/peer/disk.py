"""What a peer does to its disk, in steps that each may fail or be the last, and how a file is replaced with them.

Rules of this file:
1. A crash leaves the old file or the new one, never a mixture: bytes reach the disk before the name does, and the name
   before ``replace`` returns. The temporary file lies in the target's own folder.
2. Everything here blocks: it belongs on the host's ``disk`` queue, or into a program that waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

Buffer = bytes | bytearray | memoryview

PART = ".part"
"""Suffix of what is being written; whatever has it and is not being written is a crash's."""


class Disk(Protocol):
    """A file system. All raise OSError; ``runtime.files.LocalDisk`` is the real one."""

    def names(self, folder: Path) -> list[str]:
        """What lies in ``folder``, sorted; nothing if it is not there."""

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """The file's bytes from ``start``; at most ``size``, or all."""

    def write(self, path: Path, parts: Iterable[Buffer]) -> None:
        """A new file of ``parts``, one after the other; its folder is made. Not durable before ``sync``."""

    def put(self, path: Path, at: int, part: Buffer) -> None:
        """``part`` from ``at`` on, where a sector of 4096 bytes begins, in a file that is made if it is not there. What
        comes behind it in its last sector is lost. Not durable before ``sync``."""

    def append(self, path: Path, part: Buffer) -> None:
        """``part`` at the end of a file that is there. Not durable before ``sync``."""

    def sync(self, path: Path) -> None:
        """The file's bytes are durable when this returns."""

    def sync_folder(self, folder: Path) -> None:
        """Renames in ``folder`` are durable when this returns."""

    def rename(self, old: Path, new: Path) -> None:
        """``new`` is what ``old`` was, at once."""

    def remove(self, path: Path) -> None:
        """A file; nothing if it is not there."""

    def remove_folder(self, folder: Path) -> None:
        """With all that is in it, as far as that can be done."""


def replace(disk: Disk, path: Path, parts: Iterable[Buffer], *, is_durable: bool = True) -> None:
    """Replace ``path`` by ``parts``.

    Raises:
        OSError: the disk is full, or the folder is not writable. The old file is then untouched.
    """
    temporary = path.with_name(f".{path.name}{PART}")
    try:
        disk.write(temporary, parts)
        if is_durable:
            disk.sync(temporary)
        disk.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.remove(temporary)
        raise
    if is_durable:
        disk.sync_folder(path.parent)


def sweep(disk: Disk, folder: Path) -> list[str]:
    """Remove what a crash left half-written in ``folder``; the names. Only where nobody else writes."""
    found = [name for name in disk.names(folder) if name.endswith(PART)]
    for name in found:
        disk.remove(folder / name)
    return found
