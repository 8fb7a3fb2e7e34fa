"""Checks of signatures: contributions by their learners' peers, commits by their owners.

Rules of this file:
1. A learner's id names its peer, whose id is its public key: what is said in a learner's name is checked with nothing
   but that name.
2. A commit is nobody's word alone: each range that it names bears the signature of its learner's peer, over the run,
   the shard and the very head that the commit follows.
3. Whoever signed must be, or have been, a member, and who gave one that may: a register knows. Who is not in it may be
   somebody of whom only others have heard, who are asked before anything is dropped.
"""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from p2pdiloco.protocol import messages
from p2pdiloco.protocol.ids import Digest, PeerId, RunId, ShardId, peer_of
from p2pdiloco.protocol.messages import CommitHeader, Contributor, Equivocation, commit_id
from p2pdiloco.transport.identity import Identity, verify
from p2pdiloco.wire.control_messages import GetStatements, TellStatements
from p2pdiloco.wire.request_reply import Answer, RequestRefused


class Register(Protocol):
    """Knows which peers take part in the run, or have."""

    def was_member(self, peer: PeerId) -> bool:
        """Whether ``peer`` is or was a member. What it did then stays valid."""

    def may_contribute(self, peer: PeerId) -> bool:
        """Whether what ``peer`` trained may be merged."""


class OpenRegister:
    """The register of a run that is open to all."""

    def was_member(self, peer: PeerId) -> bool:
        """Every peer may be a member."""
        return True

    def may_contribute(self, peer: PeerId) -> bool:
        """Every peer may contribute."""
        return True


OPEN = OpenRegister()


class UnknownMemberError(ValueError):
    """Somebody signed of whom nobody has told us that it is a member."""


def signed(
    identity: Identity, run: RunId, shard: ShardId, base: Digest, contributor: Contributor, payload: Digest
) -> Contributor:
    """``contributor`` with its payload's digest and its peer's signature: 88 bytes more."""
    whole = replace(contributor, payload=bytes.fromhex(payload))
    return replace(whole, signature=identity.sign(messages.signed_contribution_bytes(run, shard, base, whole)))


def check_contributor(
    run: RunId, shard: ShardId, base: Digest, contributor: Contributor, register: Register = OPEN
) -> None:
    """Whether its learner's peer gave this on this head.

    Raises:
        UnknownMemberError: it is not known as a member.
        ValueError: it did not, or may not.
    """
    giver = peer_of(contributor.learner)
    if not register.was_member(giver):
        raise UnknownMemberError(f"{giver} is not known as a member of the run")
    if not register.may_contribute(giver):
        raise ValueError(f"{giver} is a member that only follows")
    if not verify(giver, messages.signed_contribution_bytes(run, shard, base, contributor), contributor.signature):
        raise ValueError(
            f"what is said in the name of learner {contributor.learner} does not bear its peer's signature"
        )


def check_commit(
    run: RunId,
    header: CommitHeader,
    signature: bytes,
    register: Register = OPEN,
    mine: tuple[Digest, Contributor] | None = None,
) -> None:
    """Whether its owner made this commit, of contributions that were given on its parent. ``mine``: a head, and what
    this peer has signed on it, which it need not check.

    Raises:
        UnknownMemberError: one of them is not known as a member.
        ValueError: one of these signatures is not what it should be.
    """
    if not register.was_member(header.owner):
        raise UnknownMemberError(f"its owner {header.owner} is not known as a member of the run")
    if not verify(header.owner, messages.signed_commit_bytes(commit_id(header)), signature):
        raise ValueError("it does not bear its owner's signature")
    for contributor in header.contributors:
        if (header.parent, contributor) != mine:
            check_contributor(run, header.shard, header.parent, contributor, register)


def check_equivocation(proof: Equivocation, register: Register = OPEN) -> None:
    """Whether one owner, a member, signed two commits on one parent.

    Raises:
        UnknownMemberError: it is not known as a member.
        ValueError: it did not.
    """
    if not proof.is_one:
        raise ValueError("these two commits do not exclude each other")
    if not register.was_member(proof.owner):
        raise UnknownMemberError(f"their owner {proof.owner} is not known as a member of the run")
    for header, signature in ((proof.first, proof.first_signature), (proof.second, proof.second_signature)):
        if not verify(proof.owner, messages.signed_commit_bytes(commit_id(header)), signature):
            raise ValueError(f"{proof.owner} has not signed one of these commits")


# -- Permissions -------------------------------------------------------------------------------------------------------
# What a connected peer may do, as a peer asks whoever knows the members of its run.


class Standing(Register, Protocol):
    """Permissions of other peers."""

    def is_member(self, peer: PeerId) -> bool:
        """Whether ``peer`` is in good standing now."""

    def observes(self, peer: PeerId) -> bool:
        """Whether ``peer`` may only ask."""

    def most_weight(self, peer: PeerId) -> float:
        """Largest weight that ``peer`` may have in ownership."""

    def connected(self, peer: PeerId) -> None:
        """Note that ``peer`` takes part."""

    async def ask(self, peer: PeerId) -> None:
        """Ask ``peer`` for the members that it knows."""

    async def answer(self, peer: PeerId, request: GetStatements | TellStatements) -> Answer:
        """Answer a request about members."""


class Everybody(OpenRegister):
    """Permits everything to every peer: in simulated worlds."""

    def is_member(self, peer: PeerId) -> bool:
        """Every peer is in good standing."""
        return True

    def observes(self, peer: PeerId) -> bool:
        """No peer only asks."""
        return False

    def most_weight(self, peer: PeerId) -> float:
        """Weights have no limit."""
        return float("inf")

    def connected(self, peer: PeerId) -> None:
        """Nothing to note."""

    async def ask(self, peer: PeerId) -> None:
        """Nobody needs to be asked."""

    async def answer(self, peer: PeerId, request: GetStatements | TellStatements) -> Answer:
        """No member is known."""
        raise RequestRefused("nothing is known of members here")
