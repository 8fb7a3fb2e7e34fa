"""The digest of a shard's state, chunk by chunk.

A shard's state is cut into chunks of 256 Ki parameters, as its payloads are. A chunk's digest is that of its parameters
followed by its outer momentum, as they lie in bytes (``states``). The list of a shard is its chunks' digests, 20 bytes
each, one after the other; the digest of that list is the state's (a commit's ``result``).

Rules of this file:
1. Who merges computes the whole list, and it travels with the commit. Who takes the commit checks only a sample, that
   moves on with the version: a payload's digest and deterministic arithmetic leave bad memory and bad hardware as
   causes of a difference, and every chunk is looked at once in at most CYCLE versions.
2. The sample depends on nothing but the version, so that all peers refuse the same commits.
3. Chunks can be checked one by one against the list, whoever they come from.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from p2pdiloco.protocol.ids import DIGEST_BYTES, Digest, digest_of
from p2pdiloco.tensors.recipes import CHUNK
from p2pdiloco.tensors.states import as_bytes

CYCLE: Final = 8
"""Versions in which every chunk is checked at least once."""


def list_bytes(elements: int) -> int:
    """Length of the list of a shard of ``elements`` parameters."""
    return DIGEST_BYTES * -(-elements // CHUNK)


def chunk_digest(theta: Tensor, momentum: Tensor) -> bytes:
    """The digest of one chunk, both [at most 256 Ki]. Nothing is copied; the hash runs without the GIL."""
    return bytes.fromhex(digest_of(as_bytes(theta).data, as_bytes(momentum).data))


def digest_list(theta: Tensor, momentum: Tensor) -> bytes:
    """The list of a shard's state, both [n]."""
    starts = range(0, theta.numel(), CHUNK)
    return b"".join(chunk_digest(theta[at : at + CHUNK], momentum[at : at + CHUNK]) for at in starts)


def state_digest(theta: Tensor, momentum: Tensor) -> Digest:
    """The digest of a shard's state, both [n]."""
    return digest_of(digest_list(theta, momentum))


def is_chunk(digests: bytes, index: int, theta: Tensor, momentum: Tensor) -> bool:
    """Whether ``digests`` lists this state, [at most 256 Ki], as chunk ``index``."""
    return chunk_digest(theta, momentum) == digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]


def sample(elements: int, version: int) -> range:
    """Which chunks of a shard are checked when it takes ``version``: one of up to eight, every eighth of more."""
    chunks = -(-elements // CHUNK)
    stride = max(1, min(CYCLE, chunks))
    return range(-version % stride, chunks, stride)
