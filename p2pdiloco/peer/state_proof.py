"""State proofs: prove that a shard's state belongs to the run, by the commit its owner signed or the manifest (version
0)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from p2pdiloco.codec.digests import StateForm, list_bytes
from p2pdiloco.peer.signatures import (
    OPEN,
    FalseContributionError,
    Register,
    Selection,
    UnknownMemberError,
    all_of,
    check_commit,
    drawn,
    none_of,
)
from p2pdiloco.protocol.chain import genesis_head, record_of
from p2pdiloco.protocol.data_blocks import BlockLedger, Trained
from p2pdiloco.protocol.ids import DIGEST_BYTES, Digest, PeerId, RunId, ShardId, digest_of, peer_of
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.messages import CommitHeader, commit_id
from p2pdiloco.protocol.norm_bound import NO_NORM
from p2pdiloco.wire.control_messages import (
    LINEAGE_BYTES,
    MAX_LINEAGE,
    SignedCommit,
    StateOffer,
    StateProof,
    decode_as,
    encode,
)


class SavedState(StateProof, frozen=True, array_like=True):
    """A shard's state as it is saved on disk."""

    lineage: tuple[SignedCommit, ...] = ()
    """The commits before its own, oldest first. After a restart, a fork that grew meanwhile is compared with them."""


def proven_digest(
    manifest: Manifest, proof: StateProof, register: Register = OPEN, selection: Selection = none_of
) -> Digest:
    """Verify a proof; return the digest that the shard's tensors must have.

    The digest is the one that the commit's owner signed, or the manifest's at version 0. Step, marks and trained blocks
    of the state must match the commit too.

    ``selection``: contributions of its commit whose signatures are checked. None of what this peer has saved.

    Raises:
        UnknownMemberError: a signer is not known as a member.
        FalseContributionError: the commit names a contribution that was not made.
        ValueError: the proof does not prove its state.
    """
    state, header = proof.state, proof.header
    head = state.head
    if head.version == 0:
        genesis = manifest.genesis[head.shard]
        if head != genesis_head(manifest.run, head.shard, genesis):
            raise ValueError(f"version 0 of shard {head.shard} belongs to another run")
        if (
            state.step
            or state.marks
            or state.norm_bound != NO_NORM
            or state.trained not in (Trained(), _nothing(manifest))
        ):
            raise ValueError(f"version 0 of shard {head.shard} counts tokens that nobody has trained")
        return genesis
    if header is None or commit_id(header) != head.id or header.shard != head.shard or header.tokens != head.tokens:
        raise ValueError(f"the head of shard {head.shard} is not the commit that came with it")
    if header.step != state.step:
        raise ValueError(f"the state of shard {head.shard} has another step than its commit")
    if header.version != head.version:
        raise ValueError(f"the head of shard {head.shard} has another version than its commit")
    if header.counts != state.counts:
        raise ValueError(f"the state of shard {head.shard} counts other tokens than its commit")
    if header.record != record_of(dict(state.marks), state.trained, state.norm_bound):
        raise ValueError(f"the state of shard {head.shard} counts other tokens or blocks than its commit")
    try:
        check_commit(manifest.run, header, proof.signature, register, selection)
    except (UnknownMemberError, FalseContributionError):
        raise
    except ValueError as error:
        raise ValueError(f"the commit of shard {head.shard}: {error}") from error
    return header.result


def check_lineage(
    run: RunId,
    head: CommitHeader | None,
    lineage: Sequence[SignedCommit],
    register: Register = OPEN,
    selection: Selection = all_of,
) -> None:
    """Verify that ``lineage`` is an unbroken chain of signed commits to ``head``, whose contributions add up to its
    tokens.

    Raises:
        UnknownMemberError: a signer is not known as a member.
        FalseContributionError: a commit names a contribution that was not made.
        ValueError: it is not.
    """
    for earlier in reversed(lineage):
        header = earlier.header
        is_parent = head is not None and head.parent == commit_id(header) and head.version == header.version + 1
        if head is None or not is_parent or head.shard != header.shard:
            raise ValueError(f"the lineage of shard {header.shard} is broken at version {header.version}")
        _check_tokens(head, header)
        check_commit(run, header, earlier.signature, register, selection)
        head = header


