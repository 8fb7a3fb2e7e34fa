"""Dataset files: finds a run's data files on this machine, and decides which are held out.

Rules of this file:
1. A hash of a file's relative path decides whether it is held out. Peers with the same files thus hold out the same
   ones, whatever order their disks list them in.
2. A problem with the data is reported in one sentence with its remedy (``CorpusError``).
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any

import msgspec
from torch import Tensor

from p2pdiloco.protocol.manifest import DataConfig

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BUCKETS = 1 << 32
# File patterns of documents, by ``data.kind``.
PATTERNS = {"text": "*.txt", "jsonl": "*.jsonl", "parquet": "*.parquet"}

# Name patterns of private keys.
_KEYS = ("id_rsa*", "id_ecdsa*", "id_ed25519*", "id_dsa*", "*.pem", "*.key")


class CorpusError(ValueError):
    """The data cannot be used. The message is for the person who started the peer."""


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """Two disjoint splits of files or documents, each as one vector: bytes (uint8) or tokens (int32)."""

    train: Tensor
    held_out: Tensor


def is_held_out(name: str, share: float) -> bool:
    """Return whether the file with this relative POSIX path is held out."""
    bucket = int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=4).digest(), "big")
    return bucket < share * _BUCKETS


def pattern_of(config: DataConfig) -> str:
    """Return the pattern of the files below the data's folder that belong to the corpus."""
    return "*.py" if config.kind == "stdlib" else config.pattern or PATTERNS.get(config.kind, "*.py")


def find_files(config: DataConfig, data: str | None) -> tuple[Path, list[Path]]:
    """Return the corpus's folder and its files, sorted by relative path.

    ``data`` was named by the user of this machine. None: this machine's standard library, if the run trains on that.

    Raises:
        CorpusError: there is no such folder, or no matching file in it.
    """
    pattern, is_stdlib = pattern_of(config), config.kind == "stdlib" and data is None
    path = sysconfig.get_paths()["stdlib"] if is_stdlib else data
    if not path:
        raise CorpusError(
            f"the run trains on files ({config.kind}, {pattern}), and each peer supplies its own: "
            "give --data FOLDER (the founder may also set data.path)"
        )
    root = Path(path).expanduser()
    if config.kind in PATTERNS and root.is_file():
        return root.parent, [root]
    if not root.is_dir():
        raise CorpusError(f"{root} is not a folder: set data.path, or give --data, with a folder of text files")
    try:
        found = [p for p in (_library(root) if is_stdlib else root.rglob(pattern)) if p.is_file()]
        found = [p for p in found if not is_private(p.relative_to(root))]
    except (OSError, ValueError, NotImplementedError) as error:
        raise CorpusError(f"{root} cannot be searched for {pattern!r}: {error}") from error
    if not found:
        raise CorpusError(
            f"{root} has no file that matches {pattern!r}, hidden files and keys aside: change data.pattern, or give "
            "another folder"
        )
    return root, sorted(found, key=lambda p: p.relative_to(root).as_posix())


def kind_of(place: Path) -> Any:
    """Return the kind of a file of documents, or of those in a folder: JSON lines unless they are something else."""
    for kind, pattern in PATTERNS.items():
        if place.match(pattern) or (place.is_dir() and next(place.rglob(pattern), None) is not None):
            return kind
    return "jsonl"


def is_private(path: PurePath) -> bool:
    """Return whether a file, named relative to the data's folder, is hidden or looks like a key.

    The founder of a run chooses the file pattern, and must not be able to select such files on another user's machine.
    """
    return any(part.startswith(".") for part in path.parts) or any(fnmatch(path.name, name) for name in _KEYS)


def _library(root: Path) -> Iterator[Path]:
    """Yield the modules of the standard library, without installed packages, which are often larger than the
    library."""
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _NOT_LIBRARY]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))
