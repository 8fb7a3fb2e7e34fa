"""Owners that signed two commits on one parent, and what follows for them.

Rules of this file:
1. The two are a proof that nobody can forge and everybody can check. It is kept, and told to all who are connected and
   all who connect later.
2. Who is proved to have done it owns nothing for TERM versions of that shard's chain, which everybody counts alike; its
   commits are not taken from itself. From others they are: what has been built on is not taken apart.
3. The honest never do it (``made``). Where nobody else can own it owns all the same.
"""

from __future__ import annotations

from p2pdiloco.protocol.core import Core
from p2pdiloco.protocol.events import Convictions
from p2pdiloco.protocol.identifiers import PeerId, ShardId
from p2pdiloco.protocol.messages import Equivocation

TERM = 1000
"""Versions."""
PROOFS_MOST = 64
"""Owners of whom a proof is kept; the latest."""


class Equivocations:
    """Proofs, one an owner."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.proofs: dict[PeerId, Equivocation] = {}
        self._refused: dict[PeerId, tuple[ShardId, int]] = {}
        """Owners of commits that were refused here, with shard and version: see ``refusals``."""

    def learn(self, proof: Equivocation, sender: PeerId | None = None) -> None:
        """A proof, whose signatures were checked."""
        core = self.core
        if not proof.is_one or proof.first.shard >= len(core.chains) or self._is_served(proof):
            return
        known = self.proofs.get(proof.owner)
        if known is not None and not self._is_served(known):
            return
        while len(self.proofs) >= PROOFS_MOST:
            del self.proofs[next(iter(self.proofs))]
        self.proofs[proof.owner] = proof
        core.note(
            "warning",
            "equivocation",
            f"{proof.owner} has signed two commits of version {proof.first.version} of shard {proof.first.shard}: it "
            f"owns nothing for {TERM} versions",
        )
        self.look()
        core.send(tuple(peer for peer in core.membership.live if peer != sender), proof)

    def bar(self, owner: PeerId, shard: ShardId, version: int) -> None:
        """It made a commit that everybody refuses who can judge it."""
        self._refused.pop(owner, None)
        self._refused[owner] = (shard, version)
        if len(self._refused) > PROOFS_MOST:
            del self._refused[next(iter(self._refused))]
        self.look()

    def kept(self) -> Convictions:
        """For the disk."""
        return Convictions(tuple(self.proofs.values()), tuple((owner, *at) for owner, at in self._refused.items()))

    def brought(self, earlier: Convictions) -> None:
        """What an earlier life knew."""
        for proof in earlier.proofs:
            self.learn(proof)
        for owner, shard, version in earlier.refused:
            if shard < len(self.core.chains):
                self.bar(owner, shard, version)

    def look(self) -> None:
        """Some may have served their term."""
        if not self.proofs and not self._refused:
            self.core.membership.owners.barred = frozenset()
            return
        self.proofs = {owner: proof for owner, proof in self.proofs.items() if not self._is_served(proof)}
        self._refused = {owner: at for owner, at in self._refused.items() if not self._is_over(*at)}
        self.core.membership.owners.barred = frozenset((*self.proofs, *self._refused))

    def tell(self, peer: PeerId) -> None:
        """``peer`` is connected."""
        for proof in self.proofs.values():
            self.core.send((peer,), proof)

    def _is_served(self, proof: Equivocation) -> bool:
        return self._is_over(proof.first.shard, proof.first.version)

    def _is_over(self, shard: ShardId, version: int) -> bool:
        head = self.core.chains[shard].head
        return head is not None and head.version >= version + TERM
