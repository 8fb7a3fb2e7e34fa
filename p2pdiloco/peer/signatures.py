"""Signature checks: contributions by their learners' peers, commits by their owners.

Rules of this file:
1. A learner's ID contains its peer's ID, which is the peer's public key. A statement in a learner's name is thus
   verified with nothing but that name.
2. A commit needs more than its owner's signature. Each contribution that it names bears the signature of its learner's
   peer, over the run, the shard and the head that the commit follows. A receiver checks them all, so that honest peers
   refuse the same commits. Of the commits that led to a state, it checks a few contributions each. One that is not
   signed is proof against the owner.
3. Every signer must be, or have been, a member; a contributor must have been allowed to contribute. A register knows
   this. An unknown signer may be a member that only other peers have heard of, so they are asked before anything is
   dropped.
4. The signers of a commit are no more peers of an invite than it admits: its owner merged no more guests than that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import Protocol

from msgspec.structs import replace

from p2pdiloco.protocol import messages
from p2pdiloco.protocol.ids import Digest, PeerId, RunId, ShardId, peer_of
from p2pdiloco.protocol.messages import (
    CommitHeader,
    Contributor,
    Equivocation,
    GroupMerge,
    Proof,
    WrongMerge,
    commit_id,
)
from p2pdiloco.transport.identity import Identity, verify
from p2pdiloco.wire.control_messages import GetStatements, TellStatements
from p2pdiloco.wire.request_reply import Answer


class Register(Protocol):
    """Knows which peers are or were members of the run."""

    def was_member(self, peer: PeerId) -> bool:
        """Return whether ``peer`` is or was a member. Its signatures of that time stay valid."""

    def may_contribute(self, peer: PeerId) -> bool:
        """Return whether contributions of ``peer`` may be merged."""

    def invite_problem(self, peers: Collection[PeerId]) -> str | None:
        """Return why ``peers`` cannot have been admitted together: an invite of theirs admits fewer. None: they can."""


class OpenRegister:
    """The register of a run that is open to all."""

    def was_member(self, peer: PeerId) -> bool:
        """Return True: every peer may be a member."""
        return True

    def may_contribute(self, peer: PeerId) -> bool:
        """Return True: every peer may contribute."""
        return True

    def invite_problem(self, peers: Collection[PeerId]) -> str | None:
        """Return None: nobody needs an invite."""


OPEN = OpenRegister()


class UnknownMemberError(ValueError):
    """A signer is not known as a member. Other peers may know it."""


class ForgedError(ValueError):
    """A digest or a signature does not match. No honest peer sends that, whatever it knows of members."""


class FalseContributionError(ForgedError):
    """An owner signed a commit that names a contribution which its learner's peer did not sign.

    Attributes:
        proof: the commit, with its owner's signature.
    """

    def __init__(self, proof: WrongMerge, message: str) -> None:
        super().__init__(message)
        self.proof = proof


DRAWN = 4
"""Contributions of each commit of a lineage whose signatures are checked."""
Selection = Callable[[CommitHeader], Sequence[Contributor]]
"""Returns the contributions of a commit whose signatures are checked."""


def all_of(header: CommitHeader) -> Sequence[Contributor]:
    """Return all contributions."""
    return header.contributors


def none_of(header: CommitHeader) -> Sequence[Contributor]:
    """Return no contribution: for what this peer had verified before it saved it."""
    return ()


def all_but(mine: tuple[Digest, Contributor] | None) -> Selection:
    """Select all contributions but the one that this peer signed itself, on the given head."""
    return lambda header: [c for c in header.contributors if (header.parent, c) != mine]


def drawn(random: Random) -> Selection:
    """Select ``DRAWN`` contributions of each commit."""
    return lambda header: random.sample(header.contributors, min(DRAWN, len(header.contributors)))


def signed(
    identity: Identity, run: RunId, shard: ShardId, base: Digest, contributor: Contributor, payload: Digest
) -> Contributor:
    """Return ``contributor`` with its payload's digest and its peer's signature, which add 88 bytes."""
    whole = replace(contributor, payload=bytes.fromhex(payload))
    return replace(whole, signature=identity.sign(messages.signed_contribution_bytes(run, shard, base, whole)))


def signed_group(identity: Identity, run: RunId, shard: ShardId, base: Digest, group: GroupMerge) -> GroupMerge:
    """Return a group's merge with its collector's signature."""
    return replace(group, signature=identity.sign(messages.signed_group_bytes(run, shard, base, group)))


def check_contributor(
    run: RunId, shard: ShardId, base: Digest, contributor: Contributor, register: Register = OPEN
) -> None:
    """Verify that the contributor's peer signed this contribution on this base.

    Raises:
        UnknownMemberError: the peer is not known as a member.
        ForgedError: the signature is invalid.
        ValueError: the peer may not contribute.
    """
    _check_giver(contributor, register)
    if not _is_signed(run, shard, base, contributor):
        raise ForgedError(f"the contribution of learner {contributor.learner} does not bear its peer's signature")


def _check_giver(contributor: Contributor, register: Register) -> None:
    giver = peer_of(contributor.learner)
    if not register.was_member(giver):
        raise UnknownMemberError(f"{giver} is not known as a member of the run")
    if not register.may_contribute(giver):
        raise ValueError(f"{giver} is a follower and may not contribute")


def _is_signed(run: RunId, shard: ShardId, base: Digest, contributor: Contributor) -> bool:
    statement = messages.signed_contribution_bytes(run, shard, base, contributor)
    return verify(peer_of(contributor.learner), statement, contributor.signature)


def check_group(run: RunId, shard: ShardId, base: Digest, group: GroupMerge, register: Register = OPEN) -> None:
    """Verify that the collector signed its group's merge.

    Raises:
        UnknownMemberError: it is not known as a member.
        ForgedError: the signature is invalid.
    """
    if not register.was_member(group.collector):
        raise UnknownMemberError(f"{group.collector} is not known as a member of the run")
    if not verify(group.collector, messages.signed_group_bytes(run, shard, base, group), group.signature):
        raise ForgedError(f"the merge of {group.collector} does not bear its signature")


def check_commit(
    run: RunId,
    header: CommitHeader,
    signature: bytes,
    register: Register = OPEN,
    selection: Selection = all_of,
) -> None:
    """Verify that the owner signed this commit, and that its contributions were made on its parent.

    ``selection``: the contributions whose signatures are checked.

    Raises:
        UnknownMemberError: a signer is not known as a member.
        ForgedError: the owner's signature is invalid.
        FalseContributionError: the signature of a contribution, or of a group's merge, is invalid.
        ValueError: a contributor may not contribute, or there are more peers of an invite than it admits.
    """
    if not register.was_member(header.owner):
        raise UnknownMemberError(f"its owner {header.owner} is not known as a member of the run")
    if not verify(header.owner, messages.signed_commit_bytes(commit_id(header)), signature):
        raise ForgedError("it does not bear its owner's signature")
    for contributor in header.contributors:
        _check_giver(contributor, register)
    for contributor in selection(header):
        if not _is_signed(run, header.shard, header.parent, contributor):
            what = f"the contribution of learner {contributor.learner} does not bear its peer's signature"
            raise FalseContributionError(WrongMerge(header, signature), what)
    for group in header.groups():
        try:
            check_group(run, header.shard, header.parent, group, register)
        except ForgedError as error:
            raise FalseContributionError(WrongMerge(header, signature), str(error)) from error
    signers = {header.owner, *(part.collector for part in header.parts)}
    problem = register.invite_problem(signers | {peer_of(c.learner) for c in header.contributors})
    if problem is not None:
        raise ValueError(problem)


def check_equivocation(proof: Equivocation, register: Register = OPEN) -> None:
    """Verify that one owner, a member, signed two commits on one parent.

    Raises:
        UnknownMemberError: the owner is not known as a member.
        ForgedError: the proof does not hold.
    """
    if not proof.is_one:
        raise ForgedError("these two commits do not exclude each other")
    if not register.was_member(proof.owner):
        raise UnknownMemberError(f"their owner {proof.owner} is not known as a member of the run")
    for header, signature in ((proof.first, proof.first_signature), (proof.second, proof.second_signature)):
        if not verify(proof.owner, messages.signed_commit_bytes(commit_id(header)), signature):
            raise ForgedError(f"{proof.owner} has not signed one of these commits")


def check_proof(proof: Proof, register: Register = OPEN) -> None:
    """Verify what is signed of a proof against an owner. Whether a merge is wrong is not signed, but found
    (``audit``).

    Raises:
        UnknownMemberError: the owner is not known as a member.
        ValueError: the proof does not hold.
    """
    if isinstance(proof, Equivocation):
        check_equivocation(proof, register)
    elif not verify(proof.owner, messages.signed_commit_bytes(commit_id(proof.header)), proof.signature):
        raise ValueError(f"{proof.owner} has not signed this commit")


# -- Permissions -------------------------------------------------------------------------------------------------------


class Permissions(Register, Protocol):
    """Knows what each other peer may do."""

    def is_member(self, peer: PeerId) -> bool:
        """Return whether ``peer`` is a member in good standing now."""

    def observes(self, peer: PeerId) -> bool:
        """Return whether ``peer`` may only send requests."""

    def most_weight(self, peer: PeerId) -> float:
        """Return the largest weight that ``peer`` may have in the selection of owners."""

    def admitted(self) -> frozenset[int] | None:
        """Return the fingerprints of all peers that have a place here; None: every peer has."""

    def connected(self, peer: PeerId) -> None:
        """Note that ``peer`` takes part."""

    async def ask(self, peer: PeerId) -> None:
        """Ask ``peer`` for the members that it knows."""

    async def answer(self, peer: PeerId, request: GetStatements | TellStatements) -> Answer:
        """Answer a request about members."""
