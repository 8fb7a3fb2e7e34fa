"""The global parameters and momentum of all shards, and what each commit does to them and to the learner's parameters.

Rules of this file:
1. All of it runs on one thread, in the order in which it was asked for. That order is what makes the learner's view
   exact: commits, shifts, their acknowledgements and snapshots are told apart by it, without locks.
2. Theta and momentum change only together with the shard's head, and only when the sample of the result's chunks that
   is checked at this version has the digests that the owner signed (see ``tensors.digests``).
3. The learner's parameters are never read or written here; they move by *shifts* that it adds at a step boundary. A
   shift is (new global - old global), plus own contributions that were merged, minus those that a fork took back. So
   the learner keeps every step it made meanwhile (``carry``).
4. A snapshot is brought up to date with all shifts that the learner had not added when it was taken. An outer gradient
   is therefore always relative to the head it claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from p2pdiloco.protocol.identifiers import Digest, FragmentId, LearnerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import CodecConfig, Layout, OuterConfig, Shard
from p2pdiloco.protocol.messages import CommitHeader, Contributor
from p2pdiloco.tensors import digests, merging, outer, quantize
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.wire import compression


class StaleBaseError(Exception):
    """The shard's head is not the one that was asked for."""


class DigestMismatchError(Exception):
    """A commit or a fetched state does not give the digest it promises."""


class ContributionError(Exception):
    """A contribution's payload cannot be used."""

    def __init__(self, learner: LearnerId, reason: str) -> None:
        super().__init__(f"contribution of {learner}: {reason}")
        self.learner = learner


class MergeResult(NamedTuple):
    """A merged outer gradient, ready to be committed."""

    payload: bytes
    payload_digest: Digest
    digests: bytes
    """Of the chunks of the state that it leads to; their digest is the commit's result."""


class Shifts(NamedTuple):
    """Shards whose part of the shift buffer the learner is to take now."""

    added: tuple[ShardId, ...]
    """parameters += shift"""
    replaced: tuple[ShardId, ...]
    """parameters = shift"""


class Kind(Enum):
    """What a shift in a buffer is for."""

    NONE = 0
    ADD = 1
    REPLACE = 2


class Moves(NamedTuple):
    """What an own learner's delta gains and loses with a new head (payloads of its own contributions)."""

    learner: LearnerId | None
    settled: Sequence[bytes]
    restored: Sequence[bytes]
    is_reset: bool


class _Prepared(NamedTuple):
    """A commit of our own: that it gives the digest it promises is known."""

    base: Digest
    payload: Digest


class _Staged(NamedTuple):
    """A fetched state, checked."""

    head: Digest
    theta: Tensor
    momentum: Tensor
    digests: bytes


