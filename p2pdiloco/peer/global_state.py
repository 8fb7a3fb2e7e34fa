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
5. Work on a shard goes chunk by chunk, everything for one chunk while it is in the cache. What can fail is found out
   before the first chunk is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from p2pdiloco.protocol.identifiers import Digest, FragmentId, LearnerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import CodecConfig, Layout, OuterConfig, Shard
from p2pdiloco.protocol.messages import CommitHeader, Contributor
from p2pdiloco.tensors import choosing, digests, merging, outer, quantize
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.wire import compression
from p2pdiloco.wire.compression import Body

Payload = bytes | memoryview
"""Of a contribution or a commit, compressed; not to be changed."""


class StaleBaseError(Exception):
    """The shard's head is not the one that was asked for."""


class DigestMismatchError(Exception):
    """A commit or a fetched state does not give the digest it promises."""


class SpoiltStateError(Exception):
    """This peer's own state is not what its head stands for: bad memory, or a defect."""

    def __init__(self, shard: ShardId, chunk: int) -> None:
        super().__init__(
            f"chunk {chunk} of shard {shard} is not what its owner signed: this machine's memory altered it"
        )
        self.shard = shard


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
    settled: Sequence[Payload]
    restored: Sequence[Payload]
    is_reset: bool


class _Prepared(NamedTuple):
    """A commit of our own: that it gives the digests it promises is known."""

    base: Digest
    payload: Digest
    bodies: Sequence[Body]


class _Own(NamedTuple):
    """This learner's newest contribution to a shard: what it decodes to is wanted when it is merged and when it is
    settled, and half a byte a parameter is cheaper to keep than to decompress twice."""

    payload: bytes
    bodies: Sequence[Body]


class _Staged(NamedTuple):
    """A fetched state, checked."""

    head: Digest
    chunks: Sequence[Tensor]
    """Of each the parameters, then the momentum."""
    digests: bytes


class _Handover(NamedTuple):
    """Where changes of one shard's parameters go, besides into them."""

    shifts: Shifts
    """What to tell the learner of."""
    buffer: Tensor | None
    """The shard's part of the shift buffer, or of the queue; None without a learner."""
    is_added: bool
    """To what the buffer holds; else it takes its place."""
    is_reset: bool
    """It takes new parameters, not changes."""
    snapshot: Tensor | None
    """The shard's part of the snapshot buffer, if it is to be kept up to date."""
    settled: Sequence[Iterator[Body]]
    restored: Sequence[Iterator[Body]]
    """Own contributions, by chunks."""


class _Scratch:
    """Vectors that are used again and again: fresh memory costs more than the arithmetic in it. A chunk long, but for
    the one that holds a shard; not touched until they are needed."""

    def __init__(self, largest_shard: int) -> None:
        self.theta, self.momentum, self.gradient = (torch.empty(quantize.CHUNK) for _ in range(3))
        self.merged = torch.empty(largest_shard)


