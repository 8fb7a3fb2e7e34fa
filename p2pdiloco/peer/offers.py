"""What a donor offers of a shard, and how it is checked.

One signature proves the list of its chunks' digests, one digest proves each chunk. A chunk travels as its parameters
followed by its momentum, float32, little-endian.

Everything here is pure; what it is given comes from other peers, or from a disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from p2pdiloco.peer.proofs import check_lineage, proven_digest
from p2pdiloco.peer.signatures import OPEN, Register
from p2pdiloco.protocol.identifiers import DIGEST_BYTES, Digest, ShardId, digest_of
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.messages import CommitHeader, commit_id
from p2pdiloco.tensors.digests import list_bytes
from p2pdiloco.tensors.recipes import CHUNK
from p2pdiloco.wire.bodies import LINEAGE_BYTES, MAX_LINEAGE, SignedCommit, StateOffer, StateProof, decode_as, encode

CHUNK_BYTES = 8 * CHUNK
"""Of every chunk but a shard's last."""


def chunk_sizes(elements: int) -> list[int]:
    """Bytes of the chunks of a shard of ``elements`` parameters."""
    return [8 * min(CHUNK, elements - start) for start in range(0, elements, CHUNK)]


def is_listed(offer: StateOffer, chunk: int, data: bytes | bytearray | memoryview) -> bool:
    """Whether ``data`` is chunk ``chunk`` of what is offered. Hashes without the GIL."""
    listed = offer.digests[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)]
    return bytes.fromhex(digest_of(memoryview(data))) == listed


def checked_offer(
    manifest: Manifest, layout: Layout, shard: ShardId, body: bytes, register: Register = OPEN
) -> StateOffer:
    """An offer that proves itself.

    Raises:
        UnknownMemberError: it is not known of somebody in its proof that it is a member.
        ValueError: malformed, of another shard, not signed by its owner, or with another list than was signed.
    """
    offer = decode_as(body, StateOffer)
    if offer.proof.state.head.shard != shard:
        raise ValueError(f"what is offered is not shard {shard}")
    result = proven_digest(manifest, offer.proof, register)
    if len(offer.digests) != list_bytes(layout.shards[shard].elements) or digest_of(offer.digests) != result:
        raise ValueError(f"the digests of the chunks of shard {shard} are not those that its owner signed")
    check_lineage(manifest.run, offer.proof.header, offer.lineage, register)
    return offer


def unbroken(proof: StateProof, lineage: Sequence[SignedCommit]) -> tuple[SignedCommit, ...]:
    """As much of ``lineage``, which was read from a disk, as leads to ``proof`` in an unbroken line."""
    header, found = proof.header, list[SignedCommit]()
    for earlier in reversed(lineage):
        if header is None or header.parent != commit_id(earlier.header):
            break
        found.append(earlier)
        header = earlier.header
    return tuple(reversed(found))


def ancestors(proof: StateProof, lineage: Sequence[SignedCommit]) -> tuple[Digest, ...]:
    """The heads that led to a state (all was checked), oldest first."""
    header = proof.header
    parents = [earlier.header.parent for earlier in lineage]
    return (*parents, header.parent) if header is not None else ()


def lineage_of(commits: Iterable[tuple[CommitHeader, bytes] | None]) -> tuple[SignedCommit, ...]:
    """Of a log's signed commits, newest first, as many as travel with an offer: an unbroken line, oldest first."""
    found, size = list[SignedCommit](), 0
    for commit in commits:
        size += 0 if commit is None else len(encode(commit))
        if commit is None or size > LINEAGE_BYTES or len(found) == MAX_LINEAGE:
            break
        found.append(SignedCommit(*commit))
    return tuple(reversed(found))


def packed(theta: Tensor, momentum: Tensor) -> memoryview:
    """A shard's whole state, both float32 [n], as it travels."""
    cuts = (slice(start, start + CHUNK) for start in range(0, theta.numel(), CHUNK))
    return np.concatenate([v[cut].numpy() for cut in cuts for v in (theta, momentum)]).data.cast("B")


def listed(data: bytes | memoryview) -> bytes:
    """The list of the digests of a shard's whole state, as it travels."""
    view = memoryview(data)
    cuts = (view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES))
    return b"".join(bytes.fromhex(digest_of(cut)) for cut in cuts)


def unpacked(data: bytes | memoryview, theta: Tensor, momentum: Tensor) -> bytes:
    """Put a shard's whole state, as it travels, into ``theta`` and ``momentum``, float32 [n]; the list of its digests.

    Raises:
        ValueError: it has another size.
    """
    if len(data) != 8 * theta.numel():
        raise ValueError(f"it has {len(data)} bytes, not {8 * theta.numel()}")
    values, new, moved = np.frombuffer(data, np.float32), theta.numpy(), momentum.numpy()
    for start in range(0, theta.numel(), CHUNK):
        span = slice(start, min(start + CHUNK, theta.numel()))
        new[span], moved[span] = np.split(values[2 * span.start : 2 * span.stop], 2)
    return listed(data)
