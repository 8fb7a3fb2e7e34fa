"""Dataset files: finds a run's data files on this machine, opens them, and decides which are held out.

Rules of this file:
1. A hash of a file's relative path decides whether it is held out. Peers with the same files thus hold out the same
   ones, whatever order their disks list them in.
2. A problem with the data is reported in one sentence with its remedy (``CorpusError``).
3. Data that do not fit into memory are mapped (``mapped``). What has to be written for that is kept for the next start
   (``cached``).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sysconfig
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal, cast

import msgspec
import numpy as np
import psutil
import torch
import zstandard
from numpy.typing import DTypeLike
from torch import Tensor

from p2pdiloco.protocol.ids import digest_of
from p2pdiloco.protocol.manifest import DataConfig
from p2pdiloco.util import logs
from p2pdiloco.util.files import home_folder, make_private_folder

log = logs.get("data")

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BUCKETS = 1 << 32
_GZIP = b"\x1f\x8b"
_ENDINGS = ("", ".gz", ".zst")
# File patterns of documents, by ``data.kind``.
PATTERNS = {
    "text": tuple(f"*.txt{ending}" for ending in _ENDINGS),
    "jsonl": tuple(f"*{name}{ending}" for name in (".jsonl", ".json") for ending in _ENDINGS),
    "parquet": ("*.parquet",),
}
# Errors of a file that cannot be read or decompressed.
BROKEN = (OSError, EOFError, zlib.error, zstandard.ZstdError)
# Seconds between two lines about how much has been read.
PROGRESS_S = 5.0
# Compressed bytes that are decompressed at once: at most 256 MiB, if they are as compressible as possible.
_COMPRESSED_BYTES = 1 << 13

# Names of files with keys, passwords or tokens, in any case. Names with a dot first are hidden files anyway.
_SECRETS = re.compile(
    r"""
    id_(rsa|dsa|ecdsa|ed25519|ed448|xmss).*
    | .*\.(
        pem | key | p8 | pk8 | p12 | pfx | pkcs12 | der | jks | jceks | bks | keystore | ppk  # keys, alone or in stores
        | kdb | kdbx | psafe3 | agilekeychain | opvault | keychain | wallet | pgp | gpg | keytab | ovpn
        | env | htpasswd | tfstate
      ) (~ | \.(bak | backup | old | orig | save | gz | zst | zip))*
    | (.*[-_.])? (private | priv | secret | sec) ([-_.].*)? \. asc
    | secring.* | wallet\.dat | kubeconfig.* | shadow-? | [gs]shadow-?
    | _?(netrc | npmrc | pypirc | pgpass(\.conf)? | git-credentials | htpasswd | boto | s3cfg | my\.cnf)
    | (.*[-_])? credentials? (\.(csv | db | enc | ini | json | toml | txt | ya?ml))?
    | (.*[-_])? (root | access) [-_]? keys? \.csv
    | client[-_]secrets? .* \.json | (.*[-_])? service[-_]?account .* \.json | access_?tokens\.json
    | (.*[-_])? secrets? \.(ini | json | toml | ya?ml)
    """,
    re.IGNORECASE | re.VERBOSE,
)


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
    """Return the pattern of the files below the data's folder that belong to the corpus, for messages."""
    return "*.py" if config.kind == "stdlib" else config.pattern or PATTERNS.get(config.kind, ("*.py",))[0]


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
        found = list(_library(root) if is_stdlib else _matching(root, config))
    except (*BROKEN, ValueError, NotImplementedError) as error:
        raise CorpusError(f"{root} cannot be searched for {pattern!r}: {error}") from error
    if not found:
        raise CorpusError(
            f"{root} has no file that matches {pattern!r}, hidden files and keys aside: change data.pattern, or give "
            "another folder"
        )
    return root, sorted(found, key=lambda p: p.relative_to(root).as_posix())


def kind_of(place: Path, option: str) -> Any:
    """Return the kind of a file of documents, or of those in a folder: JSON lines unless they are something else.

    ``option``: the user's way of choosing a kind, for the message.

    Raises:
        CorpusError: the folder has files of several kinds.
    """
    if not place.is_dir():
        return next((kind for kind, patterns in PATTERNS.items() if any(map(place.match, patterns))), "jsonl")
    kinds: tuple[Literal["text", "jsonl", "parquet"], ...] = ("text", "jsonl", "parquet")
    files = {kind: [path.name for path in islice(_matching(place, DataConfig(kind=kind)), 3)] for kind in kinds}
    there = [kind for kind in kinds if files[kind]]
    if len(there) > 1:
        told = "; ".join(f"{kind}: {', '.join(files[kind])}" for kind in there)
        raise CorpusError(f"{place} has files of several kinds ({told}): choose one of them with {option}")
    return there[0] if there else "jsonl"


