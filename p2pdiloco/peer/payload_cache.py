"""Cache of payloads, commit signatures and chunk digests, kept while the state machine may still need them.

Rules of this file:
1. Received data enters when it is complete, matches its digests, and bears the signatures that it needs. It is verified
   on any thread and added on the event loop.
2. It is kept while the machine may still need it, and no longer (``Machine.payloads``, rule B1f). A contribution stays
   in the memory that it was received in.
3. Payloads of logged commits serve peers that lag: as many as fit into a shard's share of ``LOG_BYTES``. A peer that
   asks for an older one is advised to fetch the state, as if the log had been shorter. ``payload_store`` decides
   whether payloads lie in memory or on disk. While the disk accepts no writes, memory holds the newest of the log and
   the last own contributions (``OWN_WINDOWS``). A learner that would have to take back an older one is reset.
4. A few shards are swept at a time, so that the event loop is never busy with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import msgspec

from p2pdiloco.codec.digests import list_bytes
from p2pdiloco.peer.host import Disk
from p2pdiloco.peer.learner_updates import Moves, Payload
from p2pdiloco.peer.payload_store import Held, PayloadStore
from p2pdiloco.peer.signatures import (
    OPEN,
    ForgedError,
    Register,
    all_but,
    check_commit,
    check_contributor,
    check_equivocation,
    check_group,
    signed,
    signed_group,
)
from p2pdiloco.peer.state_proof import lineage_of
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import messages
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.events import ShardState
from p2pdiloco.protocol.ids import Digest, RunId, ShardId, digest_of
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import CommitParts, SignedCommit, StateProof, split_commit

log = logs.get("protocol")

LOG_BYTES = 256 << 20
# The larger of these two bounds the kept commits, in proportion to a shard's size: all 32 versions of a small run, the
# last four or five of a large one in int4. A state has six to eight bytes per parameter, so fetching it costs little
# more than fetching many commits.
LOG_BYTES_PER_PARAMETER = 2
# Own contributions that memory holds while the disk accepts no writes, as a multiple of the window: the one that is
# being merged, and one whose commit is late. Holding all of a ledger's would take 16 bytes per parameter of a large
# model.
OWN_WINDOWS = 2
# Interval between two sweeps of a shard, in a run of few shards.
SWEEP_S = 2.0
# Shards per sweep, more than are moved between two events of any run. Eight take 0.06 ms of the event loop, 0.22 at
# most; 960 at once took 7.4 ms (``benchmarks/notes.md``).
SWEPT_AT_ONCE = 8
# Adds verified data to the cache. Call it on the event loop.
Keep = Callable[[], None]


class ShardPayloads(msgspec.Struct, eq=False):
    """The payloads, proofs and digests of one shard."""

    payloads: dict[Digest, Held] = {}
    """Oldest first."""
    proofs: dict[Digest, tuple[msg.CommitHeader, bytes]] = {}
    """Commits of the log and of the head, by ID, with their owners' signatures."""
    digests: dict[Digest, bytes] = {}
    """Chunk digests of the commits' results, by ``result``."""

    def size_of(self, payload: Digest) -> int:
        """Return a payload's size in bytes; 0 if it is not here."""
        return len(self.payloads.get(payload, b""))

    def memory_bytes(self, payload: Digest) -> int:
        """Return how many bytes of a payload are in memory."""
        held = self.payloads.get(payload)
        return 0 if held is None or held.data is None else held.size

    def put(self, digest: Digest, payload: Payload) -> None:
        """Keep a payload. If it is already known but only on disk, it is in memory again."""
        held = self.payloads.setdefault(digest, Held(digest, payload))
        if held.data is None:
            held.data = payload

    def find(self, payloads: Sequence[Digest]) -> list[Held]:
        """Return those of these payloads that are here, in order."""
        return [self.payloads[payload] for payload in payloads if payload in self.payloads]

    def keep_only(self, payloads: set[Digest], commits: set[Digest]) -> list[Held]:
        """Drop all other payloads and commits; return the dropped payloads."""
        dropped = [held for digest, held in self.payloads.items() if digest not in payloads]
        if dropped:
            self.payloads = {digest: held for digest, held in self.payloads.items() if digest in payloads}
        if self.proofs.keys() - commits:
            self.proofs = {commit: proof for commit, proof in self.proofs.items() if commit in commits}
        results = {header.result for header, _ in self.proofs.values()}
        if self.digests.keys() - results:
            self.digests = {result: digests for result, digests in self.digests.items() if result in results}
        return dropped

    def beyond(self, most_bytes: int, at_work: Container[Digest] = ()) -> list[Held]:
        """Return payloads to move to disk: those in memory beyond the newest ``most_bytes``, except the ones
        ``at_work``."""
        found, total = list[Held](), 0
        for held in reversed(self.payloads.values()):
            if held.data is not None:
                total += held.size
                found += [held] if total > most_bytes and held.digest not in at_work else []
        return found


