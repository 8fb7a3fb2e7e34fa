"""Event journal: every event that the machine of a real peer handled, its time, and a checksum of the effects, to
verify replays. ``recorder`` writes one.

File format: a sequence of MessagePack objects, each after its length. The first is the machine's configuration, each
further one an ``Entry``. Writes are buffered and flushed once a second and at the end.

Each life of a peer has its own journal, since one is needed after a crash: ``journal-N.bin`` are earlier lives'. A full
journal ends: nothing after a gap could be replayed.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self
from zlib import crc32

import msgspec

from p2pdiloco.protocol.effects import Effect
from p2pdiloco.protocol.events import Event
from p2pdiloco.protocol.state import ProtocolConfig

FLUSH_S = 1.0
# Size limit of one journal.
MOST_BYTES = 256 << 20
MAX_ENTRY_BYTES = 1 << 24
_LENGTH = 4

_encoder = msgspec.msgpack.Encoder()


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One handled event."""

    now: float
    event: Event
    effects_crc: int


def effects_crc(effects: list[Effect]) -> int:
    """Return a checksum of a list of effects."""
    return crc32(_encoder.encode(effects))


class Journal:
    """Append-only journal file of one life; a context manager."""

    def __init__(self, path: Path, config: ProtocolConfig) -> None:
        self._path = path
        self._config = config
        self._file: BinaryIO | None = None
        self._flushed_at = 0.0
        self._bytes = 0

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            number = 1 + len(list(self._path.parent.glob(f"{self._path.stem}-*{self._path.suffix}")))
            self._path.rename(self._path.with_stem(f"{self._path.stem}-{number}"))
        self._file = open(self._path, "wb", buffering=1 << 18)
        self._write(_encoder.encode(self._config))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Data that a full disk refuses is lost; a reader leaves out a torn last entry."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def record(self, now: float, event: Event, effects: list[Effect]) -> None:
        """Append one handled event.

        Raises:
            OSError: the disk or the journal is full.
        """
        self._write(_encoder.encode(Entry(now, event, effects_crc(effects))))

    def _write(self, data: bytes) -> None:
        if self._file is not None:
            self._bytes += _LENGTH + len(data)
            if self._bytes > MOST_BYTES:
                raise OSError(errno.EFBIG, f"a journal has at most {MOST_BYTES:,} bytes")
            self._file.write(len(data).to_bytes(_LENGTH, "big") + data)
            if time.monotonic() - self._flushed_at > FLUSH_S:
                self._file.flush()
                self._flushed_at = time.monotonic()


WHERE = "python -m tests.machine_sim.replay reads STATE/RUN/journal.bin, which peers of tests.chaos write"


class JournalError(Exception):
    """The file is not a journal, or it is damaged in a way that a killed writer cannot explain."""


def read_journal(path: Path) -> tuple[ProtocolConfig, Iterator[Entry]]:
    """Read the configuration and the entries. A last entry that was cut off is left out.

    Raises:
        JournalError: the file is not a journal, or (while iterating) an entry cannot be read.
    """
    frames = _frames(path)
    try:
        config = msgspec.msgpack.decode(next(frames), type=ProtocolConfig)
    except (StopIteration, msgspec.MsgspecError) as error:
        raise JournalError(f"{path} is not a journal of this release: {WHERE}") from error
    return config, _entries(path, frames)


def _entries(path: Path, frames: Iterator[bytes]) -> Iterator[Entry]:
    decoder = msgspec.msgpack.Decoder(Entry)
    for number, frame in enumerate(frames, start=1):
        try:
            yield decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise JournalError(f"{path}: entry {number} cannot be read: {error}") from error


def _frames(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while len(head := file.read(_LENGTH)) == _LENGTH:
            length = int.from_bytes(head, "big")
            if length > MAX_ENTRY_BYTES:
                raise JournalError(f"{path} is not a journal: {WHERE}")
            data = file.read(length)
            if len(data) < length:
                return
            yield data
