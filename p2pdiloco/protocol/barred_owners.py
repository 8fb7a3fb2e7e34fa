"""Owners that own nothing for a while, because what they did was proved, or refused here.

Rules of this file:
1. Two commits of one owner on one parent are a proof that cannot be forged and that every peer can check. A wrong merge
   is one, too, for whoever makes the merge again (``audits``). A peer keeps a proof and sends it to all peers that are
   connected or connect later. The driver checks every proof before the machine hears of it.
2. A barred peer owns nothing, of any shard, for TERM versions of that shard's chain, which every peer counts alike.
   Its commits are not accepted from itself. They are accepted from other peers, because those have built on them.
3. Honest peers never equivocate (``OwnCommitLog``), and their merges are right. A barred peer still owns where no other
   peer can.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.protocol.events import Convictions
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.messages import CommitHeader, Equivocation, Proof, WrongMerge, commit_id
from p2pdiloco.protocol.state import Core

TERM = 1000
"""Versions for which an excluded peer owns nothing."""
PROOFS_MOST = 64
"""Maximum number of owners whose proofs are kept; the latest stay."""
EVIDENCE_MOST = 4
"""Number of the latest wrong merges whose payloads are kept, so that other peers can make these merges again."""


class BarredOwners:
    """Owners that own nothing for a while: proofs, one for each owner, and owners of commits that were rejected."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.proofs: dict[PeerId, Proof] = {}
        self._refused: dict[PeerId, tuple[ShardId, int]] = {}
        """Owners of commits that were rejected here, with shard and version (see ``RejectedCommits``)."""

    def add_proof(self, proof: Proof, sender: PeerId | None = None) -> None:
        """Store a proof that has been checked, and forward it."""
        core = self.core
        if isinstance(proof, Equivocation) and not proof.is_one:
            return
        if proof.shard >= len(core.chains) or self._is_served(proof):
            return
        known = self.proofs.get(proof.owner)
        if known is not None and not self._is_served(known):
            return
        self.proofs.pop(proof.owner, None)
        while len(self.proofs) >= PROOFS_MOST:
            del self.proofs[self._least_needed(self.proofs)]
        self.proofs[proof.owner] = proof
        core.note("warning", "equivocation" if isinstance(proof, Equivocation) else "wrong-merge", _sentence(proof))
        self.expire()
        core.send(tuple(peer for peer in sorted(core.membership.peers) if peer != sender), proof)

    def bar(self, owner: PeerId, shard: ShardId, version: int) -> None:
        """Exclude the owner of a commit that every peer with its parent's state rejects."""
        self._refused.pop(owner, None)
        self._refused[owner] = (shard, version)
        if len(self._refused) > PROOFS_MOST:
            del self._refused[self._least_needed(self._refused)]
        self.expire()

    def convictions(self) -> Convictions:
        """Return all exclusions, for storage on disk."""
        refused = tuple((owner, *at) for owner, at in self._refused.items())
        return Convictions(tuple(self.proofs.values()), refused)

    def restore(self, earlier: Convictions) -> None:
        """Restore the exclusions that an earlier run of this peer stored."""
        for proof in earlier.proofs:
            self.add_proof(proof)
        for owner, shard, version in earlier.refused:
            if shard < len(self.core.chains):
                self.bar(owner, shard, version)

    def expire(self) -> None:
        """Drop the owners whose term is over."""
        if not self.proofs and not self._refused:
            self.core.membership.owners.barred = frozenset()
            return
        self.proofs = {owner: proof for owner, proof in self.proofs.items() if not self._is_served(proof)}
        self._refused = {owner: at for owner, at in self._refused.items() if not self._is_over(*at)}
        self.core.membership.owners.barred = frozenset((*self.proofs, *self._refused))

    def send_proofs(self, peer: PeerId) -> None:
        """Send all proofs to a peer that has connected."""
        for proof in self.proofs.values():
            self.core.send((peer,), proof)

    def payloads(self, shard: ShardId) -> set[Digest]:
        """Return the payloads that prove the latest wrong merges of a shard."""
        return set().union(*(audited_payloads(proof.header, proof.part) for proof in self._evidence(shard)))

    def commits(self, shard: ShardId) -> set[Digest]:
        """Return the ids of a shard's latest wrong commits."""
        return {commit_id(proof.header) for proof in self._evidence(shard)}

    def _evidence(self, shard: ShardId) -> list[WrongMerge]:
        wrong = [proof for proof in self.proofs.values() if isinstance(proof, WrongMerge)]
        return [proof for proof in wrong[-EVIDENCE_MOST:] if proof.shard == shard]

    def _least_needed(self, owners: Iterable[PeerId]) -> PeerId:
        """Return the first of ``owners`` that is not connected, else the first. A peer can make as many keys as it
        likes, and proofs against them."""
        owners, peers = tuple(owners), self.core.membership.peers
        return next((owner for owner in owners if owner not in peers), owners[0])

    def _is_served(self, proof: Proof) -> bool:
        return self._is_over(proof.shard, proof.version)

    def _is_over(self, shard: ShardId, version: int) -> bool:
        head = self.core.chains[shard].head
        return head is not None and head.version >= version + TERM


def _sentence(proof: Proof) -> str:
    """Return what the owner did, what follows, and what a person can do."""
    if isinstance(proof, Equivocation):
        deed = f"{proof.owner} has signed two commits of version {proof.version} of shard {proof.shard}"
    else:
        deed = (
            f"{proof.owner} has put other values into version {proof.version} of shard {proof.shard} than its "
            "contributors gave"
        )
    return f"{deed}: it owns nothing for {TERM} versions. To remove it: p2pdiloco members ban {proof.owner}"


def audited_payloads(header: CommitHeader, part: int = -1) -> set[Digest]:
    """Return the payloads that are needed to make a merge again, of a commit or of one of its groups: the merge's own,
    and those of what was merged."""
    if part < 0:
        return {header.payload, *(Digest(one.payload.hex()) for one in header.merged if one.payload)}
    group = header.groups()[part]
    return {Digest(group.payload.hex()), *(Digest(c.payload.hex()) for c in group.contributors)}


def all_payloads(header: CommitHeader) -> set[Digest]:
    """Return the payloads of ``audited_payloads`` for a commit and all of its groups."""
    own = audited_payloads(header)
    return own | {Digest(c.payload.hex()) for c in header.contributors} if header.parts else own