class _Scratch:
    """Vectors of the largest shard's size, reused: fresh memory costs more than the arithmetic in it. Not touched until
    they are needed."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._vectors: dict[str, Tensor] = {}

    def take(self, name: str, elements: int) -> Tensor:
        """The vector of that name, with any content."""
        if name not in self._vectors:
            self._vectors[name] = torch.empty(self._elements, dtype=torch.float32)
        return self._vectors[name][:elements]


class GlobalState:
    """float32 vectors over all parameters, in the layout's flat order."""

    def __init__(self, layout: Layout, outer_config: OuterConfig, codec: CodecConfig, vectors: SharedVectors) -> None:
        self.layout = layout
        self.outer_config = outer_config
        self._up = quantize.recipe(codec.up, codec.up_step)
        self._down = quantize.recipe(codec.down, codec.down_step)
        self.theta = vectors.theta
        self.shift = vectors.shift
        self.snapshot = vectors.snapshot
        self.momentum = torch.zeros_like(self.theta)
        self.queued = torch.zeros_like(self.theta)
        """Shifts that wait until the learner has added the last one; any content where none waits."""
        self.heads: list[Digest | None] = [None] * len(layout.shards)
        self.digests: list[bytes] = [b""] * len(layout.shards)
        """Of the chunks of each shard's state, as the owner of its head signed them."""
        self.learner: LearnerId | None = None
        self._in_flight = [Kind.NONE] * len(layout.shards)
        self._in_queue = [Kind.NONE] * len(layout.shards)
        self._has_snapshot = [False] * len(layout.shards)
        """The shard's part of the snapshot buffer holds what the learner has trained, brought up to date."""
        self._staged: dict[ShardId, _Staged] = {}
        self._prepared: dict[ShardId, _Prepared] = {}
        self._scratch = _Scratch(max(shard.elements for shard in layout.shards))

    def _range(self, vector: Tensor, shard: ShardId) -> Tensor:
        piece = self.layout.shards[shard]
        return vector[piece.start : piece.stop]

    # -- global state --------------------------------------------------------------------------------------------------

    def digest(self, shard: ShardId) -> Digest:
        """Digest of the shard's parameters and momentum, computed anew."""
        return digests.state_digest(self._range(self.theta, shard), self._range(self.momentum, shard))

    def put(self, shard: ShardId, head: Digest, theta: Tensor, momentum: Tensor) -> None:
        """Set a shard outright: version 0 or a checkpoint, before any learner."""
        self._range(self.theta, shard).copy_(theta)
        self._range(self.momentum, shard).copy_(momentum)
        self.heads[shard] = head
        self.digests[shard] = digests.digest_list(theta, momentum)

    def copy(self, shard: ShardId) -> tuple[Digest, bytes]:
        """The shard's head and its state as bytes (parameters, then momentum), for a state transfer or checkpoint.

        Raises:
            StaleBaseError: the shard has no state yet.
        """
        head = self.heads[shard]
        if head is None:
            raise StaleBaseError(f"shard {shard} is not here yet")
        both = torch.cat((self._range(self.theta, shard), self._range(self.momentum, shard)))
        return head, both.numpy().tobytes()

    def stage(self, shard: ShardId, head: Digest, data: memoryview, result: Digest) -> None:
        """Keep a fetched state until it is installed.

        Raises:
            DigestMismatchError: it does not have the digest that its owner signed.
        """
        elements = self.layout.shards[shard].elements
        if len(data) != 8 * elements:
            raise DigestMismatchError(f"the state of shard {shard} has {len(data)} bytes, not {8 * elements}")
        both = torch.frombuffer(bytearray(data), dtype=torch.float32)
        theta, momentum = both[:elements], both[elements:]
        found = digests.digest_list(theta, momentum)
        if digest_of(found) != result:
            raise DigestMismatchError(f"the state of shard {shard} does not have the digest that its owner signed")
        self._staged[shard] = _Staged(head, theta, momentum, found)

    def install(self, shard: ShardId, head: Digest, moves: Moves) -> Shifts:
        """Make a staged state the shard's; returns the shifts to tell the learner of.

        Raises:
            StaleBaseError: it is not staged any more.
        """
        staged = self._staged.pop(shard, None)
        if staged is None or staged.head != head:
            raise StaleBaseError(f"the state of shard {shard} at {head[:8]} is not at hand any more")
        return self._replace(shard, head, staged.theta, staged.momentum, staged.digests, moves)

    def apply(self, header: CommitHeader, head: Digest, payload: bytes, listed: bytes, moves: Moves) -> Shifts:
        """Take the commit ``header``, called ``head``, with its payload and the digests of the chunks of its result;
        returns the shifts to tell the learner of.

        Raises:
            StaleBaseError: the shard's head is not the commit's parent.
            DigestMismatchError: the result is not what the owner signed, or the payload is malformed.
        """
        shard, parent = header.shard, header.parent
        if self.heads[shard] != parent:
            raise StaleBaseError(f"shard {shard} is not at {parent[:8]}")
        prepared = self._prepared.pop(shard, None)
        is_ours = prepared is not None and prepared.base == parent and prepared.payload == header.payload
        try:
            gradient = self._decode(shard, payload)
        except ValueError as error:
            raise DigestMismatchError(f"the payload of commit {head[:8]} is malformed: {error}") from error
        theta, momentum = self._outer_step(shard, gradient)
        for index in () if is_ours else digests.sample(theta.numel(), header.version):
            span = slice(index * quantize.CHUNK, (index + 1) * quantize.CHUNK)
            if not digests.is_chunk(listed, index, theta[span], momentum[span]):
                raise DigestMismatchError(f"commit {head[:8]} of shard {shard} does not give chunk {index} as promised")
        return self._replace(shard, head, theta, momentum, listed, moves)

    def _outer_step(self, shard: ShardId, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The shard's next parameters and momentum, in scratch."""
        theta = self._scratch.take("theta", gradient.numel()).copy_(self._range(self.theta, shard))
        momentum = self._scratch.take("momentum", gradient.numel()).copy_(self._range(self.momentum, shard))
        outer.outer_step(
            theta,
            momentum,
            gradient,
            learning_rate=self.outer_config.learning_rate,
            momentum_factor=self.outer_config.momentum,
        )
        return theta, momentum

    def _decode(self, shard: ShardId, payload: bytes, name: str = "gradient") -> Tensor:
        """The outer gradient in ``payload``, in the scratch vector ``name``; it is finite."""
        elements = self.layout.shards[shard].elements
        bodies = compression.split(payload, quantize.chunk_count(elements), quantize.LARGEST_BODY)
        return quantize.decode_chunks(bodies, self._scratch.take(name, elements))

    def _replace(
        self, shard: ShardId, head: Digest, theta: Tensor, momentum: Tensor, listed: bytes, moves: Moves
    ) -> Shifts:
        current = self._range(self.theta, shard)
        shifts = Shifts((), ())
        if self.learner is not None:
            if moves.is_reset:
                shifts = self._move(shard, Kind.REPLACE, theta)
            else:
                move = torch.sub(theta, current, out=self._scratch.take("move", theta.numel()))
                if moves.learner == self.learner:
                    for payload in moves.settled:
                        move += self._decode(shard, payload)
                    for payload in moves.restored:
                        move -= self._decode(shard, payload)
                shifts = self._move(shard, Kind.ADD, move)
        current.copy_(theta)
        self._range(self.momentum, shard).copy_(momentum)
        self.heads[shard] = head
        self.digests[shard] = listed
        return shifts

    # -- merging -------------------------------------------------------------------------------------------------------

    def merge(self, shard: ShardId, base: Digest, given: Sequence[tuple[Contributor, bytes]]) -> MergeResult:
        """Merge contributions (sorted by learner), quantize the result, and prepare the outer step.

        Raises:
            StaleBaseError: the shard's head is not ``base``.
            ContributionError: a payload is malformed or not finite; the others may be merged without it.
        """
        if self.heads[shard] != base:
            raise StaleBaseError(f"shard {shard} is not at {base[:8]}")
        piece: Shard = self.layout.shards[shard]
        gradients, weights = [], []
        for number, (contributor, payload) in enumerate(given):
            try:
                gradients.append(self._decode(shard, payload, f"gradient {number}"))
            except ValueError as error:
                raise ContributionError(contributor.learner, str(error)) from error
            weights.append(merging.token_weight(contributor.tokens, contributor.steps))
        merged = self._scratch.take("merged", piece.elements)
        merging.merge(piece.merge, gradients, weights, merged)
        payload = compression.join(quantize.encode_chunks(self._down, merged))
        payload_digest = digest_of(payload)
        theta, momentum = self._outer_step(shard, self._decode(shard, payload))
        self._prepared[shard] = _Prepared(base, payload_digest)
        return MergeResult(payload, payload_digest, digests.digest_list(theta, momentum))

    # -- the learner ---------------------------------------------------------------------------------------------------

    def load(self, learner: LearnerId) -> None:
        """Put all global parameters where a new learner takes them from. It must acknowledge with ``shifted``."""
        self.learner = learner
        self.shift.copy_(self.theta)
        for shard in range(len(self.layout.shards)):
            self._in_flight[shard] = Kind.REPLACE
            self._in_queue[shard] = Kind.NONE
            self._has_snapshot[shard] = False

    def unload(self) -> None:
        """The learner is gone."""
        self.learner = None

    def _move(self, shard: ShardId, kind: Kind, values: Tensor) -> Shifts:
        """Hand a shift over to the learner, or queue it until it has taken the last; keep the snapshot up to date."""
        if kind is Kind.REPLACE:
            self._has_snapshot[shard] = False  # what was copied there, the learner has lost
        elif self._has_snapshot[shard]:
            self._range(self.snapshot, shard).add_(values)
        if self._in_flight[shard] is Kind.NONE:
            assert self._in_queue[shard] is Kind.NONE, "what waits, waits for something"
            self._range(self.shift, shard).copy_(values)
            self._in_flight[shard] = kind
            return Shifts((shard,), ()) if kind is Kind.ADD else Shifts((), (shard,))
        is_first = self._in_queue[shard] is Kind.NONE
        self._change(self._range(self.queued, shard), Kind.REPLACE if is_first else kind, values)
        if is_first or kind is Kind.REPLACE:
            self._in_queue[shard] = kind
        return Shifts((), ())

    @staticmethod
    def _change(vector: Tensor, kind: Kind, values: Tensor) -> None:
        if kind is Kind.ADD:
            vector.add_(values)
        else:
            vector.copy_(values)

    def next_shifts(self, shards: Sequence[ShardId]) -> Shifts:
        """Hand queued shifts of ``shards`` over where the learner has taken the last; returns what to tell it of."""
        ready: dict[Kind, list[ShardId]] = {Kind.ADD: [], Kind.REPLACE: []}
        for shard in shards:
            kind = self._in_queue[shard]
            if kind is not Kind.NONE and self._in_flight[shard] is Kind.NONE:
                self._range(self.shift, shard).copy_(self._range(self.queued, shard))
                self._in_queue[shard] = Kind.NONE
                self._in_flight[shard] = kind
                ready[kind].append(shard)
        return Shifts(tuple(ready[Kind.ADD]), tuple(ready[Kind.REPLACE]))

    def shifted(self, shards: Sequence[ShardId]) -> Shifts:
        """The learner has taken these shifts; returns the next ones to tell it of."""
        for shard in shards:
            self._in_flight[shard] = Kind.NONE
        return self.next_shifts(shards)

    def snapshot_asked(self, fragment: FragmentId) -> None:
        """From now on the fragment's part of the snapshot buffer is the learner's."""
        for shard in self.layout.fragments[fragment]:
            self._has_snapshot[shard] = False

    def snapshot_taken(self, fragment: FragmentId) -> None:
        """The learner has written the fragment: add the shifts that it had not added by then."""
        for shard in self.layout.fragments[fragment]:
            waiting = ((self._in_flight[shard], self.shift), (self._in_queue[shard], self.queued))
            self._has_snapshot[shard] = all(kind is not Kind.REPLACE for kind, _ in waiting)
            for kind, buffer in waiting:
                if kind is Kind.ADD:
                    self._range(self.snapshot, shard).add_(self._range(buffer, shard))

    def encode(self, shard: ShardId, base: Digest) -> tuple[bytes, Digest]:
        """The learner's outer gradient for one shard: compressed payload and its digest.

        Raises:
            StaleBaseError: the shard's head is not ``base``, or there is no snapshot.
            ValueError: the learner's parameters are not finite.
        """
        if self.heads[shard] != base or not self._has_snapshot[shard]:
            raise StaleBaseError(f"shard {shard} is not at {base[:8]}")
        theta, snapshot = self._range(self.theta, shard), self._range(self.snapshot, shard)
        gradient = torch.sub(theta, snapshot, out=self._scratch.take("gradient", theta.numel()))
        payload = compression.join(quantize.encode_chunks(self._up, gradient))
        return payload, digest_of(payload)
