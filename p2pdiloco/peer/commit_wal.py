"""The write-ahead log: commits on the disk beside the checkpoints, each with what travels with it.

Rules of this file:
1. The log is a row of segments (``since-N.commits``). A life of a peer begins segments of its own and appends to the
   newest. Segment N is begun before checkpoint N copies its first shard, so the segments from N on lead on from
   checkpoint N; where that one is torn, the segments from the one before lead on from there.
2. A peer's own commit is appended and synced before it is sent and before it counts: killed at any moment, the peer
   comes back to the same commits and makes no others in their place (rule E1). Where the disk takes nothing the commit
   is sent all the same: only a peer that is killed before its next checkpoint then makes another.
   Commits that have become a shard's head are appended in batches (``checkpoint_writer``): others' with their data, own
   ones without. Only these lead on from a checkpoint.
3. Checkpoints truncate the log: the segments before the oldest checkpoint that is kept are removed. A new segment
   begins with the own commits that its checkpoint may not contain.
4. A checksum covers an entry's lengths and header, and digests in the header cover its data. An entry that is torn or
   does not have its checksum ends its segment. What a failed append has left is written over by the next.
5. A commit is read back as a live peer takes it: it extends its shard's head, fits its chain, bears its owner's
   signature, and gives what that owner signed, chunk by chunk, by the same arithmetic. Else its shard stays as it was.
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
from p2pdiloco.protocol.aggregation import is_left
from p2pdiloco.protocol.chain import Chain
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.messages import Commit, CommitHeader, Head, commit_id
from p2pdiloco.util import logs
from p2pdiloco.util.files import SECTOR_BYTES
from p2pdiloco.wire.control_messages import CommitParts, SignedCommit, decode_message, encode, split_commit

log = logs.get("node")

# -- Format ------------------------------------------------------------------------------------------------------------
# A segment is MAGIC and entries, each from the start of a sector on, so that it is written past the system's cache. An
# entry is PREFIX, a header (the message Commit) and data (what travels with the commit; nothing, where an entry of the
# same commit as MADE has it).


MAGIC = b"p2pdiloco commits 2\n"
"""The first bytes of a segment, with the format's version. Segments of version 1 begin with an entry's prefix."""
PREFIX = struct.Struct(">IB3xQQ")
"""Checksum (CRC-32 of the rest of the prefix and of the header), kind, bytes of the header, bytes of the data."""
PREFIX_1 = struct.Struct(">QQ")
"""Bytes of the header and of the data: the prefix of version 1, in which every commit was TAKEN."""
CHECKSUM_BYTES = 4
MADE, TAKEN = 1, 2
"""Kinds of entries: a peer's own commit that it is about to send, and one that has become the head of its shard."""
MOST_HEADER_BYTES = 16 << 20
MOST_BYTES_A_PARAMETER, MOST_BYTES_BESIDE = 4, 1 << 16
"""Limits on the data of an entry: a codec takes two bytes a parameter, digests less. A larger length is an altered
one."""

SEGMENT_PREFIX, SEGMENT_SUFFIX = "since-", ".commits"
CHECKPOINT_PREFIX = "state-"


class LogEntry(NamedTuple):
    """Where an entry lies, and of which kind it is."""

    kind: int
    path: Path
    start: int
    """Where its header begins."""
    header_bytes: int
    data_bytes: int

    def read(self, disk: Disk) -> tuple[CommitHeader, bytes]:
        """The commit and its data.

        Raises:
            OSError: the file cannot be read.
            ValueError: there is no commit.
        """
        found = disk.read(self.path, self.start, self.header_bytes + self.data_bytes)
        return _decoded(found[: self.header_bytes]), found[self.header_bytes :]


def _decoded(body: bytes) -> CommitHeader:
    message = decode_message(body)
    if not isinstance(message, Commit):
        raise ValueError("an entry of the log is no commit")
    return message.header


def packed(kind: int, header: CommitHeader, data_bytes: int) -> bytes:
    """An entry, but for its ``data_bytes`` of data."""
    body = encode(Commit(header))
    rest = PREFIX.pack(0, kind, len(body), data_bytes)[CHECKSUM_BYTES:] + body
    return zlib.crc32(rest).to_bytes(CHECKSUM_BYTES, "big") + rest


