"""Write-ahead log: commits on disk beside the checkpoints, each with its signature, digests and payload.

Rules of this file:
1. The log is a sequence of segments (``since-N.commits``). Each life of a peer begins its own segments and appends to
   the newest. Segment N begins before checkpoint N copies its first shard, so the segments from N on continue
   checkpoint N. If checkpoint N is torn, the segments from the previous checkpoint on continue that one.
2. A peer's own commit is appended and synced before it is sent and before it counts. If the peer is killed at any
   moment, it comes back with the same commits and makes no others in their place (rule E1). If the disk accepts no
   writes, the commit is sent anyway; then a peer that is killed before its next checkpoint may make another one.
3. Commits that have become a shard's head are appended in batches (``checkpoint_writer``): other peers' with their
   data, own ones without. Only these continue a checkpoint.
4. Checkpoints truncate the log: segments before the oldest kept checkpoint are removed. A new segment begins with the
   own commits that its checkpoint may not contain.
5. A checksum covers an entry's lengths and header. Digests in the header cover its data. An entry that is torn or fails
   its checksum ends its segment. The next append overwrites what a failed append left.
6. A commit is read back with the same checks as one received from a peer: it extends its shard's head, fits its chain,
   bears its owner's signature, and produces the result that the owner signed, chunk by chunk, with the same arithmetic.
   Otherwise its shard keeps its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from p2pdiloco.codec import compression, digests, outer_optimizer, quantization
from p2pdiloco.peer.host import Disk, Host
from p2pdiloco.peer.learner_updates import Payload
from p2pdiloco.peer.options import PeerOptions, protocol_config
from p2pdiloco.peer.payload_store import Held
from p2pdiloco.peer.state_proof import SavedState, ancestors, lineage_of, proven_digest
from p2pdiloco.protocol.chain import Chain
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.messages import Commit, CommitHeader, Head, commit_id
from p2pdiloco.protocol.own_commits import is_left
from p2pdiloco.util import logs
from p2pdiloco.util.files import SECTOR_BYTES
from p2pdiloco.wire.control_messages import CommitParts, SignedCommit, decode_message, encode, split_commit

log = logs.get("node")

# -- Format ------------------------------------------------------------------------------------------------------------
# A segment is MAGIC and entries. Each entry begins at a sector, so that it can be written past the system's cache. An
# entry is PREFIX, a header (the message Commit) and data (the commit's ``CommitParts``; empty if a MADE entry of the
# same commit has them).


# The first bytes of a segment, with the format's version.
MAGIC = b"p2pdiloco commits 2\n"
# Checksum (CRC-32 of the rest of the prefix and of the header), kind, bytes of the header, bytes of the data.
PREFIX = struct.Struct(">IB3xQQ")
CHECKSUM_BYTES = 4
# Kinds of entries. MADE: an own commit that is about to be sent. TAKEN: a commit that has become its shard's head.
MADE, TAKEN = 1, 2
MOST_HEADER_BYTES = 16 << 20
# Upper bounds on the data of an entry, used to detect altered lengths: a codec takes at most two bytes per parameter,
# digests less.
MOST_BYTES_A_PARAMETER, MOST_BYTES_BESIDE = 4, 1 << 16

SEGMENT_PREFIX, SEGMENT_SUFFIX = "since-", ".commits"
CHECKPOINT_PREFIX = "state-"


class LogEntry(NamedTuple):
    """Location and kind of one entry."""

    kind: int
    path: Path
    start: int
    """Offset of its header in the file."""
    header_bytes: int
    data_bytes: int

    def read(self, disk: Disk) -> tuple[CommitHeader, bytes]:
        """Read the commit and its data.

        Raises:
            OSError: the file cannot be read.
            ValueError: the entry holds no commit.
        """
        found = disk.read(self.path, self.start, self.header_bytes + self.data_bytes)
        return _decoded(found[: self.header_bytes]), found[self.header_bytes :]


def _decoded(body: bytes) -> CommitHeader:
    message = decode_message(body)
    if not isinstance(message, Commit):
        raise ValueError("a log entry is not a commit")
    return message.header


def packed(kind: int, header: CommitHeader, data_bytes: int) -> bytes:
    """Return the bytes of an entry up to its data, which has ``data_bytes`` bytes."""
    body = encode(Commit(header))
    rest = PREFIX.pack(0, kind, len(body), data_bytes)[CHECKSUM_BYTES:] + body
    return zlib.crc32(rest).to_bytes(CHECKSUM_BYTES, "big") + rest


def entries(path: Path, disk: Disk, most_bytes: int) -> Iterator[tuple[CommitHeader, LogEntry]]:
    """Read the commits of one segment, up to the first entry that is torn, altered, or has more than ``most_bytes`` of
    data.

    Raises:
        OSError: the segment cannot be read.
    """
    if disk.read(path, 0, len(MAGIC)) != MAGIC:
        return
    at = SECTOR_BYTES
    while len(prefix := disk.read(path, at, PREFIX.size)) == PREFIX.size:
        checksum, kind, header_bytes, data_bytes = PREFIX.unpack(prefix)
        if header_bytes > MOST_HEADER_BYTES or data_bytes > most_bytes:
            return
        body = disk.read(path, at + PREFIX.size, header_bytes)
        if checksum != zlib.crc32(body, zlib.crc32(prefix[CHECKSUM_BYTES:])):
            return
        try:
            header = _decoded(body)
        except ValueError:
            return
        entry = LogEntry(kind, path, at + PREFIX.size, header_bytes, data_bytes)
        yield header, entry
        at = next_sector(entry.start + header_bytes + data_bytes)


def next_sector(at: int) -> int:
    """Return the offset of the first sector that begins at or after ``at``."""
    return -(-at // SECTOR_BYTES) * SECTOR_BYTES


def most_data_bytes(layout: Layout) -> int:
    """Return the maximum bytes of data of an entry."""
    return MOST_BYTES_A_PARAMETER * max(piece.elements for piece in layout.shards) + MOST_BYTES_BESIDE


def path_of(folder: Path, number: int) -> Path:
    """Return the path of a segment."""
    return folder / f"{SEGMENT_PREFIX}{number:08d}{SEGMENT_SUFFIX}"


def numbers(folder: Path, disk: Disk, prefix: str = SEGMENT_PREFIX, suffix: str = SEGMENT_SUFFIX) -> list[int]:
    """Return the numbers of the segments, or of other files with numbers, in ``folder``, the lowest first."""
    names = (name for name in disk.names(folder) if name.startswith(prefix) and name.endswith(suffix))
    stems = (name.removeprefix(prefix).removesuffix(suffix) for name in names)
    return sorted(int(stem) for stem in stems if stem.isdecimal())


_NUMBERED = re.compile(rf"(?:{SEGMENT_PREFIX}|{CHECKPOINT_PREFIX})(\d+)\.")


def next_number(folder: Path, disk: Disk) -> int:
    """Return a number larger than that of every checkpoint and segment in ``folder``."""
    return max((int(found[1]) for name in disk.names(folder) if (found := _NUMBERED.match(name))), default=0) + 1


def remove(folder: Path, disk: Disk, before: int) -> None:
    """Remove the segments with a number below ``before``.

    Raises:
        OSError: a segment cannot be removed.
    """
    for number in numbers(folder, disk):
        if number < before:
            disk.remove(path_of(folder, number))


# -- The log of one life -----------------------------------------------------------------------------------------------


OWN_BYTES = 256 << 20
# The larger of these two bounds limits the own commits in segments that no checkpoint needs.
OWN_BYTES_PER_PARAMETER = 2
# Size of a batch of other peers' commits. An own commit waits for at most one batch.
BATCH_BYTES = 16 << 20


class LoggedCommit(NamedTuple):
    """A commit to append: its header, its payload, and a function that makes the commit's data from the payload."""

    header: CommitHeader
    held: Held
    parts_of: Callable[[Payload], CommitParts]


