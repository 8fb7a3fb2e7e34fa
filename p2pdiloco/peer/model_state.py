"""Model state: global parameters and momentum of all shards, and the operations that merge and apply commits.

Rules of this file:
1. Jobs of one shard run in the order in which they were submitted. Jobs of several shards, or of the learner as a
   whole, run alone, between all others. This order keeps the learner's view exact without locks: commits, shifts, their
   acknowledgements and snapshots are told apart by it. Different shards are worked on in parallel. They share only
   ``VectorMemory``, and each thread has its own scratch.
2. Parameters and momentum change only together with the shard's head, and only if a sample of chunks has the digests
   that the owner signed (``codec.digests``).
3. ``learner_updates`` decides what a change means for the learner.
4. Work on a shard goes chunk by chunk, so that a chunk stays in the CPU cache. Everything that can fail is checked
   before the first chunk is changed.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from p2pdiloco.codec import agreement, bitrate_ladder, compression, digests, merge, outer_optimizer, quantization
from p2pdiloco.codec.compression import Body
from p2pdiloco.codec.digests import StateForm, as_bytes
from p2pdiloco.codec.shard_codec import Bodies
from p2pdiloco.peer.integrity import Integrity
from p2pdiloco.peer.learner_updates import Handover, LearnerUpdates, Moves, Payload, Shifts
from p2pdiloco.protocol.ids import Digest, LearnerId, ShardId, digest_of, peer_of
from p2pdiloco.protocol.manifest import CodecConfig, Layout, OuterConfig, Shard
from p2pdiloco.protocol.messages import CommitHeader, Contributor
from p2pdiloco.training.shared_memory import SharedVectors

new_random: Callable[[], random.Random] = random.Random
"""Makes the source of a peer's draws. The simulator of whole peers sets one whose draws can be repeated."""


# -- Staged states -----------------------------------------------------------------------------------------------------
# A fetched state, until it is installed.


MENDED_SHARE = 16
# Share of a chunk's elements that altered memory may have changed, or this many elements if that is more.
MENDED_LEAST = 1024
# Bound on the norm of those elements, as a multiple of the norm of all others.
ORDINARY = 16.0


