"""What proves that a shard's state is the run's: the commit that its owner signed, or the manifest at version 0."""

from __future__ import annotations

from collections.abc import Sequence

from p2pdiloco.peer.signatures import OPEN, Register, UnknownMemberError, check_commit
from p2pdiloco.protocol.chain import genesis_head, record_of
from p2pdiloco.protocol.data_blocks import BlockLedger, Trained
from p2pdiloco.protocol.ids import Digest, RunId
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.protocol.messages import CommitHeader, commit_id
from p2pdiloco.wire.control_messages import SignedCommit, StateProof


class SavedState(StateProof, frozen=True, array_like=True):
    """A shard's state as it lies on disk."""

    lineage: tuple[SignedCommit, ...] = ()
    """The commits before its own, oldest first: what a fork that grew meanwhile is compared with after a restart."""


def proven_digest(manifest: Manifest, proof: StateProof, register: Register = OPEN) -> Digest:
    """The digest that the shard's tensors must have: the commit's that its owner signed (the manifest's, at version 0).
    Nothing of a state stands beside that: step, marks and trained blocks are the commit's, too.

    Raises:
        UnknownMemberError: one of its signers is not known as a member.
        ValueError: the proof does not prove its state.
    """
    state, header = proof.state, proof.header
    head = state.head
    if head.version == 0:
        genesis = manifest.genesis[head.shard]
        if head != genesis_head(manifest.run, head.shard, genesis):
            raise ValueError(f"version 0 of shard {head.shard} is not this run's")
        if state.step or state.marks or state.stride.counted or state.trained not in (Trained(), _nothing(manifest)):
            raise ValueError(f"version 0 of shard {head.shard} counts what nobody has trained")
        return genesis
    if header is None or commit_id(header) != head.id or header.shard != head.shard or header.tokens != head.tokens:
        raise ValueError(f"the head of shard {head.shard} is not the commit that came with it")
    if header.step != state.step:
        raise ValueError(f"the state of shard {head.shard} is of another step than its commit")
    if header.version != head.version:
        raise ValueError(f"the head of shard {head.shard} has another version than its commit")
    if header.usual != state.usual:
        raise ValueError(f"the state of shard {head.shard} has other usual tokens than its commit")
    if header.record != record_of(dict(state.marks), state.trained, state.stride):
        raise ValueError(f"the state of shard {head.shard} counts other tokens or blocks than its commit")
    try:
        check_commit(manifest.run, header, proof.signature, register)
    except UnknownMemberError:
        raise
    except ValueError as error:
        raise ValueError(f"the commit of shard {head.shard}: {error}") from error
    return header.result


def check_lineage(
    run: RunId, head: CommitHeader | None, lineage: Sequence[SignedCommit], register: Register = OPEN
) -> None:
    """Whether ``lineage`` is an unbroken line of signed commits that leads to ``head``, each of tokens that were given.

    Raises:
        UnknownMemberError: one of its signers is not known as a member.
        ValueError: it is not.
    """
    for earlier in reversed(lineage):
        header = earlier.header
        is_parent = head is not None and head.parent == commit_id(header) and head.version == header.version + 1
        if head is None or not is_parent or head.shard != header.shard:
            raise ValueError(f"the lineage of shard {header.shard} is broken at version {header.version}")
        _check_tokens(head, header)
        check_commit(run, header, earlier.signature, register)
        head = header


def _check_tokens(header: CommitHeader, parent: CommitHeader) -> None:
    tokens, usual = parent.usual.count([c.tokens for c in header.contributors], first=1)
    if header.tokens != parent.tokens + tokens or header.usual != usual:
        raise ValueError(f"version {header.version} of shard {header.shard} counts tokens that nobody gave")


def _nothing(manifest: Manifest) -> Trained:
    """Of a run whose data are in blocks."""
    blocks = manifest.blocks.number
    return BlockLedger(blocks).state() if blocks else Trained()
