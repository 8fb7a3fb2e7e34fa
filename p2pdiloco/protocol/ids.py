"""Identifier types, and the one hash function that digests are made with.

Rules of this file:
1. An id is a string or an integer wrapped in a NewType, so that mypy keeps a shard from being taken for a fragment.
2. A digest is the first 20 bytes of BLAKE3 as 40 lower-case hexadecimal digits (the length that git made familiar):
   shards' states are digested, at 3.4 GB/s instead of BLAKE2b's 0.7 (benchmarks/wire/codec).
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import NewType

from blake3 import blake3

PeerId = NewType("PeerId", str)
"""A peer's libp2p id: base58 text derived from its public key (in the simulator any short name)."""

LearnerId = NewType("LearnerId", str)
"""Id of one process of a peer's learner: ``<peer id>/<incarnation>``. A restarted learner is a new learner."""

RunId = NewType("RunId", str)
"""Digest of the run's manifest."""

FragmentId = NewType("FragmentId", int)
ShardId = NewType("ShardId", int)
"""Index over all shards of the run, fragments in order."""

Digest = NewType("Digest", str)
"""40 hexadecimal digits."""

DIGEST_BYTES = 20


def digest_of(*parts: bytes | memoryview) -> Digest:
    """Return the digest of the concatenation of ``parts`` (bytes-like, contiguous)."""
    h = blake3()
    for part in parts:
        h.update(part)
    return Digest(h.hexdigest(DIGEST_BYTES))


def learner_id(peer: PeerId, incarnation: str) -> LearnerId:
    """Return the id of the learner that ``peer`` runs with this incarnation."""
    return LearnerId(f"{peer}/{incarnation}")


FINGERPRINT_BYTES = 4


@lru_cache(maxsize=32768)
def fingerprint(peer: PeerId, size: int = FINGERPRINT_BYTES) -> int:
    """Return the number of ``size`` bytes that stands for a peer: in heartbeats, and in chains (of eight bytes)."""
    return int.from_bytes(blake2b(peer.encode(), digest_size=size).digest(), "big")


def peer_of(learner: LearnerId) -> PeerId:
    """Return the peer that runs ``learner``."""
    return PeerId(learner.partition("/")[0])
