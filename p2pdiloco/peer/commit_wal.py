"""What was committed since a checkpoint, on the disk beside it: commits, each with what travels with it.

Rules of this file:
1. Segment N (``since-N.commits``) is begun before checkpoint N copies its first shard, and ends when the next one
   begins. So checkpoint N is led on by the segments from N on; where it is torn, the one before by those from that.
2. Bytes are appended and then forced to the disk. The end that a crash has torn ends its segment; what is altered costs
   the commits of its shard from there on. Nothing else is lost.
3. What is read back is taken as a live peer takes a commit: it extends its shard's head, fits its chain, bears its
   owner's signature, and gives what that owner signed, chunk by chunk, by the same arithmetic. Else its shard stays as
   it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from p2pdiloco.codec import compression, digests, outer_optimizer, quantization
from p2pdiloco.peer.host import Disk
from p2pdiloco.peer.options import PeerOptions, protocol_config
from p2pdiloco.peer.state_proof import SavedState, ancestors, lineage_of, proven_digest
from p2pdiloco.protocol.chain import Chain
from p2pdiloco.protocol.ids import digest_of
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.messages import Commit, CommitHeader, commit_id
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import CommitParts, SignedCommit, decode_message, encode, split_commit

log = logs.get("node")

PREFIX = "since-"
SUFFIX = ".commits"
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 16 << 20
MOST_BYTES_A_PARAMETER, MOST_BYTES_BESIDE = 4, 1 << 16
"""Of what travels with a commit: a codec takes two, digests less. A length beyond is an altered one."""


class Record(NamedTuple):
    """A commit in a segment, and where what travels with it lies."""

    header: CommitHeader
    start: int
    size: int


def path_of(folder: Path, number: int) -> Path:
    """Of a segment."""
    return folder / f"{PREFIX}{number:08d}{SUFFIX}"


def numbers(folder: Path, disk: Disk) -> list[int]:
    """Of the segments in ``folder``, the oldest first."""
    names = (name for name in disk.names(folder) if name.startswith(PREFIX) and name.endswith(SUFFIX))
    stems = (name.removeprefix(PREFIX).removesuffix(SUFFIX) for name in names)
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def remove(folder: Path, disk: Disk, before: int) -> None:
    """Remove the segments that come ``before`` a number.

    Raises:
        OSError: one cannot be removed.
    """
    for number in numbers(folder, disk):
        if number < before:
            disk.remove(path_of(folder, number))


def packed(header: CommitHeader, sent: Sequence[bytes | memoryview]) -> bytes:
    """A record; what was ``sent`` with the commit, in one piece or several."""
    body = encode(Commit(header))
    sizes = (len(body), sum(map(len, sent)))
    return b"".join((*(size.to_bytes(LENGTH_BYTES, "big") for size in sizes), body, *sent))


def records(path: Path, disk: Disk, most_bytes: int) -> Iterator[Record]:
    """Of one segment, up to what is torn or has more than ``most_bytes`` beside a commit.

    Raises:
        OSError: it cannot be read.
    """
    at = 0
    while len(lengths := disk.read(path, at, 2 * LENGTH_BYTES)) == 2 * LENGTH_BYTES:
        header_bytes, size = (int.from_bytes(lengths[i : i + LENGTH_BYTES], "big") for i in (0, LENGTH_BYTES))
        if header_bytes > MOST_HEADER_BYTES or size > most_bytes:
            return
        at += len(lengths)
        try:
            message = decode_message(disk.read(path, at, header_bytes))
        except ValueError:
            return
        at += header_bytes
        if not isinstance(message, Commit):
            return
        yield Record(message.header, at, size)
        at += size


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
    found = [_Shard(manifest, saved, theta, momentum) for saved in shards]
    largest = max(piece.elements for piece in Layout.of(manifest).shards)
    most_bytes = MOST_BYTES_A_PARAMETER * largest + MOST_BYTES_BESIDE
    for number in numbers(folder, disk):
        if number < first:
            continue
        path = path_of(folder, number)
        try:
            for record in records(path, disk, most_bytes):
                if record.header.shard < len(found) and found[record.header.shard].is_next(record.header):
                    found[record.header.shard].take(record.header, disk.read(path, record.start, record.size))
        except OSError as error:
            log.warning("commits since a checkpoint cannot be read", path=path, reason=str(error))
    if taken := sum(shard.taken for shard in found):
        log.info("commits since the checkpoint were taken again", commits=taken)
    return tuple(shard.saved for shard in found)


class _Shard:
    """One shard's state, led on."""

    def __init__(self, manifest: Manifest, saved: SavedState, theta: Tensor, momentum: Tensor) -> None:
        self.saved = saved
        self.taken = 0
        self._manifest = manifest
        piece = Layout.of(manifest).shards[saved.state.head.shard]
        self._vectors = theta[piece.start : piece.stop], momentum[piece.start : piece.stop]
        self._chain: Chain | None = None
        """From the first commit on."""
        self._refused = False

    def is_next(self, header: CommitHeader) -> bool:
        """Whether the commit extends the head."""
        head = self.saved.state.head
        return not self._refused and header.parent == head.id and header.version == head.version + 1

    def take(self, header: CommitHeader, data: bytes) -> None:
        """Make it the head, if it is what it says; else nothing follows any more."""
        try:
            self._take(header, data)
        except ValueError as error:
            self._refused = True
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
        saved = self._led_on(header, parts)
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

    def _led_on(self, header: CommitHeader, parts: CommitParts) -> SavedState:
        """What is proved after a commit; the chain goes on."""
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