class PayloadCache:
    """One peer's payloads, with the signatures and digests that prove them."""

    def __init__(
        self,
        layout: Layout,
        identity: Identity,
        run: RunId,
        register: Register = OPEN,
        store: PayloadStore | None = None,
    ) -> None:
        """Without a ``store`` everything stays in memory."""
        self._pieces = layout.shards
        self._elements = layout.elements
        self._store = store
        # Bytes of logged payloads per parameter.
        self._log_bytes = max(LOG_BYTES, LOG_BYTES_PER_PARAMETER * layout.elements) / layout.elements
        self._identity = identity
        self._run = run
        self._register = register
        self.shards = [ShardPayloads() for _ in layout.shards]
        # Proofs of equivocation that ``take_contradictions`` has not returned yet.
        self._contradictions: list[msg.Equivocation] = []
        # The learner's newest signed contribution by shard, with the head that it is based on.
        self._given: dict[ShardId, tuple[Digest, msg.Contributor]] = {}
        self._swept_at = 0.0
        # The shard that was swept last.
        self._next = 0

    # -- proofs --------------------------------------------------------------------------------------------------------

    def keep_proof(self, header: msg.CommitHeader, signature: bytes) -> None:
        """Keep a commit with its owner's signature, which was verified."""
        self.shards[header.shard].proofs[msg.commit_id(header)] = (header, signature)

    def keep_proofs(self, proof: StateProof, lineage: Iterable[SignedCommit]) -> None:
        """Keep the commits that a state follows from, with their owners' signatures, which were verified."""
        if proof.header is not None:
            self.keep_proof(proof.header, proof.signature)
        for earlier in lineage:
            self.keep_proof(earlier.header, earlier.signature)

    def proof_of(self, state: ShardState) -> StateProof:
        """Return a shard's state with the signed commit at its head."""
        header, signature = self.shards[state.head.shard].proofs.get(state.head.id, (None, b""))
        return StateProof(state, header, signature)

    def lineage(self, shard: ShardId, ancestry: Sequence[Digest]) -> tuple[SignedCommit, ...]:
        """Return the signed commits of ``ancestry`` (heads, oldest first) that are sent with a state."""
        proofs = self.shards[shard].proofs
        return lineage_of(proofs.get(commit) for commit in reversed(ancestry))

    def take_contradictions(self) -> list[msg.Equivocation]:
        """Return the proofs of equivocation found since the last call."""
        found, self._contradictions = self._contradictions, []
        return found

    # -- own payloads --------------------------------------------------------------------------------------------------

    def sign_commit(self, commit: Digest, header: msg.CommitHeader) -> None:
        """Sign a commit, if this peer owns it and has not signed it yet."""
        proofs = self.shards[header.shard].proofs
        if header.owner == self._identity.peer_id and commit not in proofs:
            proofs[commit] = (header, self._identity.sign(messages.signed_commit_bytes(commit)))

    def sign_contribution(self, effect: ef.Encode, payload: Digest) -> msg.Contributor:
        """Sign our learner's contribution."""
        given = signed(self._identity, self._run, effect.shard, effect.base.id, effect.contributor, payload)
        self._given[effect.shard] = effect.base.id, given
        return given

    def sign_group(self, shard: ShardId, base: Digest, group: msg.GroupMerge) -> msg.GroupMerge:
        """Sign our group's merge."""
        return signed_group(self._identity, self._run, shard, base, group)

    def commit_parts(self, header: msg.CommitHeader) -> tuple[Held, Callable[[Payload], CommitParts]] | None:
        """Return a commit's payload, and a function that makes the commit's data from the payload's bytes; None if a
        part is missing."""
        cached = self.shards[header.shard]
        payload, digests = cached.payloads.get(header.payload), cached.digests.get(header.result)
        _, signature = cached.proofs.get(msg.commit_id(header), (None, None))
        if payload is None or digests is None or signature is None:
            return None
        return payload, lambda gradient: CommitParts(signature, digests, gradient)

    def read_moves(self, shard: ShardId, effect: ef.Apply | ef.Install, disk: Disk) -> Callable[[], Moves]:
        """Return a function that reads the own contributions that a new head settles or restores. Run it on the worker
        thread.

        If one is missing, the difference to the learner's parameters is unknown, so the learner is reset.
        """
        cached = self.shards[shard]
        settled, restored = cached.find(effect.settled), cached.find(effect.restored)
        is_whole = len(settled) == len(effect.settled) and len(restored) == len(effect.restored)
        if not is_whole:
            log.warning("an own contribution is missing: the learner takes the global parameters", shard=shard)

        def read() -> Moves:
            if effect.is_reset or not is_whole:
                return Moves(effect.learner, (), (), is_reset=True)
            try:
                mine, back = [held.read(disk) for held in settled], [held.read(disk) for held in restored]
            except ValueError as error:
                log.warning(
                    "cannot read an own contribution: the learner takes the global parameters", reason=str(error)
                )
                return Moves(effect.learner, (), (), is_reset=True)
            return Moves(effect.learner, mine, back, is_reset=False)

        return read

    # -- received data -------------------------------------------------------------------------------------------------

    def _of(self, shard: ShardId) -> ShardPayloads:
        if shard >= len(self.shards):
            raise ValueError(f"there is no shard {shard}")
        return self.shards[shard]

    def verify_contribution(self, data: memoryview, message: msg.Contribution) -> Keep:
        """Verify a contribution's payload and signature, or those of a group's merge.

        Raises:
            UnknownMemberError: its learner's peer is not known as a member.
            ForgedError: the payload does not match its digest, or the contribution is not signed by its learner's peer.
        """
        cached = self._of(message.shard)
        if digest_of(data) != message.payload:
            raise ForgedError("its digest does not match")
        group, where = message.group, (self._run, message.shard, message.base.id)
        if group is None:
            check_contributor(*where, message.contributor, self._register)
        else:
            check_group(*where, group, self._register)
            if msg.part_as_one(group) != message.contributor:
                raise ForgedError("it does not count what its contributions do")
            for contributor in group.contributors:
                check_contributor(*where, contributor, self._register)
        return lambda: cached.put(message.payload, data)

    def verify_commit(self, data: memoryview, header: msg.CommitHeader, register: Register | None = None) -> Keep:
        """Verify a commit's payload, signatures and digests.

        Raises:
            UnknownMemberError: it names an unknown member.
            ForgedError: a digest or the owner's signature does not match.
            FalseContributionError: a contribution is not signed.
        """
        cached = self._of(header.shard)
        parts = split_commit(data, list_bytes(self._pieces[header.shard].elements))
        if digest_of(parts.gradient) != header.payload or digest_of(parts.digests) != header.result:
            raise ForgedError("its digests do not match")
        mine = self._given.get(header.shard)
        check_commit(self._run, header, parts.signature, register or self._register, all_but(mine))
        commit = msg.commit_id(header)

        def keep() -> None:
            cached.put(header.payload, parts.gradient)
            cached.digests[header.result] = parts.digests
            self.find_contradiction(header, parts.signature)
            cached.proofs[commit] = (header, parts.signature)

        return keep

    def find_contradiction(self, header: msg.CommitHeader, signature: bytes) -> None:
        """Compare a signed commit with the known ones: another commit of its owner on its parent is proof of
        equivocation."""
        for other, other_signature in self.shards[header.shard].proofs.values():
            if other.parent == header.parent and other.owner == header.owner:
                proof = msg.Equivocation(other, header, other_signature, signature)
                self._contradictions += [proof] if proof.is_one else []

    def verify_equivocation(self, proof: msg.Equivocation) -> Keep:
        """Verify a proof that an owner signed two commits on one parent.

        Raises:
            UnknownMemberError: the owner is not known as a member.
            ValueError: the proof does not hold.
        """
        self._of(proof.first.shard)
        check_equivocation(proof, self._register)
        return lambda: None

    # -- sweeping ------------------------------------------------------------------------------------------------------

    def sweep(self, machine: Machine, now: float) -> bool:
        """Drop unneeded payloads of the shards that are due, at most ``SWEPT_AT_ONCE``. Returns True after a full
        round."""
        due = int(len(self.shards) * (now - self._swept_at) / SWEEP_S)
        if not due:
            return False
        self._swept_at, before = now, self._next
        for _ in range(min(due, SWEPT_AT_ONCE, len(self.shards))):
            self._next = (self._next + 1) % len(self.shards)
            self._sweep(machine, ShardId(self._next))
        return self._next <= before

    def _sweep(self, machine: Machine, shard: ShardId) -> None:
        cached, store, elements = self.shards[shard], self._store, self._pieces[shard].elements
        most_bytes, own_bytes, size_of = int(self._log_bytes * elements), float("inf"), cached.size_of
        if store is not None and not store.may_write():  # nothing can be spilled: keep less instead
            most_bytes, size_of = store.window_bytes(elements, elements / self._elements), cached.memory_bytes
            own_bytes = OWN_WINDOWS * most_bytes
        dropped = cached.keep_only(machine.payloads(shard, size_of, most_bytes, own_bytes), machine.commits(shard))
        if store is None:
            return
        store.drop(dropped)
        del dropped
        store.sweep()
        for held in cached.beyond(store.window_bytes(elements, elements / self._elements), machine.at_work(shard)):
            if store.may_write():
                store.spill(held)