class _Own(NamedTuple):
    header: CommitHeader
    entry: LogEntry


class CommitLog:
    """The log of one peer in ``folder``.

    Call public methods on the event loop, except ``load``, which blocks. Private methods that touch the disk run on the
    host's ``log`` queue.
    """

    def __init__(self, folder: Path, host: Host, me: PeerId, layout: Layout) -> None:
        self._folder = folder
        self._host = host
        self._me = me
        self._most_data_bytes = most_data_bytes(layout)
        self._most_own_bytes = max(OWN_BYTES, OWN_BYTES_PER_PARAMETER * layout.elements)
        # Own commits that are being written.
        self._appending: dict[Digest, asyncio.Future[None]] = {}
        # The disk refused the last own commit. Keeps the log to one warning per outage.
        self._is_failing = False
        # Used on the ``log`` queue only:
        # The segment that is appended to; None: the next append begins a new one.
        self._path: Path | None = None
        # Offset of the next entry.
        self._end = 0
        # True if no checkpoint needs this segment, except for own commits.
        self._is_bounded = True
        # The segment that was last closed because it was large, if any.
        self._full: list[Path] = []
        # Commits that were appended with their data since the last checkpoint began.
        self._logged: set[Digest] = set()
        # Own commits that may be in no checkpoint yet, oldest first.
        self._own: dict[Digest, _Own] = {}

    # -- own commits ---------------------------------------------------------------------------------------------------

    def load(self, heads: Sequence[Head | None]) -> list[tuple[CommitHeader, bytes]]:
        """Read the own commits of earlier lives that the chains at ``heads`` (by shard) can still take, with their
        data.

        The data is not verified. Call it at the start, before anything is appended. Blocks.
        """
        found: dict[Digest, tuple[CommitHeader, bytes]] = {}
        for number in numbers(self._folder, self._host.disk):
            path = path_of(self._folder, number)
            try:
                for header, entry in entries(path, self._host.disk, self._most_data_bytes):
                    if entry.data_bytes and self._is_needed(header, heads):
                        commit = commit_id(header)
                        found[commit] = entry.read(self._host.disk)
                        self._own[commit] = _Own(header, entry)
            except (OSError, ValueError) as error:
                log.warning("cannot read commits from before the restart", path=path, reason=str(error))
        return sorted(found.values(), key=lambda commit: (commit[0].shard, commit[0].version))

    def _is_needed(self, header: CommitHeader, heads: Sequence[Head | None]) -> bool:
        """Return whether this is an own commit that the chain at ``heads`` can still take."""
        return header.owner == self._me and header.shard < len(heads) and not _is_left(header, heads)

    def append_own(self, header: CommitHeader, parts: CommitParts) -> None:
        """Append and sync an own commit in the background, unless it is in the log already."""
        commit = commit_id(header)
        if commit in self._own or commit in self._appending:
            return

        def write() -> None:
            if self._is_bounded and self._path is not None and self._end > self._most_own_bytes // 2:
                self._close_large_segment()
            self._append(MADE, header, parts)
            self._sync()

        def done(future: asyncio.Future[None]) -> None:
            del self._appending[commit]
            if future.cancelled():
                return
            error, was_failing = future.exception(), self._is_failing
            self._is_failing = isinstance(error, OSError)
            if isinstance(error, OSError) and not was_failing:
                reason = os.strerror(error.errno or 0)
                log.warning("cannot write own commits to the log; sending them anyway", reason=reason)

        appending = self._appending[commit] = self._host.work("log", write)
        appending.add_done_callback(done)

    def is_appending(self, commit: Digest) -> bool:
        """Return whether an own commit is being written."""
        return commit in self._appending

    def when_durable(self, commit: Digest, then: Callable[[], None]) -> None:
        """Call ``then`` when an own commit is on disk, or at once if it is not being written."""
        appending = self._appending.get(commit)
        if appending is None:
            then()
        else:
            appending.add_done_callback(lambda _: then())

    def forget(self) -> None:
        """Forget all segments, because they were set aside. Runs on the ``log`` queue."""
        self._path, self._full, self._logged, self._own = None, [], set(), {}

    # -- checkpoints and others' commits -------------------------------------------------------------------------------

    async def begin_segment(self, heads: Sequence[Head | None], *, is_bounded: bool) -> int:
        """Begin the segment of a checkpoint whose shards are at ``heads`` or heavier ones; return the number of both.

        ``is_bounded``: other peers' commits will not follow, so only the newest own commits must be kept.

        Raises:
            OSError: the disk does not accept writes.
        """
        return await self._host.work("log", lambda: self._begin_after(heads, is_bounded=is_bounded))

    def _begin_after(self, heads: Sequence[Head | None], *, is_bounded: bool) -> int:
        """Begin a segment with a copy of the own commits that the chains at ``heads`` can still take, and sync it."""
        number = next_number(self._folder, self._host.disk)
        self._begin(number)
        self._is_bounded, self._full, self._logged = is_bounded, [], set()
        for commit, own in list(self._own.items()):
            if _is_left(own.header, heads):
                del self._own[commit]
                continue
            try:
                header, data = own.entry.read(self._host.disk)
            except (OSError, ValueError) as error:
                log.warning("cannot read an own commit from the log", version=own.header.version, reason=str(error))
                del self._own[commit]
            else:
                self._append(MADE, header, [data])
        self._sync()
        return number

    async def append(self, commits: Iterable[LoggedCommit]) -> set[ShardId]:
        """Append commits that have become heads, and sync them. Returns the shards of which a payload is lost.

        Raises:
            OSError: the disk refused a write. Some of the commits may be in the log.
        """
        lost = set[ShardId]()
        for batch in _batches(commits):
            lost |= await self._host.work("log", partial(self._append_batch, batch))
        return lost

    def _append_batch(self, batch: Sequence[LoggedCommit]) -> set[ShardId]:
        lost = set[ShardId]()
        for header, held, parts_of in batch:
            try:
                parts = () if commit_id(header) in self._logged else parts_of(held.read(self._host.disk))
            except ValueError as error:
                log.warning("commit not written to the log", shard=header.shard, reason=str(error))
                lost.add(header.shard)
            else:
                self._append(TAKEN, header, parts)
        self._sync()
        return lost

    # -- the segment that is appended to -------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        path, self._path = path_of(self._folder, number), None
        try:
            self._host.disk.write(path, [MAGIC])
            self._host.disk.sync(path)
            self._host.disk.sync_folder(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                self._host.disk.remove(path)
            raise
        self._path, self._end = path, SECTOR_BYTES

    def _append(self, kind: int, header: CommitHeader, data: Sequence[bytes | memoryview]) -> None:
        """Append one entry, without a sync. ``data`` are the pieces of the entry's data."""
        if self._path is None:
            self._begin(next_number(self._folder, self._host.disk))
        assert self._path is not None
        data_bytes = sum(map(len, data))
        first = packed(kind, header, data_bytes)
        self._host.disk.put(self._path, self._end, first, *data)
        entry = LogEntry(kind, self._path, self._end + PREFIX.size, len(first) - PREFIX.size, data_bytes)
        self._end = next_sector(self._end + len(first) + data_bytes)
        if kind == MADE:
            commit = commit_id(header)
            self._logged.add(commit)
            self._own[commit] = _Own(header, entry)

    def _sync(self) -> None:
        """Sync the segment. After a failure its content on disk is unknown, so the next append begins a new segment."""
        path, self._path = self._path, None
        if path is None:
            return
        try:
            self._host.disk.sync(path)
        except OSError:
            self._logged.clear()
            raise
        self._path = path

    def _close_large_segment(self) -> None:
        """Close the segment, and remove the segment that was closed before it."""
        assert self._path is not None
        gone, self._full, self._path = self._full, [self._path], None
        for path in gone:
            with contextlib.suppress(OSError):
                self._host.disk.remove(path)
        self._own = {commit: own for commit, own in self._own.items() if own.entry.path not in gone}


def _batches(commits: Iterable[LoggedCommit]) -> Iterator[list[LoggedCommit]]:
    batch, size = list[LoggedCommit](), 0
    for commit in commits:
        if batch and size + commit.held.size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(commit)
        size += commit.held.size
    if batch:
        yield batch


def _is_left(header: CommitHeader, heads: Sequence[Head | None]) -> bool:
    head = heads[header.shard]
    return head is not None and is_left(header, head)


# -- Replay ------------------------------------------------------------------------------------------------------------


def replay(
    folder: Path,
    first: int,
    manifest: Manifest,
    shards: Sequence[SavedState],
    theta: Tensor,
    momentum: Tensor,
    disk: Disk,
) -> tuple[SavedState, ...]:
    """Apply the commits logged since checkpoint ``first``. Blocks.

    Args:
        theta: parameters of the checkpoint, float32 [all]; updated in place.
        momentum: momentum of the checkpoint, [all]; updated in place.

    Returns:
        The proven state of each shard after its last valid commit.
    """
    replays = [ShardReplay(manifest, saved, theta, momentum) for saved in shards]
    most_bytes = most_data_bytes(Layout.of(manifest))
    for number in numbers(folder, disk):
        if number < first:
            continue
        path = path_of(folder, number)
        try:
            for header, entry in entries(path, disk, most_bytes):
                if header.shard < len(replays):
                    replays[header.shard].add(header, entry, disk)
        except OSError as error:
            log.warning("cannot read commits made since the checkpoint", path=path, reason=str(error))
    if taken := sum(shard.taken for shard in replays):
        log.info("replayed commits made since the checkpoint", commits=taken)
    return tuple(shard.saved for shard in replays)


class ShardReplay:
    """Applies logged commits to one shard's state."""

    def __init__(self, manifest: Manifest, saved: SavedState, theta: Tensor, momentum: Tensor) -> None:
        self.saved = saved
        self.taken = 0
        self._manifest = manifest
        piece = Layout.of(manifest).shards[saved.state.head.shard]
        self._vectors = theta[piece.start : piece.stop], momentum[piece.start : piece.stop]
        # Created by the first commit.
        self._chain: Chain | None = None
        # Own commits that were made since the checkpoint, by ID.
        self._made: dict[Digest, LogEntry] = {}
        # True after an invalid commit: nothing that follows it can be applied.
        self._is_refusing = False

    def add(self, header: CommitHeader, entry: LogEntry, disk: Disk) -> None:
        """Handle the next entry of this shard: a valid TAKEN commit becomes the head. After an invalid one, the shard
        keeps its state."""
        head = self.saved.state.head
        if entry.kind == MADE:
            self._made[commit_id(header)] = entry
        elif not self._is_refusing and header.parent == head.id and header.version == head.version + 1:
            if not entry.data_bytes:
                entry = self._made.get(commit_id(header), entry)
            try:
                self._take(*entry.read(disk))
            except ValueError as error:
                self._is_refusing = True
                log.warning(
                    "cannot replay a commit made since the checkpoint",
                    shard=header.shard,
                    version=header.version,
                    reason=str(error),
                )

    def _take(self, header: CommitHeader, data: bytes) -> None:
        theta, momentum = self._vectors
        parts = split_commit(memoryview(data), digests.list_bytes(theta.numel()))
        if digest_of(parts.gradient) != header.payload:
            raise ValueError("it is torn or altered")
        saved = self._proved(header, parts)
        if proven_digest(self._manifest, saved) != digest_of(parts.digests):
            raise ValueError("its digests were altered")
        new = torch.empty_like(theta), torch.empty_like(momentum)
        chunks = quantization.chunk_count(theta.numel())
        bodies = compression.split(parts.gradient, chunks, quantization.LARGEST_BODY)
        factors = outer_optimizer.factors_of(self._manifest.config.outer, header.version)
        for index, body in enumerate(bodies):
            span = slice(index * quantization.CHUNK, (index + 1) * quantization.CHUNK)
            outer_optimizer.step_aside(body, theta[span], momentum[span], (new[0][span], new[1][span]), **factors)
            if not digests.is_chunk(parts.digests, index, new[0][span], new[1][span]):
                raise ValueError("its result is not what its owner signed")
        theta.copy_(new[0])
        momentum.copy_(new[1])
        self.saved = saved
        self.taken += 1

    def _proved(self, header: CommitHeader, parts: CommitParts) -> SavedState:
        """Advance the chain by a commit, and return the proven state."""
        before, lineage = self.saved, self.saved.lineage
        if self._chain is None:
            self._chain = chain_of(self._manifest, before)
        if problem := self._chain.problem(header):
            raise ValueError(problem)
        self._chain.advance(header, commit_id(header))
        if before.header is not None:
            commits = [SignedCommit(before.header, before.signature), *reversed(lineage)]
            lineage = lineage_of((commit.header, commit.signature) for commit in commits)
        return SavedState(self._chain.state(), header, parts.signature, lineage)


def chain_of(manifest: Manifest, saved: SavedState) -> Chain:
    """Return a shard's chain, as the state machine would have it after a start from ``saved``."""
    shard = saved.state.head.shard
    config = protocol_config(manifest, PeerOptions(folder=Path()), manifest.founder)
    chain = Chain(shard, config.log_length, config.blocks, config.limits, config.sizes.elements[shard])
    chain.replace(saved.state, ancestors(saved, saved.lineage))
    return chain
