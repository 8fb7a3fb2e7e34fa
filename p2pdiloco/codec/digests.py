"""Digests of a shard's state, chunk by chunk.

A shard's state is cut into chunks of 256 Ki parameters, as its payloads are. A chunk's digest covers its parameters
followed by its outer momentum, in the byte layout below. The digest list of a shard is the concatenation of its chunks'
digests, 20 bytes each. The digest of that list is the digest of the state (a commit's ``result``).

Rules of this file:
1. The owner computes the whole list, and the list travels with the commit. Other peers check only a sample, an eighth
   of the chunks. A payload's digest and deterministic arithmetic leave bad memory, bad hardware and a lying owner as
   causes of a difference.
2. Each peer draws its sample at random, so that the owner does not know which chunks nobody checks. Where most have
   applied a commit that this peer refused, it follows them (``protocol/state_acceptance.py``).
3. Each chunk can be checked against the list by itself, whichever peer it comes from.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from p2pdiloco.codec.formats import CHUNK
from p2pdiloco.protocol.ids import DIGEST_BYTES, Digest, digest_of
from p2pdiloco.protocol.manifest import MomentumType, OuterConfig
from p2pdiloco.protocol.manifest_defaults import momentum_type

if TYPE_CHECKING:
    from numpy.typing import NDArray


# -- Layout of a shard's state -----------------------------------------------------------------------------------------
# A shard's state has the same byte layout in memory, on disk and on the wire: chunk by chunk (256 Ki parameters), each
# chunk's parameters, then its momentum, little-endian. Parameters are float32; the manifest sets the type of momentum.


_TYPES: Final[dict[MomentumType, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
THETA_BYTES: Final = 4


class StateForm(NamedTuple):
    """Layout of the states of a run."""

    momentum: torch.dtype = torch.float32

    @staticmethod
    def of(outer: OuterConfig) -> StateForm:
        """Return the layout of a run's states, whichever release created the run."""
        return StateForm(_TYPES[momentum_type(outer)])

    @property
    def width(self) -> int:
        """Bytes of one parameter and its momentum."""
        return THETA_BYTES + self.momentum.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of every chunk but a shard's last."""
        return self.width * CHUNK

    def chunk_sizes(self, elements: int) -> list[int]:
        """Return the sizes in bytes of the chunks of a shard of ``elements`` parameters."""
        return [self.width * min(CHUNK, elements - start) for start in range(0, elements, CHUNK)]

    def still(self, elements: int) -> Tensor:
        """Return the momentum of version 0: zeros, [elements].

        Its pages are allocated on the first write (``torch.zeros`` would write them at once).
        """
        return torch.from_numpy(np.zeros(elements * self.momentum.itemsize, np.uint8)).view(self.momentum)

    def vectors(self, chunk: bytes | memoryview) -> tuple[Tensor, Tensor]:
        """Return one chunk's parameters, float32 [n], and momentum, [n]. They share its memory and are read-only."""
        cut = len(chunk) // self.width * THETA_BYTES
        raw = np.frombuffer(chunk, np.uint8)
        if not raw.flags.writeable:  # torch warns about read-only arrays
            raw = raw.copy()
        both = torch.from_numpy(raw)
        return both[:cut].view(torch.float32), both[cut:].view(self.momentum)

    def is_finite(self, chunk: bytes | memoryview) -> bool:
        """Return whether all of one chunk's parameters and momentum are finite."""
        return all(bool(vector.isfinite().all()) for vector in self.vectors(chunk))

    def listed(self, data: bytes | memoryview) -> bytes:
        """Return the digest list of a shard's whole state."""
        view = memoryview(data)
        cuts = (view[at : at + self.chunk_bytes] for at in range(0, len(view), self.chunk_bytes))
        return b"".join(bytes.fromhex(digest_of(cut)) for cut in cuts)

    def unpacked(self, data: bytes | memoryview, theta: Tensor, momentum: Tensor) -> bytes:
        """Copy a shard's whole state into ``theta``, float32 [n], and ``momentum``, [n]; return its digest list.

        Raises:
            ValueError: ``data`` has the wrong size.
        """
        if len(data) != self.width * theta.numel():
            raise ValueError(f"the state has {len(data)} bytes, not {self.width * theta.numel()}")
        values, at = np.frombuffer(data, np.uint8), 0
        for start in range(0, theta.numel(), CHUNK):
            for vector in (theta, momentum):
                piece = as_bytes(vector[start : start + CHUNK])
                piece[:] = values[at : at + piece.size]
                at += piece.size
        return self.listed(data)


def packed(theta: Tensor, momentum: Tensor) -> memoryview:
    """Return a shard's whole state in bytes, from its parameters, float32 [n], and its momentum, [n]."""
    cuts = (slice(start, start + CHUNK) for start in range(0, theta.numel(), CHUNK))
    return np.concatenate([as_bytes(v[cut]) for cut in cuts for v in (theta, momentum)]).data


def as_bytes(vector: Tensor) -> NDArray[np.uint8]:
    """Return a vector's bytes, without a copy if it is contiguous."""
    found: NDArray[np.uint8] = vector.detach().contiguous().view(torch.uint8).numpy()
    return found


# -- Digests -----------------------------------------------------------------------------------------------------------


CYCLE: Final = 8
"""Versions in which a chunk is checked once on average."""


def list_bytes(elements: int) -> int:
    """Return the length in bytes of the digest list of a shard of ``elements`` parameters."""
    return DIGEST_BYTES * -(-elements // CHUNK)


def chunk_digest(theta: Tensor, momentum: Tensor) -> bytes:
    """Return the digest of one chunk, both [at most 256 Ki]. Nothing is copied; the hash runs without the GIL."""
    return bytes.fromhex(digest_of(as_bytes(theta).data, as_bytes(momentum).data))


def digest_list(theta: Tensor, momentum: Tensor) -> bytes:
    """Return the digest list of a shard's state, both [n]."""
    starts = range(0, theta.numel(), CHUNK)
    return b"".join(chunk_digest(theta[at : at + CHUNK], momentum[at : at + CHUNK]) for at in starts)


def state_digest(theta: Tensor, momentum: Tensor) -> Digest:
    """Return the digest of a shard's state, both [n]."""
    return digest_of(digest_list(theta, momentum))


def is_chunk(digests: bytes, index: int, theta: Tensor, momentum: Tensor) -> bool:
    """Return whether ``digests`` lists this state, [at most 256 Ki], as chunk ``index``."""
    return chunk_digest(theta, momentum) == digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]


def sample(elements: int, draw: random.Random) -> list[int]:
    """Draw the chunks of a shard that are checked for a version: an eighth of them, at least one."""
    chunks = -(-elements // CHUNK)
    return sorted(draw.sample(range(chunks), -(-chunks // CYCLE)))
