"""Verifies that a shard's state is what its head stands for: the owner signed the digests of its chunks, and memory
flips a bit now and then.

Rules of this file:
1. A chunk that was seen to have its digest counts as verified until the head moves, or ``look_again`` is said.
2. A shard with a chunk that has not is spoilt: nothing is given, merged or handed on from it until it was installed
   anew (``protocol/replication.py``), or accepted as it is since nobody else has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from p2pdiloco.codec import digests
from p2pdiloco.protocol.ids import ShardId


class SpoiltStateError(Exception):
    """This peer's own state is not what its head stands for: bad memory, or a defect."""

    def __init__(self, shard: ShardId, chunk: int) -> None:
        super().__init__(
            f"chunk {chunk} of shard {shard} is not what its owner signed: this machine's memory altered it"
        )
        self.shard = shard


class Integrity:
    """Which chunks of each shard have been verified."""

    def __init__(self, chunk_counts: Sequence[int]) -> None:
        self._chunk_counts = chunk_counts
        self.digests = [b""] * len(chunk_counts)
        """Of the chunks of each shard's state, as the owner of its head signed them; empty without a state."""
        self._verified: list[set[int]] = [set() for _ in chunk_counts]
        """Chunks that had the digests of their shard's present head when they were looked at."""
        self._spoilt: set[ShardId] = set()
        self._unsigned: set[ShardId] = set()
        """Accepted though spoilt: they are not what their head's owner signed, and are not handed on."""

    def set_digests(self, shard: ShardId, listed: bytes) -> None:
        """Take the ``listed`` digests of a shard's new state; nothing of it is verified yet."""
        self.digests[shard] = listed
        self._verified[shard].clear()
        self._spoilt.discard(shard)
        self._unsigned.discard(shard)

    def accept(self, shard: ShardId, listed: bytes) -> None:
        """Take a spoilt state as it is."""
        self.set_digests(shard, listed)
        self._unsigned.add(shard)

    def verify(self, shard: ShardId, chunk: int, theta: Tensor, momentum: Tensor) -> None:
        """Verify that one chunk still has its digest.

        Raises:
            SpoiltStateError: it has not; the shard is of no use until its state was installed anew.
        """
        if not self.digests[shard] or shard in self._spoilt:
            return
        if not digests.is_chunk(self.digests[shard], chunk, theta, momentum):
            self._spoilt.add(shard)
            raise SpoiltStateError(shard, chunk)
        self._verified[shard].add(chunk)

    def is_verified(self, shard: ShardId, chunk: int) -> bool:
        """Whether the chunk was looked at since the shard has its head."""
        return chunk in self._verified[shard]

    def unverified(self, shard: ShardId) -> list[int]:
        """Chunks that nobody has looked at since the shard has its head."""
        verified, chunks = self._verified[shard], self._chunk_counts[shard]
        if len(verified) == chunks or not self.digests[shard] or shard in self._spoilt:
            return []
        return [chunk for chunk in range(chunks) if chunk not in verified]

    def is_spoilt(self, shard: ShardId) -> bool:
        """Whether it is to be installed anew, or accepted as it is."""
        return shard in self._spoilt

    def is_unsigned(self, shard: ShardId) -> bool:
        """Whether it was accepted as it is."""
        return shard in self._unsigned

    def invalidate(self) -> None:
        """Forget what was verified: it may have changed since."""
        for verified in self._verified:
            verified.clear()