def _check_tokens(header: CommitHeader, parent: CommitHeader) -> None:
    given = {peer_of(c.learner): c.tokens for c in header.contributors}
    if len(given) < len(header.contributors):
        raise ValueError(f"version {header.version} of shard {header.shard} names two learners of one peer")
    if len(header.factors) not in (0, len(given)):
        raise ValueError(f"version {header.version} of shard {header.shard} has not one factor for each contributor")
    tokens, counts = parent.counts.count(header.version, given, first=1, factors=header.counted_factors)
    if header.tokens != parent.tokens + tokens or header.counts != counts:
        raise ValueError(f"version {header.version} of shard {header.shard} counts tokens that nobody contributed")


def _nothing(manifest: Manifest) -> Trained:
    """Return the trained blocks of version 0 of a run whose data is divided into blocks."""
    blocks = manifest.blocks.number
    return BlockLedger(blocks).state() if blocks else Trained()


# -- State offers ------------------------------------------------------------------------------------------------------
# A donor's offer of a shard, and its verification. Everything here is pure. The input comes from other peers or from
# disk, so it is not trusted.


def is_listed(offer: StateOffer, chunk: int, data: bytes | bytearray | memoryview, form: StateForm) -> bool:
    """Return whether ``data`` is chunk ``chunk`` of the offer, and finite. Releases the GIL while hashing."""
    listed = offer.digests[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)]
    return bytes.fromhex(digest_of(memoryview(data))) == listed and form.is_finite(memoryview(data))


def checked_offer(
    manifest: Manifest,
    layout: Layout,
    shard: ShardId,
    body: bytes,
    register: Register = OPEN,
    draws: Random | None = None,
) -> StateOffer:
    """Decode and verify an offer of ``shard``.

    ``draws``: draws contributions of the lineage whose signatures are checked, besides all of the head's; None: this
    peer had verified the offer before it saved it.

    Raises:
        UnknownMemberError: a signer of its proof is not known as a member.
        FalseContributionError: one of its commits names a contribution that was not made.
        ValueError: it is malformed, of another shard, not signed by its owner, or its digests are not the signed ones.
    """
    offer = decode_as(body, StateOffer)
    if offer.proof.state.head.shard != shard:
        raise ValueError(f"the offer is not of shard {shard}")
    result = proven_digest(manifest, offer.proof, register, none_of if draws is None else all_of)
    if len(offer.digests) != list_bytes(layout.shards[shard].elements) or digest_of(offer.digests) != result:
        raise ValueError(f"the chunk digests of shard {shard} are not those that its owner signed")
    selection = none_of if draws is None else drawn(draws)
    check_lineage(manifest.run, offer.proof.header, offer.lineage, register, selection)
    return offer


def unbroken_lineage(proof: StateProof, lineage: Sequence[SignedCommit]) -> tuple[SignedCommit, ...]:
    """Return the end of ``lineage``, as read from disk, that leads to ``proof`` without a gap."""
    header, found = proof.header, list[SignedCommit]()
    for earlier in reversed(lineage):
        if header is None or header.parent != commit_id(earlier.header):
            break
        found.append(earlier)
        header = earlier.header
    return tuple(reversed(found))


def ancestors(proof: StateProof, lineage: Sequence[SignedCommit]) -> tuple[Digest, ...]:
    """Return the heads that led to a verified state, oldest first."""
    header = proof.header
    parents = [earlier.header.parent for earlier in lineage]
    return (*parents, header.parent) if header is not None else ()


def owner_of(proof: StateProof) -> PeerId:
    """Return the peer that signed the commit at a verified state's head; an empty ID for version 0."""
    return PeerId("") if proof.header is None else proof.header.owner


def lineage_of(commits: Iterable[tuple[CommitHeader, bytes] | None]) -> tuple[SignedCommit, ...]:
    """Return the newest signed commits as an unbroken chain, oldest first, as many as fit into an offer.

    ``commits`` come newest first; None is a gap.
    """
    found, size = list[SignedCommit](), 0
    for commit in commits:
        size += 0 if commit is None else len(encode(commit))
        if commit is None or size > LINEAGE_BYTES or len(found) == MAX_LINEAGE:
            break
        found.append(SignedCommit(*commit))
    return tuple(reversed(found))