def _matching(root: Path, config: DataConfig) -> Iterator[Path]:
    """Yield the files below ``root`` that belong to the corpus. A ``.json`` must be an array, since tokenizers and
    models have such files too."""
    for pattern in (config.pattern,) if config.pattern else PATTERNS.get(config.kind, ("*.py",)):
        for path in root.rglob(pattern):
            if path.is_file() and not is_private(path.relative_to(root)):
                is_json = not config.pattern and pattern.startswith("*.json") and not pattern.startswith("*.jsonl")
                if not is_json or is_array(path):
                    yield path


def is_array(file: Path) -> bool:
    """Return whether a file begins like a JSON array."""
    with open_file(file) as stream:
        return stream.peek(64)[:64].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def is_private(path: PurePath) -> bool:
    """Return whether a file, named relative to the data's folder, is hidden or looks like a secret, such as a key.

    The founder of a run chooses the file pattern, and must not be able to select such files on another user's machine.
    """
    return any(part.startswith(".") for part in path.parts) or _SECRETS.fullmatch(path.name) is not None


def _library(root: Path) -> Iterator[Path]:
    """Yield the modules of the standard library, without installed packages, which are often larger than the
    library."""
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _NOT_LIBRARY]
        yield from (path for name in files if name.endswith(".py") and (path := Path(folder, name)).is_file())


# -- Reading -----------------------------------------------------------------------------------------------------------


def is_compressed(file: Path) -> bool:
    """Return whether a file is gzip or zstandard, whatever its name."""
    with file.open("rb") as stream:
        return stream.read(4).startswith((_GZIP, zstandard.FRAME_HEADER))


def open_file(file: Path) -> io.BufferedReader:
    """Open a file to read its bytes, decompressed if it is gzip or zstandard. Reading may raise one of ``BROKEN``."""
    stream = file.open("rb")
    try:
        magic = stream.peek(4)
    except OSError:
        stream.close()
        raise
    if magic.startswith(_GZIP):
        stream.close()
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(file)))
    return io.BufferedReader(_Zstandard(stream)) if magic.startswith(zstandard.FRAME_HEADER) else stream


class _Zstandard(io.RawIOBase):
    """The content of a zstandard file. The library's own reader does not notice that a file is cut off."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._ready:
            given = b"" if self._frame is None or not self._frame.eof else self._frame.unused_data
            given = given or self._stream.read(_COMPRESSED_BYTES)
            if not given:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the compressed file is cut off")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            self._ready = memoryview(self._frame.decompress(given))
        number = min(len(target), len(self._ready))
        target[:number], self._ready = self._ready[:number], self._ready[number:]
        return number

    def close(self) -> None:
        self._stream.close()
        super().close()


class ReadingProgress:
    """Logs every few seconds how much is done, so that a user sees that a long start goes on. ``total``: bytes."""

    def __init__(self, event: str, total: int) -> None:
        self._event, self._total = event, total
        self._done, self._told = 0, time.monotonic()

    def add(self, number: int) -> None:
        """Count further bytes."""
        self._done += number
        if (now := time.monotonic()) - self._told >= PROGRESS_S:
            self._told = now
            log.info(self._event, done=amount(self._done), files_have=amount(self._total))


def amount(number: int) -> str:
    """Return a number of bytes in words."""
    return f"{number:,} bytes" if number < 10**6 else f"{number / 1e6:,.1f} MB"


def mapped(file: Path, dtype: DTypeLike) -> Tensor:
    """Return a file that is not empty as a vector that is read from disk where it is used. Nothing may write to it.

    ``torch.from_file`` fails for a file that is larger than memory, because its mapping could be written to.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that nothing may write to it
        return torch.from_numpy(np.memmap(file, mode="r", dtype=dtype))


def stamp(file: Path) -> tuple[str, int, int]:
    """Return what changes with the content of a file: its path, size and time of modification."""
    found = file.stat()
    return str(file.resolve()), found.st_size, found.st_mtime_ns


def cached(key: object, write: Callable[[Path], None], size: int = 0) -> Path:
    """Return the folder in the cache whose files ``write`` makes from what ``key`` describes, unless it is there.

    The folder is complete or absent. If two processes make it at once, one wins. ``size``: its bytes, if known.

    Raises:
        CorpusError: it cannot be written.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache") / "p2pdiloco" / "tokens"
    folder = root / digest_of(json.dumps(key).encode())
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
    _sweep(root)
    try:
        make_private_folder(temporary)
        if (free := shutil.disk_usage(root).free) < size:
            raise CorpusError(
                f"the data take {amount(size)} in {root}, where {amount(free)} are free: free space there, or set "
                "XDG_CACHE_HOME to a folder on a larger disk"
            )
        write(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    except OSError as error:
        raise CorpusError(f"data cannot be written to {root}: {error.strerror}; free space there") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _sweep(cache: Path) -> None:
    """Remove files that killed processes left half-written, which are as large as their data."""
    for half in cache.glob("*.*"):
        number = half.suffix.removeprefix(".")
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            shutil.rmtree(half, ignore_errors=True)
