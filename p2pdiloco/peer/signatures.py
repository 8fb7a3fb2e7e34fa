"""Who said what: contributions signed by their learners' peers, commits by their owners.

Rules of this file:
1. A learner's id names its peer, whose id is its public key: what is said in a learner's name is checked with nothing
   but that name.
2. A commit is nobody's word alone: each range that it names bears the signature of its learner's peer, over the run,
   the shard and the very head that the commit follows.
3. Whoever signed must be, or have been, a member: ``is_member`` knows.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from p2pdiloco.protocol import signatures
from p2pdiloco.protocol.identifiers import Digest, PeerId, RunId, ShardId, peer_of
from p2pdiloco.protocol.messages import CommitHeader, Contributor, commit_id
from p2pdiloco.runtime.identity import Identity, verify

IsMember = Callable[[PeerId], bool]


def everybody(_: PeerId) -> bool:
    """In a run that is open to all."""
    return True


def signed(
    identity: Identity, run: RunId, shard: ShardId, base: Digest, contributor: Contributor, payload: Digest
) -> Contributor:
    """``contributor`` with its payload's digest and its peer's signature: 88 bytes more."""
    whole = replace(contributor, payload=bytes.fromhex(payload))
    return replace(whole, signature=identity.sign(signatures.contribution(run, shard, base, whole)))


def check_contributor(
    run: RunId, shard: ShardId, base: Digest, contributor: Contributor, is_member: IsMember = everybody
) -> None:
    """Whether its learner's peer gave this on this head.

    Raises:
        ValueError: it did not, or is no member.
    """
    giver = peer_of(contributor.learner)
    if not is_member(giver):
        raise ValueError(f"{giver} is not a member of the run")
    if not verify(giver, signatures.contribution(run, shard, base, contributor), contributor.signature):
        raise ValueError(
            f"what is said in the name of learner {contributor.learner} does not bear its peer's signature"
        )


def check_commit(run: RunId, header: CommitHeader, signature: bytes, is_member: IsMember = everybody) -> None:
    """Whether its owner made this commit, of contributions that were given on its parent.

    Raises:
        ValueError: one of these signatures is not what it should be, or not a member's.
    """
    if not is_member(header.owner):
        raise ValueError(f"its owner {header.owner} is not a member of the run")
    if not verify(header.owner, signatures.commit(commit_id(header)), signature):
        raise ValueError("it does not bear its owner's signature")
    for contributor in header.contributors:
        check_contributor(run, header.shard, header.parent, contributor, is_member)
