"""What travels with messages, as long as it is here: payloads, and of commits the signatures and the digests of chunks.

Rules of this file:
1. What a peer sent comes in when it is whole, matches its digests, and bears the signatures that it needs. Checking is
   done on any thread; what was checked is kept by the loop.
2. It is kept while the machine may still need it, and no longer (``retention``). A contribution stays in the memory
   that it was received in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2pdiloco.peer import retention
from p2pdiloco.peer.shift_queue import Moves, Payload
from p2pdiloco.peer.signatures import IsMember, check_commit, check_contributor, everybody, signed
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol import signing
from p2pdiloco.protocol.identifiers import Digest, RunId, digest_of
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.runtime.identity import Identity
from p2pdiloco.tensors.digests import list_bytes
from p2pdiloco.wire.bodies import CommitParts, join_commit, split_commit

Keep = Callable[[], None]
"""Puts what was checked among the rest."""


class Cargo:
    """One peer's payloads and what proves them."""

    def __init__(self, layout: Layout, identity: Identity, run: RunId) -> None:
        self._layout = layout
        self._identity = identity
        self._run = run
        self.is_member: IsMember = everybody
        self.payloads: dict[Digest, Payload] = {}
        self.proofs: dict[Digest, tuple[msg.CommitHeader, bytes]] = {}
        """Commits by id with their owners' signatures: of the logs, and of each shard's head."""
        self.digests: dict[Digest, bytes] = {}
        """The digests of the chunks of their results, by ``result``."""

    def sign(self, commit: Digest, header: msg.CommitHeader) -> None:
        """Vouch for a commit of our own."""
        if header.owner == self._identity.peer_id and commit not in self.proofs:
            self.proofs[commit] = (header, self._identity.sign(signing.commit(commit)))

    def signed(self, effect: ef.Encode, payload: Digest) -> msg.Contributor:
        """What our learner gives, with our signature."""
        return signed(self._identity, self._run, effect.shard, effect.base.id, effect.contributor, payload)

    def joined(self, header: msg.CommitHeader) -> bytes | None:
        """What travels with a commit, if it is all here."""
        payload, digests = self.payloads.get(header.payload), self.digests.get(header.result)
        _, signature = self.proofs.get(msg.commit_id(header), (None, None))
        if payload is None or digests is None or signature is None:
            return None
        return join_commit(CommitParts(signature, digests, payload))

    def moves(self, effect: ef.Apply | ef.Install) -> Moves:
        """Own contributions by their payloads; one that is gone makes the learner's delta unknown, hence a reset."""
        settled, restored = self._those_here(effect.settled), self._those_here(effect.restored)
        is_whole = len(settled) == len(effect.settled) and len(restored) == len(effect.restored)
        return Moves(effect.learner, settled, restored, effect.is_reset or not is_whole)

    def _those_here(self, payloads: Sequence[Digest]) -> list[Payload]:
        return [self.payloads[payload] for payload in payloads if payload in self.payloads]

    # -- what others sent ----------------------------------------------------------------------------------------------

    def contribution(self, data: memoryview, message: msg.Contribution) -> Keep:
        """A contribution's payload.

        Raises:
            ValueError: it is not what it names, or not signed by its learner's peer.
        """
        if digest_of(data) != message.payload:
            raise ValueError("its digest does not match")
        check_contributor(self._run, message.shard, message.base.id, message.contributor, self.is_member)
        return lambda: self.payloads.update({message.payload: data})

    def commit(self, data: memoryview, header: msg.CommitHeader) -> Keep:
        """A commit's payload, signature and digests.

        Raises:
            ValueError: they are not what the commit names, or not its owner's, or it names what nobody gave.
        """
        if header.shard >= len(self._layout.shards):
            raise ValueError(f"there is no shard {header.shard}")
        parts = split_commit(data, list_bytes(self._layout.shards[header.shard].elements))
        if digest_of(parts.gradient) != header.payload or digest_of(parts.digests) != header.result:
            raise ValueError("its digests do not match")
        check_commit(self._run, header, parts.signature, self.is_member)
        commit = msg.commit_id(header)

        def keep() -> None:
            self.payloads[header.payload] = parts.gradient
            self.digests[header.result] = parts.digests
            self.proofs[commit] = (header, parts.signature)

        return keep

    # -- what is kept --------------------------------------------------------------------------------------------------

    def sweep(self, machine: Machine) -> None:
        """Drop what nobody needs any more."""
        sizes = {digest: len(data) for digest, data in self.payloads.items()}
        needed = retention.needed(machine, sizes, self._layout.elements)
        self.payloads = {digest: data for digest, data in self.payloads.items() if digest in needed}
        commits = {commit for chain in machine.core.chains for commit in chain.log_ids}
        commits.update(chain.head.id for chain in machine.core.chains if chain.head is not None)
        commits.update(state.head.id for state in machine.adopting.staged.values())
        commits.update(target for target, _ in machine.adopting.applying.values())
        commits.update(msg.commit_id(h) for w in machine.adopting.waiting.values() for h in w.values())
        self.proofs = {commit: proof for commit, proof in self.proofs.items() if commit in commits}
        results = {header.result for header, _ in self.proofs.values()}
        self.digests = {result: digests for result, digests in self.digests.items() if result in results}
