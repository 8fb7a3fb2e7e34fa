"""What a donor offers of a shard, and how it is checked.

One signature proves the list of its chunks' digests, one digest proves each chunk. How it lies in bytes:
``codec/digests.py``.

Everything here is pure; what it is given comes from other peers, or from a disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from p2pdiloco.codec.digests import StateForm, list_bytes
from p2pdiloco.peer.proofs import check_lineage, proven_digest
from p2pdiloco.peer.signatures import OPEN, Register
from p2pdiloco.protocol.ids import DIGEST_BYTES, Digest, PeerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.messages import CommitHeader, commit_id
from p2pdiloco.wire.control_messages import (
    LINEAGE_BYTES,
    MAX_LINEAGE,
    SignedCommit,
    StateOffer,
    StateProof,
    decode_as,
    encode,
)


def is_listed(offer: StateOffer, chunk: int, data: bytes | bytearray | memoryview, form: StateForm) -> bool:
    """Whether ``data`` is chunk ``chunk`` of what is offered, and finite. Hashes without the GIL."""
    listed = offer.digests[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)]
    return bytes.fromhex(digest_of(memoryview(data))) == listed and form.is_finite(memoryview(data))


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


def owner_of(proof: StateProof) -> PeerId:
    """Who made and signed the commit at a state's head (all was checked); nobody has made version 0."""
    return PeerId("") if proof.header is None else proof.header.owner


def lineage_of(commits: Iterable[tuple[CommitHeader, bytes] | None]) -> tuple[SignedCommit, ...]:
    """Of a log's signed commits, newest first, as many as travel with an offer: an unbroken line, oldest first."""
    found, size = list[SignedCommit](), 0
    for commit in commits:
        size += 0 if commit is None else len(encode(commit))
        if commit is None or size > LINEAGE_BYTES or len(found) == MAX_LINEAGE:
            break
        found.append(SignedCommit(*commit))
    return tuple(reversed(found))
