"""Integrity of the model state in memory: verifies that each chunk has the digest that its owner signed.

Memory without error correction flips a bit now and then.

Rules of this file:
1. A chunk that was verified counts as verified until the shard's head moves, or until ``invalidate``.
2. If a chunk fails, its shard is corrupted: nothing of it is sent, merged or contributed until it was installed again
   (``protocol/replication.py``), or accepted as it is because nobody else has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from p2pdiloco.codec import digests
from p2pdiloco.protocol.ids import ShardId


class SpoiltStateError(Exception):
    """This peer's state of a shard does not match its head: bad memory, or a defect."""

    def __init__(self, shard: ShardId, chunk: int) -> None:
        super().__init__(
            f"chunk {chunk} of shard {shard} does not match its owner's signature: this machine's memory altered it"
        )
        self.shard = shard


class Integrity:
    """Tracks which chunks of each shard have been verified, and which shards are corrupted."""

    def __init__(self, chunk_counts: Sequence[int]) -> None:
        self._chunk_counts = chunk_counts
        # Chunk digests of each shard's state, as the owner of its head signed them; empty without a state.
        self.digests = [b""] * len(chunk_counts)
        # Chunks, by shard, that were verified since the shard has its present head.
        self._verified: list[set[int]] = [set() for _ in chunk_counts]
        self._spoilt: set[ShardId] = set()
        # Shards that were accepted although corrupted. They do not match their head, so they are not served to others.
        self._unsigned: set[ShardId] = set()

    def set_digests(self, shard: ShardId, listed: bytes) -> None:
        """Set the chunk digests of a shard's new state. None of its chunks counts as verified yet."""
        self.digests[shard] = listed
        self._verified[shard].clear()
        self._spoilt.discard(shard)
        self._unsigned.discard(shard)

    def accept(self, shard: ShardId, listed: bytes) -> None:
        """Accept a corrupted state as it is, with the digests that it has."""
        self.set_digests(shard, listed)
        self._unsigned.add(shard)

    def verify(self, shard: ShardId, chunk: int, theta: Tensor, momentum: Tensor) -> None:
        """Verify that one chunk still has its digest.

        Raises:
            SpoiltStateError: it does not. The shard is unusable until its state was installed again.
        """
        if not self.digests[shard] or shard in self._spoilt:
            return
        if not digests.is_chunk(self.digests[shard], chunk, theta, momentum):
            self._spoilt.add(shard)
            raise SpoiltStateError(shard, chunk)
        self._verified[shard].add(chunk)

    def is_verified(self, shard: ShardId, chunk: int) -> bool:
        """Return whether the chunk was verified since the shard has its present head."""
        return chunk in self._verified[shard]

    def unverified(self, shard: ShardId) -> list[int]:
        """Return the chunks that were not verified since the shard has its present head."""
        verified, chunks = self._verified[shard], self._chunk_counts[shard]
        if len(verified) == chunks or not self.digests[shard] or shard in self._spoilt:
            return []
        return [chunk for chunk in range(chunks) if chunk not in verified]

    def is_spoilt(self, shard: ShardId) -> bool:
        """Return whether the shard must be installed again, or accepted as it is."""
        return shard in self._spoilt

    def is_unsigned(self, shard: ShardId) -> bool:
        """Return whether the shard was accepted as it is."""
        return shard in self._unsigned

    def invalidate(self) -> None:
        """Mark all chunks as unverified, because memory may have changed since."""
        for verified in self._verified:
            verified.clear()