class Staged(NamedTuple):
    """A fetched state of one shard whose chunks match their digests."""

    head: Digest
    chunks: Sequence[memoryview]
    """Chunks in wire layout."""
    digests: bytes

    def distance(self, form: StateForm, theta: Tensor, momentum: Tensor) -> float:
        """Return the distance of its parameters from ``theta``, or of its momentum from ``momentum`` (both [all n]),
        whichever is larger.

        A few values of the state in memory may be altered. In each chunk, the elements that differ most are therefore
        left out (a sixteenth, or 1,024 if that is more). Their new values must not be far larger than the rest of the
        chunk.
        """
        squares, start, beyond = [0.0, 0.0], 0, 0.0
        for chunk in self.chunks:
            both = form.vectors(chunk)
            span = slice(start, start + both[0].numel())
            start = span.stop
            for i, vector in enumerate((theta, momentum)):
                theirs, mine = both[i].float(), vector[span].float()
                change = (theirs - mine).abs().nan_to_num(math.inf, math.inf)
                most = min(len(change) // 2, max(MENDED_LEAST, len(change) // MENDED_SHARE))
                bound = change.kthvalue(len(change) - most).values
                if not bound.isfinite():
                    continue  # too much of this chunk is altered to compare with it
                is_near = change <= bound
                squares[i] += merge.norm(change[is_near]) ** 2
                beyond = max(beyond, merge.norm(theirs[~is_near]) - ORDINARY * merge.norm(mine[is_near]))
        return max(math.sqrt(max(squares)), beyond)


# -- Model state -------------------------------------------------------------------------------------------------------


# Tolerance for norms, since the order of a sum may differ between machines.
ROUNDED_LENGTH = 1 + 1e-6


class StaleBaseError(Exception):
    """The shard is not at the head that the caller expected."""


class AlteredStateError(StaleBaseError):
    """This peer's state of a shard does not match its head. The message says what its digest is instead, so that a peer
    with the same state can tell that the head's owner signed a wrong one (``is_told_by``)."""

    def __init__(self, shard: ShardId, head: Digest, digest: Digest) -> None:
        super().__init__(f"shard {shard} is corrupted here: at {head} its digest is {digest}")

    def is_told_by(self, reason: str) -> bool:
        """Return whether another peer gave the same reason: its state has the same digest at the same head."""
        return reason == str(self)


class DigestMismatchError(Exception):
    """A commit or a fetched state does not have the digest that it names."""


class UnfitCommitError(DigestMismatchError):
    """A commit that no honest owner makes on its parent, although the state here is sound. Every peer refuses it."""


class ContributionError(Exception):
    """A contribution's payload cannot be used."""

    def __init__(self, learner: LearnerId, reason: str) -> None:
        super().__init__(f"contribution of {learner}: {reason}")
        self.learner = learner


class MergeResult(NamedTuple):
    """A merged outer gradient, ready to be committed."""

    payload: Payload
    payload_digest: Digest
    digests: bytes
    """Chunk digests of the resulting state. Their own digest is the commit's result."""
    length: float = 0.0
    """Euclidean norm of the decoded payload."""
    agreement: merge.Agreement = merge.Agreement(None, 0)
    factors: tuple[int, ...] = ()
    """Per cent of each contribution's weight that counted; empty: all of all."""


class _Ready(NamedTuple):
    """A merged step whose digests were computed here, so they need no check when it is applied."""

    base: Digest
    payload: Digest
    bodies: Sequence[Body]


class _Scratch(threading.local):
    """Reused vectors of one thread, because fresh memory costs more than the arithmetic in it.

    Each holds one chunk, except ``merged``, which holds a shard. The memory is not touched until it is needed.
    """

    def __init__(self, largest_shard: int, momentum: torch.dtype) -> None:
        self.theta, self.gradient = (torch.empty(quantization.CHUNK) for _ in range(2))
        self.momentum = torch.empty(quantization.CHUNK, dtype=momentum)
        self.merged = torch.empty(largest_shard)


def payload_of(bodies: Bodies, how: quantization.Recipe, is_coded: bool) -> Payload:
    """Join encoded bodies into a payload. ``bodies`` must have room for an index in front; if stored uncompressed,
    their memory is the payload's."""
    if is_coded or not bitrate_ladder.is_dense(how):
        return compression.join(bodies)
    return compression.store(bodies.memory, [len(body) for body in bodies])


class ModelState:
    """Parameters and momentum of all shards, as vectors in the layout's flat order: float32, momentum in the run's
    type."""

    def __init__(
        self,
        layout: Layout,
        outer_config: OuterConfig,
        codec: CodecConfig,
        vectors: SharedVectors,
        *,
        round_steps: int,
    ) -> None:
        """``round_steps``: inner steps between two exchanges of a fragment (H)."""
        self.layout = layout
        self._round_steps = round_steps
        self._outer = outer_config
        # Bound on how far one merged step of length 1 moves parameters, or momentum, in the end.
        self._reach = max(1.0, outer_config.learning_rate) / (1.0 - min(outer_config.momentum, 0.999))
        self._up = bitrate_ladder.fixed(codec.up, codec.up_step)
        self._down = bitrate_ladder.fixed(codec.down, codec.down_step)
        self.theta = vectors.theta
        self.form = StateForm.of(outer_config)
        self.momentum = self.form.still(layout.elements)
        self.shifts = LearnerUpdates(layout, vectors, round_steps)
        self.heads: list[Digest | None] = [None] * len(layout.shards)
        self.integrity = Integrity([quantization.chunk_count(shard.elements) for shard in layout.shards])
        self._staged: dict[ShardId, Staged] = {}
        # Merged steps that this peer made as an owner, until they are committed.
        self._ready: dict[ShardId, _Ready] = {}
        self.agreement = agreement.AgreementHistory()
        self._draw = new_random()
        # This learner's newest contribution with its bodies. Half a byte per parameter, but saves a decompression.
        self._own: dict[ShardId, tuple[Payload, Bodies]] = {}
        self._scratch = _Scratch(max(shard.elements for shard in layout.shards), self.form.momentum)

    def _range(self, vector: Tensor, shard: ShardId) -> Tensor:
        piece = self.layout.shards[shard]
        return vector[piece.start : piece.stop]

    # -- global state --------------------------------------------------------------------------------------------------

    def altered(self, shard: ShardId) -> AlteredStateError | None:
        """Return how the shard's state differs from its head, if it is known to."""
        head = self.heads[shard]
        if head is None or not self.integrity.is_spoilt(shard):
            return None
        return AlteredStateError(shard, head, self.digest(shard))

    def digest(self, shard: ShardId) -> Digest:
        """Compute the digest of the shard's parameters and momentum."""
        return digests.state_digest(self._range(self.theta, shard), self._range(self.momentum, shard))

    def keep_in(self, momentum: Tensor) -> None:
        """Use ``momentum``, [elements], as the momentum vector instead of allocating one. Call it before anything is
        ``put``.

        What is later ``put`` from this vector is in place already, so a start needs its memory only once. A vector of
        another shape or type is ignored.
        """
        if momentum.shape == self.momentum.shape and momentum.dtype == self.momentum.dtype:
            self.momentum = momentum

    def put(self, shard: ShardId, head: Digest, theta: Tensor, momentum: Tensor) -> None:
        """Set a shard's state: version 0 or a checkpoint. Call it before any learner starts."""
        self._range(self.theta, shard).copy_(theta)
        self._range(self.momentum, shard).copy_(momentum)
        self.heads[shard] = head
        self.integrity.set_digests(shard, digests.digest_list(theta, momentum))

    def verify(self, shard: ShardId, chunk: int) -> None:
        """Verify that one chunk still has the digest that the owner of the shard's head signed.

        Raises:
            SpoiltStateError: it does not.
        """
        span = self._chunks(shard)[chunk]
        self.integrity.verify(shard, chunk, self.theta[span], self.momentum[span])

    def accept(self, shard: ShardId) -> None:
        """Accept a corrupted shard's state as it is, because no other peer has it.

        Does nothing if the shard was installed again meanwhile. Other peers get the state with its next version, whose
        digests are signed here.
        """
        if self.integrity.is_spoilt(shard):
            theta, momentum = self._range(self.theta, shard), self._range(self.momentum, shard)
            self.integrity.accept(shard, digests.digest_list(theta, momentum))

    def copy(
        self, shard: ShardId, out: memoryview, chunks: range | None = None, *, is_checked: bool = True
    ) -> tuple[Digest, bytes]:
        """Copy the shard's state into ``out`` in wire layout (only ``chunks``; default: all); return its head and
        digests.

        ``is_checked``: chunks that were not verified yet are compared with their digests first.

        Raises:
            StaleBaseError: the shard has no state yet, or none that can be proven.
            AlteredStateError: the state is known not to match its head.
            SpoiltStateError: the state does not match its head, as is found now.
        """
        head = self.heads[shard]
        if head is None:
            raise StaleBaseError(f"shard {shard} has no state here yet")
        if (altered := self.altered(shard)) is not None:
            raise altered
        if self.integrity.is_unsigned(shard):
            raise StaleBaseError(f"shard {shard} cannot be proven before its next version")
        for chunk in self.integrity.unverified(shard):
            if is_checked and (chunks is None or chunk in chunks):
                self.verify(shard, chunk)
        spans, at = self._chunks(shard), 0
        for span in spans if chunks is None else spans[chunks.start : chunks.stop]:
            for vector in (self.theta[span], self.momentum[span]):
                piece = as_bytes(vector)
                out[at : at + piece.size] = piece.data
                at += piece.size
        return head, self.integrity.digests[shard]

    def stage(self, shard: ShardId, head: Digest, chunks: Sequence[memoryview], listed: bytes) -> None:
        """Keep a fetched state until it is installed. ``chunks`` are in wire layout and were checked against
        ``listed``."""
        self._staged[shard] = Staged(head, chunks, listed)

    def install(self, shard: ShardId, head: Digest, moves: Moves, farthest: float = math.inf) -> Shifts:
        """Replace the shard's state by the staged one; return the shifts to announce to the learner.

        Raises:
            StaleBaseError: the state is not staged any more.
            UnfitCommitError: it is farther from the present state than ``farthest`` merged steps of length 1 can move
                it.
        """
        staged = self._staged.pop(shard, None)
        if staged is None or staged.head != head:
            raise StaleBaseError(f"the state of shard {shard} at {head[:8]} is not staged any more")
        here = self._range(self.theta, shard), self._range(self.momentum, shard)
        if self.heads[shard] is not None and staged.distance(self.form, *here) > farthest * self._reach:
            raise UnfitCommitError(f"the state of shard {shard} at {head[:8]} is too far from the present one")
        return self._repair(shard, staged) if head == self.heads[shard] else self._replace(shard, staged, moves)

    def apply(self, header: CommitHeader, head: Digest, payload: Payload, listed: bytes, moves: Moves) -> Shifts:
        """Apply the commit ``header`` with ID ``head``; return the shifts to announce to the learner.

        ``listed`` are the chunk digests of the result.

        Raises:
            StaleBaseError: the shard is not at the commit's parent.
            UnfitCommitError: the result is not what the owner signed, or the payload is malformed or too long.
        """
        shard, parent = header.shard, header.parent
        if self.heads[shard] != parent or self.integrity.is_spoilt(shard):
            raise StaleBaseError(f"shard {shard} is not at {parent[:8]}")
        ready = self._ready.pop(shard, None)
        if ready is not None and ready.base == parent and ready.payload == header.payload:
            bodies = ready.bodies
        else:
            bodies = self._check_commit(header, head, payload, listed)
        handover = self.shifts.begin_shift(shard, moves, partial(self._bodies, shard))
        factors = outer_optimizer.factors_of(self._outer, header.version)
        self._step(shard, bodies, handover, factors)
        self._set_head(shard, head, listed)
        return handover.shifts

    def _set_head(self, shard: ShardId, head: Digest, listed: bytes) -> None:
        self.heads[shard] = head
        self.integrity.set_digests(shard, listed)
        self._own.pop(shard, None)

    def _check_commit(self, header: CommitHeader, head: Digest, payload: Payload, listed: bytes) -> Sequence[Body]:
        """Return the bodies of a commit's payload, after checks: all can be decoded, the norm is at most the declared
        one, and a sample of chunks has the listed digests."""
        shard, spans = header.shard, self._chunks(header.shard)
        factors = outer_optimizer.factors_of(self._outer, header.version)
        elements = self.layout.shards[shard].elements
        try:
            bodies = self._bodies(shard, payload)
            length = merge.EncodedGradient(bodies, elements).norm()
        except ValueError as error:
            raise UnfitCommitError(f"the payload of commit {head[:8]} is malformed: {error}") from error
        if length > header.length * ROUNDED_LENGTH:
            raise UnfitCommitError(f"the step of commit {head[:8]} has norm {length:.3g}, not {header.length:.3g}")
        for index in digests.sample(elements, self._draw):
            theta, momentum = self._next_chunk(bodies[index], spans[index], factors)
            if not digests.is_chunk(listed, index, theta, momentum):
                self.verify(shard, index)  # raises if this peer's own state is the one that is wrong
                raise UnfitCommitError(f"commit {head[:8]} of shard {shard}: chunk {index} does not have its digest")
        return bodies

    def _next_chunk(self, body: Body, span: slice, factors: outer_optimizer.Factors) -> tuple[Tensor, Tensor]:
        """Return a chunk's parameters and momentum after a merged outer gradient, in scratch memory."""
        elements = span.stop - span.start
        new = self._scratch.theta[:elements], self._scratch.momentum[:elements]
        outer_optimizer.step_aside(body, self.theta[span], self.momentum[span], new, **factors)
        return new

    def _step(self, shard: ShardId, bodies: Sequence[Body], to: Handover, factors: outer_optimizer.Factors) -> None:
        """Apply the outer step to the shard, and pass the change on to the learner's buffers."""
        own = to.settled[0] if to.settled else None
        is_plain = not to.is_reset and to.snapshot is None and not to.restored and len(to.settled) <= 1
        vectors = self._range(self.theta, shard), self._range(self.momentum, shard)
        if is_plain and outer_optimizer.step_shard(bodies, own, *vectors, to.buffer, to.is_added, factors):
            return
        for number, (body, span) in enumerate(zip(bodies, self._chunks(shard), strict=True)):
            theta, momentum = self.theta[span], self.momentum[span]
            change = quantization.decode_chunk(body, self._scratch.gradient[: theta.numel()])
            outer_optimizer.outer_step(theta, momentum, change, **factors)
            to.take(number, span, theta, change)

    def _bodies(self, shard: ShardId, payload: Payload) -> Sequence[Body]:
        own, bodies = self._own.get(shard, (None, None))
        if bodies is not None and own is payload:
            return bodies
        chunks = quantization.chunk_count(self.layout.shards[shard].elements)
        return Bodies(*compression.unpack(payload, chunks, quantization.LARGEST_BODY))

    def _chunks(self, shard: ShardId) -> list[slice]:
        """Return the slices of a shard's chunks in the flat vectors."""
        piece, size = self.layout.shards[shard], quantization.CHUNK
        return [slice(start, min(start + size, piece.stop)) for start in range(piece.start, piece.stop, size)]

    def _replace(self, shard: ShardId, state: Staged, moves: Moves) -> Shifts:
        handover = self.shifts.begin_shift(shard, moves, partial(self._bodies, shard))
        for number, (span, chunk) in enumerate(zip(self._chunks(shard), state.chunks, strict=True)):
            current, (new, momentum) = self.theta[span], self.form.vectors(chunk)
            change = torch.sub(new, current, out=self._scratch.gradient[: new.numel()])
            current.copy_(new)
            self.momentum[span].copy_(momentum)
            handover.take(number, span, current, change)
        self._set_head(shard, state.head, state.digests)
        self._ready.pop(shard, None)
        return handover.shifts

    def _repair(self, shard: ShardId, state: Staged) -> Shifts:
        """Install the same head's state again, after memory was altered.

        If the altered chunks had been verified, the learner has not seen the damage. Otherwise it may have, so the
        learner takes the global parameters.
        """
        is_known = True
        for number, (span, chunk) in enumerate(zip(self._chunks(shard), state.chunks, strict=True)):
            theta, momentum = self.form.vectors(chunk)
            is_same = torch.equal(theta, self.theta[span]) and torch.equal(momentum, self.momentum[span])
            is_known = is_known and (is_same or self.integrity.is_verified(shard, number))
        if not is_known and self.shifts.learner is not None:
            return self._replace(shard, state, Moves(self.shifts.learner, (), (), is_reset=True))
        for span, chunk in zip(self._chunks(shard), state.chunks, strict=True):
            theta, momentum = self.form.vectors(chunk)
            self.theta[span].copy_(theta)
            self.momentum[span].copy_(momentum)
        self._set_head(shard, state.head, state.digests)
        self._ready.pop(shard, None)
        return Shifts((), ())

    # -- merging -------------------------------------------------------------------------------------------------------

    def merge(
        self,
        shard: ShardId,
        base: Digest,
        version: int,
        given: Sequence[tuple[Contributor, Payload]],
        how: quantization.Recipe | None = None,
        longest: float = math.inf,
        *,
        is_coded: bool = True,
        is_group: bool = False,
        members: Sequence[int] = (),
    ) -> MergeResult:
        """Merge contributions and prepare the outer step that makes ``version``, the next one after ``base``.

        Args:
            given: contributions, sorted by learner.
            how: quantization of the result; None: as the run says.
            longest: the result is scaled down to this norm.
            is_coded: compress with Huffman codes.
            is_group: prepare no outer step.
            members: how many learners' each contribution is; empty: one's.

        Raises:
            StaleBaseError: the shard is not at ``base``.
            SpoiltStateError: this peer's own state does not match its head.
            ContributionError: a payload is malformed, not finite or too long. The others can be merged without it.
        """
        if self.heads[shard] != base or self.integrity.is_spoilt(shard):
            raise StaleBaseError(f"shard {shard} is not at {base[:8]}")
        piece: Shard = self.layout.shards[shard]
        gradients = []
        for contributor, payload in given:
            try:
                gradients.append(merge.contribution(self._bodies(shard, payload), piece.elements))
            except ValueError as error:
                raise ContributionError(contributor.learner, str(error)) from error
        contributors, merged = [c for c, _ in given], self._scratch.merged[: piece.elements]
        sample = b"".join(c.payload for c in contributors)
        givers = [peer_of(c.learner) for c in contributors]
        names = [f"the group of {giver}" for giver in givers] if members else givers  # whose past is another one
        judgement = self.agreement.judge(names, gradients, shard, sample)
        agreement = merge.merge_declared(
            piece.merge, gradients, contributors, judgement.factors, self._round_steps, merged, longest, members
        )
        how = how or self._down
        bodies, length = merge.encode(how, merged, longest, compression.index_bytes(len(self._chunks(shard))))
        payload = payload_of(bodies, how, is_coded)
        payload_digest = digest_of(payload)
        listed = b""
        if not is_group:
            listed = self._next_digests(shard, bodies, outer_optimizer.factors_of(self._outer, version))
            self._ready[shard] = _Ready(base, payload_digest, bodies)
        return MergeResult(payload, payload_digest, listed, length, agreement, tuple(judgement.factors))

    def _next_digests(self, shard: ShardId, bodies: Sequence[Body], factors: outer_optimizer.Factors) -> bytes:
        """Return the chunk digests of the state after a merged outer gradient.

        Other peers rely on these digests, so each present chunk is verified first, while it is in the CPU cache.
        """
        found = []
        for chunk, (body, span) in enumerate(zip(bodies, self._chunks(shard), strict=True)):
            self.verify(shard, chunk)
            found.append(digests.chunk_digest(*self._next_chunk(body, span, factors)))
        return b"".join(found)

    def merge_error(self, shard: ShardId, payload: Payload) -> float:
        """Return the relative quantization error of the first chunk of the newest merge."""
        span = self._chunks(shard)[0]
        return self._error(shard, payload, self._scratch.merged[: span.stop - span.start])

    def encode_error(self, shard: ShardId, payload: Payload) -> float:
        """Return the relative quantization error of the first chunk of the newest contribution."""
        span = self._chunks(shard)[0]
        return self._error(
            shard, payload, self.theta[span] - self.shifts.part("snapshot", shard)[: span.stop - span.start]
        )

    def _error(self, shard: ShardId, payload: Payload, exact: Tensor) -> float:
        chunks = quantization.chunk_count(self.layout.shards[shard].elements)
        body, found = next(compression.split(payload, chunks, quantization.LARGEST_BODY)), torch.empty_like(exact)
        quantization.decode_chunk(body, found)
        size = float(exact.norm())
        return float(found.sub_(exact).norm()) / size if size else 0.0

    def encode(
        self, shard: ShardId, base: Digest, how: quantization.Recipe | None = None, *, is_coded: bool = True
    ) -> tuple[Payload, Digest]:
        """Encode the learner's outer gradient for one shard; return the compressed payload and its digest.

        Each snapshot is encoded once. ``how``: quantization; None: as the run says. ``is_coded``: compress with Huffman
        codes.

        Raises:
            StaleBaseError: the shard is not at ``base``, or there is no snapshot.
            ValueError: the learner's parameters are not finite.
        """
        if self.heads[shard] != base or not self.shifts.has_snapshot(shard) or self.integrity.is_spoilt(shard):
            raise StaleBaseError(f"shard {shard} is not at {base[:8]}")
        how = how or self._up
        vectors = self._range(self.theta, shard), self.shifts.part("snapshot", shard)
        bodies = quantization.encode_vector(how, *vectors, compression.index_bytes(len(self._chunks(shard))))
        self.shifts.release_snapshot(shard)
        payload = payload_of(bodies, how, is_coded)
        self._own[shard] = payload, bodies
        return payload, digest_of(payload)
