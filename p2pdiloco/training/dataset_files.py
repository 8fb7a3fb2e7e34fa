"""Files of a run's data on this machine, and which of them are held out.

Rules of this file:
1. A file is held out by a hash of its relative path, so peers with the same files hold out the same ones, whatever
   order their disks list them in.
2. What is wrong with the data is said in one sentence with the remedy (``CorpusError``).
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePath

import msgspec
from torch import Tensor

from p2pdiloco.protocol.manifest import DataConfig

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BUCKETS = 1 << 32
PATTERNS = {"text": "*.txt", "jsonl": "*.jsonl", "parquet": "*.parquet"}
"""Files of documents, by ``data.kind``."""

_KEYS = ("id_rsa*", "id_ecdsa*", "id_ed25519*", "id_dsa*", "*.pem", "*.key")
"""Names of private keys."""


class CorpusError(ValueError):
    """The data cannot be used; the message is for the person who started the peer."""


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """Two disjoint sets of files or documents, each as one vector: bytes (uint8) or tokens (int32)."""

    train: Tensor
    held_out: Tensor


def is_held_out(name: str, share: float) -> bool:
    """Whether the file with this relative POSIX path is held out."""
    bucket = int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=4).digest(), "big")
    return bucket < share * _BUCKETS


def pattern_of(config: DataConfig) -> str:
    """Which files below the data's folder belong to the corpus."""
    return "*.py" if config.kind == "stdlib" else config.pattern or PATTERNS.get(config.kind, "*.py")


def find_files(config: DataConfig, data: str | None) -> tuple[Path, list[Path]]:
    """The corpus's folder and its files, sorted by relative path. ``data`` was named by the user of this machine; None:
    the standard library that is here, if the run trains on that.

    Raises:
        CorpusError: there is no such folder, or nothing in it.
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


def is_private(path: PurePath) -> bool:
    """Whether a file, named relative to the data's folder, is hidden or looks like a key. The founder of a run chooses
    the pattern of its files, and must not choose these from another user's folder."""
    return any(part.startswith(".") for part in path.parts) or any(fnmatch(path.name, name) for name in _KEYS)


def _library(root: Path) -> Iterator[Path]:
    """The modules of the standard library; what was installed beside them, often more than itself, is not searched."""
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _NOT_LIBRARY]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))