class GlobalState:
    """float32 vectors over all parameters, in the layout's flat order."""

    def __init__(self, layout: Layout, outer_config: OuterConfig, codec: CodecConfig, vectors: SharedVectors) -> None:
        self.layout = layout
        self._factors = {"learning_rate": outer_config.learning_rate, "momentum_factor": outer_config.momentum}
        self._up = choosing.fixed(codec.up, codec.up_step)
        self._down = choosing.fixed(codec.down, codec.down_step)
        self.theta = vectors.theta
        self.shift = vectors.shift
        self.snapshot = vectors.snapshot
        self.momentum = torch.zeros_like(self.theta)
        self.queued = torch.from_numpy(np.zeros(layout.elements, np.float32))
        """Shifts that wait until the learner has added the last one; any content where none waits. Few ever wait, and
        numpy's zeros take no memory before they are written, which torch's do."""
        self.heads: list[Digest | None] = [None] * len(layout.shards)
        self.digests: list[bytes] = [b""] * len(layout.shards)
        """Of the chunks of each shard's state, as the owner of its head signed them."""
        self.learner: LearnerId | None = None
        self._in_flight = [Kind.NONE] * len(layout.shards)
        self._in_queue = [Kind.NONE] * len(layout.shards)
        self._has_snapshot = [False] * len(layout.shards)
        """The shard's part of the snapshot buffer holds what the learner has trained, brought up to date."""
        self._chunk_counts = [quantize.chunk_count(shard.elements) for shard in layout.shards]
        self._verified: list[set[int]] = [set() for _ in layout.shards]
        """Chunks that had the digests of their shard's present head when they were looked at."""
        self._spoilt: set[ShardId] = set()
        """Shards with a chunk that has not; nothing is given, merged or handed on from them."""
        self._unsigned: set[ShardId] = set()
        """Accepted though spoilt: they are not what their head's owner signed, and are not handed on."""
        self._staged: dict[ShardId, _Staged] = {}
        self._prepared: dict[ShardId, _Prepared] = {}
        self._own: dict[ShardId, _Own] = {}
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

    def verify(self, shard: ShardId, chunk: int) -> None:
        """See whether one chunk still has the digest that the owner of the shard's head signed.

        Raises:
            SpoiltStateError: it has not; the shard is of no use until its state was installed anew.
        """
        if self.heads[shard] is None or shard in self._spoilt:
            return
        span = self._chunks(shard)[chunk]
        if not digests.is_chunk(self.digests[shard], chunk, self.theta[span], self.momentum[span]):
            self._spoilt.add(shard)
            raise SpoiltStateError(shard, chunk)
        self._verified[shard].add(chunk)

    def unverified(self, shard: ShardId) -> list[int]:
        """Chunks that nobody has looked at since the shard has its head."""
        verified, chunks = self._verified[shard], self._chunk_counts[shard]
        if len(verified) == chunks or self.heads[shard] is None or shard in self._spoilt:
            return []
        return [chunk for chunk in range(chunks) if chunk not in verified]

    def is_spoilt(self, shard: ShardId) -> bool:
        """Whether it is to be installed anew, or accepted as it is."""
        return shard in self._spoilt

    def look_again(self) -> None:
        """What was verified may have changed since."""
        for verified in self._verified:
            verified.clear()

    def accept(self, shard: ShardId) -> None:
        """Take a spoilt shard's state as it is, unless it was installed anew meanwhile: nobody else has it. Others get
        it with its next version, whose digests are signed here."""
        if shard not in self._spoilt:
            return
        self._spoilt.discard(shard)
        self._unsigned.add(shard)
        self.digests[shard] = digests.digest_list(self._range(self.theta, shard), self._range(self.momentum, shard))

    def copy(self, shard: ShardId, out: Tensor, chunks: range | None = None) -> tuple[Digest, bytes]:
        """Put the shard's state into ``out`` as it travels: chunk by chunk, parameters, then momentum, float32 [2 * n]
        (only ``chunks``, by default all); returns its head and the list of its digests.

        Raises:
            StaleBaseError: the shard has no state yet, or none that can be proved.
            SpoiltStateError: it is not what its head stands for.
        """
        head = self.heads[shard]
        if head is None or shard in self._spoilt:
            raise StaleBaseError(f"shard {shard} is not here{'' if head is None else ' as it should be'}")
        if shard in self._unsigned:
            raise StaleBaseError(f"shard {shard} is not as it was signed, its next version will be")
        for chunk in self.unverified(shard):
            if chunks is None or chunk in chunks:
                self.verify(shard, chunk)
        spans, at = self._chunks(shard), 0
        for span in spans if chunks is None else spans[chunks.start : chunks.stop]:
            for vector in (self.theta[span], self.momentum[span]):
                out[at : at + vector.numel()].copy_(vector)
                at += vector.numel()
        return head, self.digests[shard]

    def stage(self, shard: ShardId, head: Digest, chunks: Sequence[Tensor], listed: bytes) -> None:
        """Keep a fetched state until it is installed: every chunk as it travels, checked against ``listed``."""
        self._staged[shard] = _Staged(head, chunks, listed)

    def install(self, shard: ShardId, head: Digest, moves: Moves) -> Shifts:
        """Make a staged state the shard's; returns the shifts to tell the learner of.

        Raises:
            StaleBaseError: it is not staged any more.
        """
        staged = self._staged.pop(shard, None)
        if staged is None or staged.head != head:
            raise StaleBaseError(f"the state of shard {shard} at {head[:8]} is not at hand any more")
        if head == self.heads[shard]:
            return self._repair(shard, staged)
        return self._replace(shard, staged, moves)

    def apply(self, header: CommitHeader, head: Digest, payload: Payload, listed: bytes, moves: Moves) -> Shifts:
        """Take the commit ``header``, called ``head``, with its payload and the digests of the chunks of its result;
        returns the shifts to tell the learner of.

        Raises:
            StaleBaseError: the shard's head is not the commit's parent.
            DigestMismatchError: the result is not what the owner signed, or the payload is malformed.
        """
        shard, parent = header.shard, header.parent
        if self.heads[shard] != parent or shard in self._spoilt:
            raise StaleBaseError(f"shard {shard} is not at {parent[:8]}")
        prepared = self._prepared.pop(shard, None)
        if prepared is not None and prepared.base == parent and prepared.payload == header.payload:
            bodies = prepared.bodies
        else:
            bodies = self._checked(header, head, payload, listed)
        handover = self._handover(shard, moves)
        for body, span in zip(bodies, self._chunks(shard), strict=True):
            self._step(body, span, handover)
        self._is_at(shard, head, listed)
        return handover.shifts

    def _is_at(self, shard: ShardId, head: Digest, listed: bytes) -> None:
        """The shard has another head."""
        self.heads[shard] = head
        self.digests[shard] = listed
        self._verified[shard].clear()
        self._spoilt.discard(shard)
        self._unsigned.discard(shard)
        self._own.pop(shard, None)

    def _checked(self, header: CommitHeader, head: Digest, payload: Payload, listed: bytes) -> Sequence[Body]:
        """The bodies of a commit's payload; all can be decoded, and the sample of its version gives what is listed."""
        shard, spans = header.shard, self._chunks(header.shard)
        try:
            bodies = list(self._bodies(shard, payload))
            for body, span in zip(bodies, spans, strict=True):
                quantize.check_chunk(body, span.stop - span.start)
        except ValueError as error:
            raise DigestMismatchError(f"the payload of commit {head[:8]} is malformed: {error}") from error
        for index in digests.sample(self.layout.shards[shard].elements, header.version):
            theta, momentum = self._next_chunk(bodies[index], spans[index])
            if not digests.is_chunk(listed, index, theta, momentum):
                self.verify(shard, index)  # it may be ours that is wrong
                raise DigestMismatchError(f"commit {head[:8]} of shard {shard} does not give chunk {index} as promised")
        return bodies

    def _next_chunk(self, body: Body, span: slice) -> tuple[Tensor, Tensor]:
        """What a chunk's parameters and momentum become with a merged outer gradient, in scratch."""
        elements = span.stop - span.start
        new = self._scratch.theta[:elements], self._scratch.momentum[:elements]
        outer.step_aside(body, self.theta[span], self.momentum[span], new, **self._factors)
        return new

    def _step(self, body: Body, span: slice, to: _Handover) -> None:
        """One chunk's outer step and what follows from it for the learner."""
        theta, momentum = self.theta[span], self.momentum[span]
        if not to.is_reset and to.snapshot is None and not to.restored and len(to.settled) <= 1:
            own = next(to.settled[0]) if to.settled else None
            buffer = None if to.buffer is None else to.buffer[span]
            if outer.step_and_hand_over(body, own, theta, momentum, buffer, is_added=to.is_added, **self._factors):
                return
            to = to._replace(settled=[iter((own,))] if own is not None else ())
        change = quantize.decode_chunk(body, self._scratch.gradient[: theta.numel()])
        outer.outer_step(theta, momentum, change, **self._factors)
        self._hand_over(to, span, change)

    def _bodies(self, shard: ShardId, payload: Payload) -> Iterator[Body]:
        own = self._own.get(shard)
        if own is not None and own.payload is payload:
            return iter(own.bodies)
        chunks = quantize.chunk_count(self.layout.shards[shard].elements)
        return compression.split(payload, chunks, quantize.LARGEST_BODY)

    def _chunks(self, shard: ShardId) -> list[slice]:
        """Where a shard's chunks lie in the flat vectors."""
        piece, size = self.layout.shards[shard], quantize.CHUNK
        return [slice(start, min(start + size, piece.stop)) for start in range(piece.start, piece.stop, size)]

    def _replace(self, shard: ShardId, state: _Staged, moves: Moves) -> Shifts:
        handover = self._handover(shard, moves)
        for span, chunk in zip(self._chunks(shard), state.chunks, strict=True):
            current, (new, momentum) = self.theta[span], chunk.chunk(2)
            change = torch.sub(new, current, out=self._scratch.gradient[: new.numel()])
            current.copy_(new)
            self.momentum[span].copy_(momentum)
            self._hand_over(handover, span, change)
        self._is_at(shard, state.head, state.digests)
        self._prepared.pop(shard, None)
        return handover.shifts

    def _repair(self, shard: ShardId, state: _Staged) -> Shifts:
        """The same head's state again. What was altered after it was verified the learner has not seen; anything else
        may be in its parameters, too, and it takes the global ones."""
        is_known = True
        for number, (span, chunk) in enumerate(zip(self._chunks(shard), state.chunks, strict=True)):
            theta, momentum = chunk.chunk(2)
            is_same = torch.equal(theta, self.theta[span]) and torch.equal(momentum, self.momentum[span])
            is_known = is_known and (is_same or number in self._verified[shard])
        if not is_known and self.learner is not None:
            return self._replace(shard, state, Moves(self.learner, (), (), is_reset=True))
        for span, chunk in zip(self._chunks(shard), state.chunks, strict=True):
            theta, momentum = chunk.chunk(2)
            self.theta[span].copy_(theta)
            self.momentum[span].copy_(momentum)
        self._is_at(shard, state.head, state.digests)
        self._prepared.pop(shard, None)
        return Shifts((), ())

    # -- shifts --------------------------------------------------------------------------------------------------------

    def _handover(self, shard: ShardId, moves: Moves) -> _Handover:
        """Begin to move the learner: its buffer if it has taken the last shift, else the queue."""
        if self.learner is None:
            return _Handover(Shifts((), ()), None, False, False, None, (), ())
        kind = Kind.REPLACE if moves.is_reset else Kind.ADD
        if moves.is_reset:
            self._has_snapshot[shard] = False  # what was copied there, the learner has lost
        shifts, buffer, is_added = Shifts((), ()), self.queued, False
        if self._in_flight[shard] is Kind.NONE:
            assert self._in_queue[shard] is Kind.NONE, "what waits, waits for something"
            self._in_flight[shard] = kind
            shifts = Shifts((), (shard,)) if moves.is_reset else Shifts((shard,), ())
            buffer = self.shift
        else:
            is_first = self._in_queue[shard] is Kind.NONE
            is_added = not is_first and not moves.is_reset
            if is_first or moves.is_reset:
                self._in_queue[shard] = kind
        is_mine = moves.learner == self.learner and not moves.is_reset
        return _Handover(
            shifts,
            buffer,
            is_added,
            moves.is_reset,
            self.snapshot if self._has_snapshot[shard] else None,
            [self._bodies(shard, payload) for payload in moves.settled] if is_mine else (),
            [self._bodies(shard, payload) for payload in moves.restored] if is_mine else (),
        )

    def _hand_over(self, to: _Handover, span: slice, change: Tensor) -> None:
        """Pass one chunk's ``change`` on, whose parameters are new already; it loses its content."""
        if to.buffer is None:
            return
        if to.is_reset:
            to.buffer[span].copy_(self.theta[span])
            return
        for bodies in to.settled:
            quantize.add_chunk(next(bodies), 1.0, change)
        for bodies in to.restored:
            quantize.add_chunk(next(bodies), -1.0, change)
        if to.is_added:
            to.buffer[span].add_(change)
        else:
            to.buffer[span].copy_(change)
        if to.snapshot is not None:
            to.snapshot[span].add_(change)

    # -- merging -------------------------------------------------------------------------------------------------------

    def merge(
        self,
        shard: ShardId,
        base: Digest,
        given: Sequence[tuple[Contributor, Payload]],
        how: quantize.Recipe | None = None,
    ) -> MergeResult:
        """Merge contributions (sorted by learner), quantize the result (None: as the run says), and prepare the outer
        step.

        Raises:
            StaleBaseError: the shard's head is not ``base``.
            SpoiltStateError: this peer's own state is not what its head stands for.
            ContributionError: a payload is malformed or not finite; the others may be merged without it.
        """
        if self.heads[shard] != base or shard in self._spoilt:
            raise StaleBaseError(f"shard {shard} is not at {base[:8]}")
        for chunk in range(len(self._chunks(shard))):
            self.verify(shard, chunk)  # what is signed here the others believe
        piece: Shard = self.layout.shards[shard]
        gradients, weights = [], []
        for contributor, payload in given:
            try:
                gradients.append(merging.Encoded(list(self._bodies(shard, payload)), piece.elements))
            except ValueError as error:
                raise ContributionError(contributor.learner, str(error)) from error
            weights.append(merging.token_weight(contributor.tokens, contributor.steps))
        merged = self._scratch.merged[: piece.elements]
        merging.merge(piece.merge, gradients, weights, merged)
        bodies = [bytes(body) for body in quantize.encode_chunks(how or self._down, merged)]
        payload = compression.join(bodies)
        payload_digest = digest_of(payload)
        self._prepared[shard] = _Prepared(base, payload_digest, bodies)
        pairs = zip(bodies, self._chunks(shard), strict=True)
        listed = b"".join(digests.chunk_digest(*self._next_chunk(body, span)) for body, span in pairs)
        return MergeResult(payload, payload_digest, listed)

    def merge_error(self, shard: ShardId, payload: Payload) -> float:
        """Relative error of the first chunk of what was just merged."""
        span = self._chunks(shard)[0]
        return self._error(shard, payload, self._scratch.merged[: span.stop - span.start])

    def encode_error(self, shard: ShardId, payload: Payload) -> float:
        """Relative error of the first chunk of what was just encoded."""
        span = self._chunks(shard)[0]
        gradient = self._scratch.gradient[: span.stop - span.start]
        return self._error(shard, payload, torch.sub(self.theta[span], self.snapshot[span], out=gradient))

    def _error(self, shard: ShardId, payload: Payload, exact: Tensor) -> float:
        chunks = quantize.chunk_count(self.layout.shards[shard].elements)
        body, found = next(compression.split(payload, chunks, quantize.LARGEST_BODY)), torch.empty_like(exact)
        quantize.decode_chunk(body, found)
        size = float(exact.norm())
        return float(found.sub_(exact).norm()) / size if size else 0.0

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

    def encode(self, shard: ShardId, base: Digest, how: quantize.Recipe | None = None) -> tuple[bytes, Digest]:
        """The learner's outer gradient for one shard: compressed payload and its digest. ``how`` None: as the run says.
        Each snapshot is encoded once.

        Raises:
            StaleBaseError: the shard's head is not ``base``, or there is no snapshot.
            ValueError: the learner's parameters are not finite.
        """
        if self.heads[shard] != base or not self._has_snapshot[shard] or shard in self._spoilt:
            raise StaleBaseError(f"shard {shard} is not at {base[:8]}")
        gradients = (
            torch.sub(self.theta[span], self.snapshot[span], out=self._scratch.gradient[: span.stop - span.start])
            for span in self._chunks(shard)
        )
        bodies = [bytes(quantize.encode_chunk(how or self._up, gradient)) for gradient in gradients]
        self._has_snapshot[shard] = False  # the next contribution has a snapshot of its own: no need to keep this up
        payload = compression.join(bodies)
        self._own[shard] = _Own(payload, bodies)
        return payload, digest_of(payload)
