"""The commits that this peer has made, on its disk before anybody hears of them: killed at any moment, it comes back to
the same commits and makes no others in their place (rule E1).

Rules of this file:
1. A commit is sent, and counts here, when it is durable. Where the disk takes nothing it is sent all the same: only
   who is killed before its next checkpoint then makes another.
2. What a checkpoint has left behind is removed, as soon as that checkpoint is the oldest that is kept; and the oldest,
   where all together have more than OWN_BYTES.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from p2pdiloco.peer.host import Disk, Host, replace, sweep
from p2pdiloco.protocol.aggregation import is_left
from p2pdiloco.protocol.events import Convictions
from p2pdiloco.protocol.ids import Digest
from p2pdiloco.protocol.messages import Commit, CommitHeader, Head, commit_id
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import CommitParts, decode_as, decode_message, encode

log = logs.get("node")

FOLDER = "own"
SUFFIX = ".commit"
BARRED = "barred.msgpack"
"""Who may own nothing, which a restart does not forget either."""
LENGTH_BYTES = 4
OWN_BYTES = 256 << 20
OWN_BYTES_PER_PARAMETER = 2
"""The larger of the two."""


class DurableCommits:
    """In ``folder``."""

    def __init__(self, folder: Path, host: Host, elements: int) -> None:
        self._folder = folder
        self._host = host
        self._most_bytes = max(OWN_BYTES, OWN_BYTES_PER_PARAMETER * elements)
        self._kept: dict[Digest, tuple[CommitHeader, int]] = {}
        """By id, the oldest first, with their bytes."""
        self._writing: dict[Digest, asyncio.Future[None]] = {}
        self._fails = False
        """The disk did not take the last."""
        self._convictions = Convictions()
        """Those on the disk."""

    def load(self) -> list[tuple[CommitHeader, bytes]]:
        """What earlier lives have made, as their files are called; what travels with it is not checked. Blocks."""
        found = []
        sweep(self._host.disk, self._folder)
        for name in self._host.disk.names(self._folder):
            if name == BARRED:
                continue
            try:
                data = self._host.disk.read(self._folder / name)
                end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big")
                message = decode_message(data[LENGTH_BYTES:end])
                if not isinstance(message, Commit) or self._path(message.header).name != name:
                    raise ValueError("it is not the commit that it is called after")
            except (OSError, ValueError) as error:
                log.warning("a commit of an earlier life cannot be read", name=name, reason=str(error))
                continue
            found.append((message.header, data[end:]))
            self._kept[commit_id(message.header)] = (message.header, len(data))
        return sorted(found, key=lambda commit: (commit[0].shard, commit[0].version))

    def load_convictions(self) -> Convictions:
        """What earlier lives knew of owners, as it lies there: nothing is checked. Blocks."""
        if BARRED in self._host.disk.names(self._folder):
            try:
                self._convictions = decode_as(self._host.disk.read(self._folder / BARRED), Convictions)
            except (OSError, ValueError) as error:
                log.warning("who may own nothing cannot be read", reason=str(error))
        return self._convictions

    def keep_convictions(self, known: Convictions) -> None:
        """Write what is known of owners, if it is new."""
        if known == self._convictions:
            return
        self._convictions = known
        disk, path, data = self._host.disk, self._folder / BARRED, encode(known)
        self._host.work("own", lambda: replace(disk, path, [data])).add_done_callback(_looked_at)

    def keep(self, header: CommitHeader, sent: CommitParts) -> None:
        """Write a commit with what travels with it, unless it is there."""
        commit = commit_id(header)
        if commit in self._kept:
            return
        body = encode(Commit(header))
        parts = (len(body).to_bytes(LENGTH_BYTES, "big"), body, *sent)
        self._kept[commit] = (header, sum(map(len, parts)))
        path, gone, disk = self._path(header), self._oldest(), self._host.disk

        def write() -> None:
            replace(disk, path, parts)
            _remove(disk, gone)

        def written(future: asyncio.Future[None]) -> None:
            del self._writing[commit]
            if future.cancelled():
                return
            error, before = future.exception(), self._fails
            self._fails = isinstance(error, OSError)
            if isinstance(error, OSError) and not before:
                reason = os.strerror(error.errno or 0)
                log.warning("own commits are sent without being written, until the disk takes them", reason=reason)

        writing = self._writing[commit] = self._host.work("own", write)
        writing.add_done_callback(written)

    def when_kept(self, commit: Digest, then: Callable[[], None]) -> None:
        """``then``, when the commit is on the disk: at once, if it is not being written."""
        writing = self._writing.get(commit)
        if writing is None:
            then()
        else:
            writing.add_done_callback(lambda _: then())

    def is_writing(self, commit: Digest) -> bool:
        """Whether it is on its way to the disk."""
        return commit in self._writing

    def forget(self, heads: Sequence[Head]) -> None:
        """Checkpoints hold ``heads``, by shard, or heavier ones."""
        left = [commit for commit, (header, _) in self._kept.items() if is_left(header, heads[header.shard])]
        self._drop([commit for commit in left if commit not in self._writing])

    def _oldest(self) -> list[Path]:
        """Files beyond the bound."""
        size, gone = sum(size for _, size in self._kept.values()), list[Path]()
        for commit, (header, its) in list(self._kept.items())[:-1]:
            if size <= self._most_bytes:
                break
            size -= its
            gone.append(self._path(header))
            del self._kept[commit]
        return gone

    def _drop(self, commits: Sequence[Digest]) -> None:
        gone = [self._path(self._kept.pop(commit)[0]) for commit in commits]
        if gone:
            self._host.work("own", lambda: _remove(self._host.disk, gone)).add_done_callback(_looked_at)

    def _path(self, header: CommitHeader) -> Path:
        return self._folder / f"{header.shard}-{header.version}-{commit_id(header)[:12]}{SUFFIX}"


def _remove(disk: Disk, paths: Sequence[Path]) -> None:
    for path in paths:
        disk.remove(path)


def _looked_at(future: asyncio.Future[None]) -> None:
    """A file that cannot be removed is there at the next start, where it is of no use, and does no harm."""
    if not future.cancelled():
        future.exception()