def entries(path: Path, disk: Disk, most_bytes: int) -> Iterator[tuple[CommitHeader, LogEntry]]:
    """Read the commits of one segment, up to an entry that is torn or altered or has more than ``most_bytes`` of data.

    Raises:
        OSError: the segment cannot be read.
    """
    has_checksums = disk.read(path, 0, len(MAGIC)) == MAGIC
    at, form = (SECTOR_BYTES, PREFIX) if has_checksums else (0, PREFIX_1)
    while len(prefix := disk.read(path, at, form.size)) == form.size:
        checksum, kind, header_bytes, data_bytes = (
            form.unpack(prefix) if has_checksums else (0, TAKEN, *form.unpack(prefix))
        )
        if header_bytes > MOST_HEADER_BYTES or data_bytes > most_bytes:
            return
        body = disk.read(path, at + form.size, header_bytes)
        if has_checksums and checksum != zlib.crc32(body, zlib.crc32(prefix[CHECKSUM_BYTES:])):
            return
        try:
            header = _decoded(body)
        except ValueError:
            return
        entry = LogEntry(kind, path, at + form.size, header_bytes, data_bytes)
        yield header, entry
        end = entry.start + header_bytes + data_bytes
        at = next_sector(end) if has_checksums else end


def next_sector(at: int) -> int:
    """Where the next entry begins after one that ends at ``at``."""
    return -(-at // SECTOR_BYTES) * SECTOR_BYTES


def most_data_bytes(layout: Layout) -> int:
    """The most bytes of data that an entry can have."""
    return MOST_BYTES_A_PARAMETER * max(piece.elements for piece in layout.shards) + MOST_BYTES_BESIDE


def path_of(folder: Path, number: int) -> Path:
    """The path of a segment."""
    return folder / f"{SEGMENT_PREFIX}{number:08d}{SEGMENT_SUFFIX}"


def numbers(folder: Path, disk: Disk) -> list[int]:
    """Numbers of the segments in ``folder``, the oldest first."""
    names = (name for name in disk.names(folder) if name.startswith(SEGMENT_PREFIX) and name.endswith(SEGMENT_SUFFIX))
    stems = (name.removeprefix(SEGMENT_PREFIX).removesuffix(SEGMENT_SUFFIX) for name in names)
    return sorted(int(stem) for stem in stems if stem.isdecimal())


_NUMBERED = re.compile(rf"(?:{SEGMENT_PREFIX}|{CHECKPOINT_PREFIX})(\d+)\.")


def next_number(folder: Path, disk: Disk) -> int:
    """A number larger than that of every checkpoint and every segment in ``folder``."""
    return max((int(found[1]) for name in disk.names(folder) if (found := _NUMBERED.match(name))), default=0) + 1


def remove(folder: Path, disk: Disk, before: int) -> None:
    """Remove the segments with a number below ``before``.

    Raises:
        OSError: one cannot be removed.
    """
    for number in numbers(folder, disk):
        if number < before:
            disk.remove(path_of(folder, number))


# -- The log of one life -----------------------------------------------------------------------------------------------


OWN_BYTES = 256 << 20
OWN_BYTES_PER_PARAMETER = 2
"""The larger of the two bounds the own commits in segments that no checkpoint needs."""
BATCH_BYTES = 16 << 20
"""Others' commits that are appended and synced at once: an own commit waits for one batch at most."""
OLD_FOLDER, OLD_SUFFIX, OLD_LENGTH_BYTES = "own", ".commit", 4
"""Where releases before version 2 of the format kept own commits, one a file."""


class LoggedCommit(NamedTuple):
    """A commit to be appended: its payload, and what makes of the payload what travels with the commit."""

    header: CommitHeader
    held: Held
    parts_of: Callable[[Payload], CommitParts]


class _Own(NamedTuple):
    header: CommitHeader
    entry: LogEntry


class CommitLog:
    """The log of one peer in ``folder``. Methods without ``async`` belong on the event loop; those with a leading
    underscore that touch the disk belong on the host's ``log`` queue."""

    def __init__(self, folder: Path, host: Host, me: PeerId, layout: Layout) -> None:
        self._folder = folder
        self._host = host
        self._me = me
        self._most_data_bytes = most_data_bytes(layout)
        self._most_own_bytes = max(OWN_BYTES, OWN_BYTES_PER_PARAMETER * layout.elements)
        self._appending: dict[Digest, asyncio.Future[None]] = {}
        """Own commits that are on their way to the disk."""
        self._is_failing = False
        """The disk did not take the last own commit."""
        # Of the ``log`` queue:
        self._path: Path | None = None
        """The segment that is appended to; None: the next append begins one."""
        self._end = 0
        """Where its next entry begins."""
        self._is_bounded = True
        """Whether no checkpoint needs what is appended, but for own commits."""
        self._full: list[Path] = []
        """The segment that was closed last because it was large, if any."""
        self._logged: set[Digest] = set()
        """Commits that were appended with their data since the last checkpoint began."""
        self._own: dict[Digest, _Own] = {}
        """Own commits that no checkpoint contains for sure, the oldest first."""

    # -- own commits ---------------------------------------------------------------------------------------------------

    def load(self, heads: Sequence[Head | None]) -> list[tuple[CommitHeader, bytes]]:
        """Read the own commits of earlier lives that ``heads``, by shard, have not left behind, with their data, which
        is not checked. For the start, before anything is appended. Blocks."""
        found = self._import_old(heads)
        for number in numbers(self._folder, self._host.disk):
            path = path_of(self._folder, number)
            try:
                for header, entry in entries(path, self._host.disk, self._most_data_bytes):
                    if entry.data_bytes and self._is_needed(header, heads):
                        commit = commit_id(header)
                        found[commit] = entry.read(self._host.disk)
                        self._own[commit] = _Own(header, entry)
            except (OSError, ValueError) as error:
                log.warning("commits of an earlier life cannot be read", path=path, reason=str(error))
        return sorted(found.values(), key=lambda commit: (commit[0].shard, commit[0].version))

    def _import_old(self, heads: Sequence[Head | None]) -> dict[Digest, tuple[CommitHeader, bytes]]:
        """Append the own commits that an earlier release left in files of their own, and then remove the files. Return
        those that are needed, also where the disk takes nothing: rule E1 holds for them, too."""
        folder, disk = self._folder.parent / OLD_FOLDER, self._host.disk
        found = {}
        for name in disk.names(folder):
            if not name.endswith(OLD_SUFFIX):
                continue
            try:
                content = disk.read(folder / name)
                end = OLD_LENGTH_BYTES + int.from_bytes(content[:OLD_LENGTH_BYTES], "big")
                header, data = _decoded(content[OLD_LENGTH_BYTES:end]), content[end:]
            except (OSError, ValueError) as error:
                log.warning("a commit of an earlier release cannot be read", name=name, reason=str(error))
                continue
            if self._is_needed(header, heads):
                found[commit_id(header)] = header, data
            try:
                self._append(MADE, header, [data])
                self._sync()
                disk.remove(folder / name)
            except OSError as error:
                log.warning("a commit of an earlier release stays in its file", name=name, reason=str(error))
        return found

    def _is_needed(self, header: CommitHeader, heads: Sequence[Head | None]) -> bool:
        """Whether this is an own commit that ``heads`` have not left behind."""
        return header.owner == self._me and header.shard < len(heads) and not _is_left(header, heads)

    def append_own(self, header: CommitHeader, parts: CommitParts) -> None:
        """Append an own commit and sync it, unless the log has it."""
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
                log.warning("own commits are sent without being written, until the disk takes them", reason=reason)

        appending = self._appending[commit] = self._host.work("log", write)
        appending.add_done_callback(done)

    def is_appending(self, commit: Digest) -> bool:
        """Whether an own commit is on its way to the disk."""
        return commit in self._appending

    def when_durable(self, commit: Digest, then: Callable[[], None]) -> None:
        """Call ``then`` when an own commit is on the disk: at once, if it is not on its way there."""
        appending = self._appending.get(commit)
        if appending is None:
            then()
        else:
            appending.add_done_callback(lambda _: then())

    # -- checkpoints and others' commits -------------------------------------------------------------------------------

    async def begin_segment(self, heads: Sequence[Head | None], *, is_bounded: bool) -> int:
        """Begin the segment of a checkpoint whose shards are at ``heads``, by shard, or heavier ones; the number of
        both. ``is_bounded``: the commits of others will not follow, so that only the newest own commits matter.

        Raises:
            OSError: the disk takes nothing.
        """
        return await self._host.work("log", lambda: self._begin_after(heads, is_bounded=is_bounded))

    def _begin_after(self, heads: Sequence[Head | None], *, is_bounded: bool) -> int:
        """Begin a segment with a copy of the own commits that ``heads`` have not left behind, durably."""
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
                log.warning("an own commit cannot be read any more", version=own.header.version, reason=str(error))
                del self._own[commit]
            else:
                self._append(MADE, header, [data])
        self._sync()
        return number

    async def append(self, commits: Iterable[LoggedCommit]) -> set[ShardId]:
        """Append commits that have become heads, and sync them; the shards of which a payload is lost.

        Raises:
            OSError: the disk takes nothing; some of them may be there.
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
                log.warning("a commit is not logged", shard=header.shard, reason=str(error))
                lost.add(header.shard)
            else:
                self._append(TAKEN, header, parts)
        self._sync()
        return lost

    # -- the segment that is appended to -------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        """Begin a segment, durably."""
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
        """Append an entry, its data in one piece or several."""
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
        """Sync the segment. After a failure nobody knows what of it is on the disk: the next append begins another."""
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
        """Close the segment, and remove the one that was closed before it."""
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
    """Take what was committed since checkpoint ``first``, whose state is ``theta`` and ``momentum``, which become what
    the last commits give; the states, by shard, that are proved then. Blocks."""
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
            log.warning("commits since a checkpoint cannot be read", path=path, reason=str(error))
    if taken := sum(shard.taken for shard in replays):
        log.info("commits since the checkpoint were taken again", commits=taken)
    return tuple(shard.saved for shard in replays)


class ShardReplay:
    """Leads one shard's state on with the commits of the log."""

    def __init__(self, manifest: Manifest, saved: SavedState, theta: Tensor, momentum: Tensor) -> None:
        self.saved = saved
        self.taken = 0
        self._manifest = manifest
        piece = Layout.of(manifest).shards[saved.state.head.shard]
        self._vectors = theta[piece.start : piece.stop], momentum[piece.start : piece.stop]
        self._chain: Chain | None = None
        """From the first commit on."""
        self._made: dict[Digest, LogEntry] = {}
        """Own commits that were made since the checkpoint."""
        self._is_refusing = False
        """A commit was of no use."""

    def add(self, header: CommitHeader, entry: LogEntry, disk: Disk) -> None:
        """Handle the next entry about this shard: a commit that was taken becomes the head, if it is what it says; else
        nothing follows any more."""
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
                    "a commit since the checkpoint is of no use",
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
            raise ValueError("its digests are altered")
        new = torch.empty_like(theta), torch.empty_like(momentum)
        chunks = quantization.chunk_count(theta.numel())
        bodies = compression.split(parts.gradient, chunks, quantization.LARGEST_BODY)
        factors = outer_optimizer.factors_of(self._manifest.config.outer, header.version)
        for index, body in enumerate(bodies):
            span = slice(index * quantization.CHUNK, (index + 1) * quantization.CHUNK)
            outer_optimizer.step_aside(body, theta[span], momentum[span], (new[0][span], new[1][span]), **factors)
            if not digests.is_chunk(parts.digests, index, new[0][span], new[1][span]):
                raise ValueError("it does not give what its owner signed")
        theta.copy_(new[0])
        momentum.copy_(new[1])
        self.saved = saved
        self.taken += 1

    def _proved(self, header: CommitHeader, parts: CommitParts) -> SavedState:
        """Advance the chain by a commit, and return what is proved then."""
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
    """A shard's chain, as the machine has it that begins with this state."""
    shard = saved.state.head.shard
    config = protocol_config(manifest, PeerOptions(folder=Path()), manifest.founder)
    chain = Chain(shard, config.log_length, config.blocks, config.limits, config.sizes.elements[shard])
    chain.replace(saved.state, ancestors(saved, saved.lineage))
    return chain
