"""The global parameters and momentum of all shards, and what each commit does to them and to the learner's parameters.

Rules of this file:
1. What touches a shard runs in the order in which it was asked for, and so does what touches several or the learner's
   life, between all others. That order is what makes the learner's view exact: commits, shifts, their acknowledgements
   and snapshots are told apart by it, without locks. Different shards are worked on at the same time: they share
   nothing but ``VectorMemory``, and each thread has a scratch of its own.
2. Theta and momentum change only together with the shard's head, and only when the sample of the result's chunks that
   is checked at this version has the digests that the owner signed (see ``codec.digests``).
3. What a change means for the learner is the matter of ``learner_updates``.
4. Work on a shard goes chunk by chunk, everything for one chunk while it is in the cache. What can fail is found out
   before the first chunk is changed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from p2pdiloco.codec import bitrate_ladder, compression, digests, merge, outer_optimizer, quantization
from p2pdiloco.codec.agreement import AgreementHistory
from p2pdiloco.codec.compression import Body
from p2pdiloco.codec.digests import StateForm, as_bytes
from p2pdiloco.codec.shard_codec import Bodies
from p2pdiloco.peer.integrity import Integrity
from p2pdiloco.peer.learner_updates import Handover, LearnerUpdates, Moves, Payload, Shifts
from p2pdiloco.protocol.ids import Digest, LearnerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import CodecConfig, Layout, OuterConfig, Shard
from p2pdiloco.protocol.messages import CommitHeader, Contributor
from p2pdiloco.training.shared_memory import SharedVectors

# -- Own merges --------------------------------------------------------------------------------------------------------
# Merged steps that this peer made as an owner: those ready to be committed, and what coarse rounding took off them.
# Rules of this file:
# 1. What a coarse codec takes off a shard's merged step is added to the shard's next one, if this peer makes that, too:
#    small values that are rounded to 0 each time would never move otherwise. Whoever makes the next one instead knows
#    nothing of it, and it is lost, as it is at a restart. No other peer has to know: a commit is what its payload says.
# 2. It counts at the head that the step led to and nowhere else, however often that head's successor is made: a commit
#    of somebody else's, or another state, ends it.


COARSE: Final = 1.0
"""Step from which on rounding's error is kept: a quarter of the merged step and more. Finer ones lose an eighth, which
is not worth two bytes a parameter."""


class _Ready(NamedTuple):
    """A merged step: that it gives the digests it promises is known."""

    base: Digest
    payload: Digest
    bodies: Sequence[Body]
    remainder: Tensor | None


class PendingMerges:
    """Merged steps of this peer as an owner, by shard."""

    def __init__(self) -> None:
        self._ready: dict[ShardId, _Ready] = {}
        self._owed: dict[ShardId, Tensor] = {}
        """To be added to the step that follows the shard's head; bfloat16 [elements]."""

    def add_owed(self, shard: ShardId, merged: Tensor) -> None:
        """To ``merged``, float32 [elements], what is owed to the step that follows the shard's head."""
        owed = self._owed.get(shard)
        if owed is not None and bool(owed.isfinite().all()):  # memory is altered at times, and nothing else checks it
            merged += owed

    def put(
        self,
        shard: ShardId,
        base: Digest,
        payload: Digest,
        bodies: Sequence[Body],
        how: quantization.Recipe,
        merged: Tensor,
    ) -> None:
        """``merged`` was encoded as ``bodies``."""
        remainder = None
        if how.step >= COARSE:
            remainder = torch.empty(merged.shape, dtype=torch.bfloat16)
            torch.sub(merged, quantization.decode_chunks(bodies, torch.empty_like(merged)), out=remainder)
        self._ready[shard] = _Ready(base, payload, bodies, remainder)

    def take(self, shard: ShardId, parent: Digest, payload: Digest) -> Sequence[Body] | None:
        """The bodies of the commit after ``parent`` that the shard takes now, if it was made here."""
        ready = self._ready.pop(shard, None)
        self._owed.pop(shard, None)
        if ready is None or ready.base != parent or ready.payload != payload:
            return None
        if ready.remainder is not None:
            self._owed[shard] = ready.remainder
        return ready.bodies

    def forget(self, shard: ShardId) -> None:
        """The shard's state is another."""
        self._ready.pop(shard, None)
        self._owed.pop(shard, None)


# -- Staged states -----------------------------------------------------------------------------------------------------
# A fetched state on its way into the global one.


MENDED_SHARE = 16
MENDED_LEAST = 1024
"""Of a chunk, the share of elements that memory may have altered; or so many."""
ORDINARY = 16.0
"""Values there have together at most so many times the length of all the others."""


class Staged(NamedTuple):
    """Checked against its digests."""

    head: Digest
    chunks: Sequence[memoryview]
    """As they travel."""
    digests: bytes

    def distance(self, form: StateForm, theta: Tensor, momentum: Tensor) -> float:
        """Of its parameters from ``theta``, and of its momentum from ``momentum``, both [all n]; the larger.

        Memory that is not what it was may be anything at a few places: of each chunk those that differ most are left
        out (a sixteenth, or 1,024), and what stands there must not be far beyond the rest of what is here."""
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
                    continue  # what is here is no measure
                is_near = change <= bound
                squares[i] += merge.norm(change[is_near]) ** 2
                beyond = max(beyond, merge.norm(theirs[~is_near]) - ORDINARY * merge.norm(mine[is_near]))
        return max(math.sqrt(max(squares)), beyond)


# -- Model state -------------------------------------------------------------------------------------------------------
# The global parameters and momentum of all shards, and what each commit does to them and to the learner's parameters.


ROUNDED_LENGTH = 1 + 1e-6
"""A sum's order may differ from machine to machine."""


class StaleBaseError(Exception):
    """The shard's head is not the one that was asked for."""


class DigestMismatchError(Exception):
    """A commit or a fetched state does not give the digest it promises."""


class UnfitCommitError(DigestMismatchError):
    """A commit that no honest owner makes on its parent, whose state is here and sound: everybody refuses it."""


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
    """Of the chunks of the state that it leads to; their digest is the commit's result."""
    length: float = 0.0
    """Euclidean norm of what the payload holds."""
    accord: merge.Accord = merge.Accord(None, 0)
    factors: tuple[int, ...] = ()
    """How much of each contribution's weight counted, in per cent; empty: all of all."""


class _Scratch(threading.local):
    """A thread's vectors that are used again and again: fresh memory costs more than the arithmetic in it. A chunk
    long, but for the one that holds a shard; not touched until they are needed."""

    def __init__(self, largest_shard: int, momentum: torch.dtype) -> None:
        self.theta, self.gradient = (torch.empty(quantization.CHUNK) for _ in range(2))
        self.momentum = torch.empty(quantization.CHUNK, dtype=momentum)
        self.merged = torch.empty(largest_shard)


def payload_of(bodies: Bodies, how: quantization.Recipe, is_coded: bool) -> Payload:
    """Of bodies before which there is room for an index. Stored, it is their memory."""
    if is_coded or not bitrate_ladder.is_dense(how):
        return compression.join(bodies)
    return compression.store(bodies.memory, [len(body) for body in bodies])


class ModelState:
    """Vectors over all parameters, in the layout's flat order: float32, momentum in the run's own type."""

    def __init__(
        self,
        layout: Layout,
        outer_config: OuterConfig,
        codec: CodecConfig,
        vectors: SharedVectors,
        *,
        turn_steps: int,
    ) -> None:
        """``turn_steps``: inner steps of a turn (H)."""
        self.layout = layout
        self._turn_steps = turn_steps
        self._outer = outer_config
        self._reach = max(1.0, outer_config.learning_rate) / (1.0 - min(outer_config.momentum, 0.999))
        """How far one merged step of length 1 moves parameters, or momentum, in the end."""
        self._up = bitrate_ladder.fixed(codec.up, codec.up_step)
        self._down = bitrate_ladder.fixed(codec.down, codec.down_step)
        self.theta = vectors.theta
        self.form = StateForm.of(outer_config)
        self.momentum = self.form.still(layout.elements)
        self.shifts = LearnerUpdates(layout, vectors)
        self.heads: list[Digest | None] = [None] * len(layout.shards)
        self.integrity = Integrity([quantization.chunk_count(shard.elements) for shard in layout.shards])
        self._staged: dict[ShardId, Staged] = {}
        self._pending_merges = PendingMerges()
        self._agreement = AgreementHistory()
        self._own: dict[ShardId, tuple[Payload, Bodies]] = {}
        """This learner's newest contribution and its bodies: half a byte a parameter, or decompressed twice."""
        self._scratch = _Scratch(max(shard.elements for shard in layout.shards), self.form.momentum)

    def _range(self, vector: Tensor, shard: ShardId) -> Tensor:
        piece = self.layout.shards[shard]
        return vector[piece.start : piece.stop]

    # -- global state --------------------------------------------------------------------------------------------------

    def digest(self, shard: ShardId) -> Digest:
        """Digest of the shard's parameters and momentum, computed anew."""
        return digests.state_digest(self._range(self.theta, shard), self._range(self.momentum, shard))

    def keep_in(self, momentum: Tensor) -> None:
        """Have the momentum in this vector, [elements], instead of an own one: what is ``put`` from there is there, and
        a start needs it once. Before anything is put."""
        if momentum.shape == self.momentum.shape and momentum.dtype == self.momentum.dtype:
            self.momentum = momentum

    def put(self, shard: ShardId, head: Digest, theta: Tensor, momentum: Tensor) -> None:
        """Set a shard outright: version 0 or a checkpoint, before any learner."""
        self._range(self.theta, shard).copy_(theta)
        self._range(self.momentum, shard).copy_(momentum)
        self.heads[shard] = head
        self.integrity.set_digests(shard, digests.digest_list(theta, momentum))

    def verify(self, shard: ShardId, chunk: int) -> None:
        """See whether one chunk still has the digest that the owner of the shard's head signed.

        Raises:
            SpoiltStateError: it has not.
        """
        span = self._chunks(shard)[chunk]
        self.integrity.verify(shard, chunk, self.theta[span], self.momentum[span])

    def accept(self, shard: ShardId) -> None:
        """Take a spoilt shard's state as it is, unless it was installed anew meanwhile: nobody else has it. Others get
        it with its next version, whose digests are signed here."""
        if self.integrity.is_spoilt(shard):
            theta, momentum = self._range(self.theta, shard), self._range(self.momentum, shard)
            self.integrity.accept(shard, digests.digest_list(theta, momentum))

    def copy(
        self, shard: ShardId, out: memoryview, chunks: range | None = None, *, is_checked: bool = True
    ) -> tuple[Digest, bytes]:
        """Put the shard's state into ``out`` as it travels (only ``chunks``, by default all); returns its head and the
        list of its digests. ``is_checked``: chunks that nobody has looked at are compared with these.

        Raises:
            StaleBaseError: the shard has no state yet, or none that can be proved.
            SpoiltStateError: it is not what its head stands for.
        """
        head = self.heads[shard]
        if head is None or self.integrity.is_spoilt(shard):
            raise StaleBaseError(f"shard {shard} is not here{'' if head is None else ' as it should be'}")
        if self.integrity.is_unsigned(shard):
            raise StaleBaseError(f"shard {shard} is not as it was signed, its next version will be")
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
        """Keep a fetched state until it is installed: every chunk as it travels, checked against ``listed``."""
        self._staged[shard] = Staged(head, chunks, listed)

    def install(self, shard: ShardId, head: Digest, moves: Moves, farthest: float = math.inf) -> Shifts:
        """Make a staged state the shard's; returns the shifts to tell the learner of.

        Raises:
            StaleBaseError: it is not staged any more.
            UnfitCommitError: it is farther from this one than ``farthest`` allows.
        """
        staged = self._staged.pop(shard, None)
        if staged is None or staged.head != head:
            raise StaleBaseError(f"the state of shard {shard} at {head[:8]} is not at hand any more")
        here = self._range(self.theta, shard), self._range(self.momentum, shard)
        if self.heads[shard] is not None and staged.distance(self.form, *here) > farthest * self._reach:
            raise UnfitCommitError(f"the state of shard {shard} at {head[:8]} is too far from this one")
        return self._repair(shard, staged) if head == self.heads[shard] else self._replace(shard, staged, moves)

    def apply(self, header: CommitHeader, head: Digest, payload: Payload, listed: bytes, moves: Moves) -> Shifts:
        """Take the commit ``header``, called ``head``, with its payload and the digests of the chunks of its result;
        returns the shifts to tell the learner of.

        Raises:
            StaleBaseError: the shard's head is not the commit's parent.
            UnfitCommitError: the result is not what the owner signed, or the payload is malformed or too long.
        """
        shard, parent = header.shard, header.parent
        if self.heads[shard] != parent or self.integrity.is_spoilt(shard):
            raise StaleBaseError(f"shard {shard} is not at {parent[:8]}")
        bodies = self._pending_merges.take(shard, parent, header.payload)
        if bodies is None:
            bodies = self._check_commit(header, head, payload, listed)
        handover = self.shifts.begin_shift(shard, moves, partial(self._bodies, shard))
        factors = outer_optimizer.factors_of(self._outer, header.version)
        self._step(shard, bodies, handover, factors)
        self._set_head(shard, head, listed)
        return handover.shifts

    def _set_head(self, shard: ShardId, head: Digest, listed: bytes) -> None:
        """The shard has another head."""
        self.heads[shard] = head
        self.integrity.set_digests(shard, listed)
        self._own.pop(shard, None)

    def _check_commit(self, header: CommitHeader, head: Digest, payload: Payload, listed: bytes) -> Sequence[Body]:
        """The bodies of a commit's payload; all can be decoded, they are no longer than declared, and the sample of its
        version gives what is listed."""
        shard, spans = header.shard, self._chunks(header.shard)
        factors = outer_optimizer.factors_of(self._outer, header.version)
        elements = self.layout.shards[shard].elements
        try:
            bodies = self._bodies(shard, payload)
            length = merge.EncodedGradient(bodies, elements).norm()
        except ValueError as error:
            raise UnfitCommitError(f"the payload of commit {head[:8]} is malformed: {error}") from error
        if length > header.length * ROUNDED_LENGTH:
            raise UnfitCommitError(f"the step of commit {head[:8]} is {length:.3g} long and not {header.length:.3g}")
        for index in digests.sample(elements, header.version):
            theta, momentum = self._next_chunk(bodies[index], spans[index], factors)
            if not digests.is_chunk(listed, index, theta, momentum):
                self.verify(shard, index)  # it may be ours that is wrong
                raise UnfitCommitError(f"commit {head[:8]} of shard {shard} does not give chunk {index} as promised")
        return bodies

    def _next_chunk(self, body: Body, span: slice, factors: outer_optimizer.Factors) -> tuple[Tensor, Tensor]:
        """What a chunk's parameters and momentum become with a merged outer gradient, in scratch."""
        elements = span.stop - span.start
        new = self._scratch.theta[:elements], self._scratch.momentum[:elements]
        outer_optimizer.step_aside(body, self.theta[span], self.momentum[span], new, **factors)
        return new

    def _step(self, shard: ShardId, bodies: Sequence[Body], to: Handover, factors: outer_optimizer.Factors) -> None:
        """The outer step, and what follows from it for the learner."""
        own = to.settled[0] if to.settled else None
        is_plain = not to.is_reset and to.snapshot is None and not to.restored and len(to.settled) <= 1
        vectors = self._range(self.theta, shard), self._range(self.momentum, shard)
        buffer = None if to.buffer is None else self._range(to.buffer, shard)
        if is_plain and outer_optimizer.step_shard(bodies, own, *vectors, buffer, to.is_added, factors):
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
        """Where a shard's chunks lie in the flat vectors."""
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
        self._pending_merges.forget(shard)
        return handover.shifts

    def _repair(self, shard: ShardId, state: Staged) -> Shifts:
        """The same head's state again. What was altered after it was verified the learner has not seen; anything else
        may be in its parameters, too, and it takes the global ones."""
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
        self._pending_merges.forget(shard)
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
    ) -> MergeResult:
        """Merge contributions (sorted by learner), shorten the result to ``longest``, quantize it (``how`` None: as the
        run says), compress it (``is_coded``: with Huffman codes), and prepare the outer step that makes ``version``,
        the next one after ``base``.

        Raises:
            StaleBaseError: the shard's head is not ``base``.
            SpoiltStateError: this peer's own state is not what its head stands for.
            ContributionError: a payload is malformed, not finite or too long; the others may be merged without it.
        """
        if self.heads[shard] != base or self.integrity.is_spoilt(shard):
            raise StaleBaseError(f"shard {shard} is not at {base[:8]}")
        piece: Shard = self.layout.shards[shard]
        gradients, weights = [], []
        for contributor, payload in given:
            try:
                gradients.append(merge.contribution(self._bodies(shard, payload), piece.elements))
            except ValueError as error:
                raise ContributionError(contributor.learner, str(error)) from error
            weights.append(merge.token_weight(contributor.tokens, contributor.steps))
        steps, merged = [c.steps for c, _ in given], self._scratch.merged[: piece.elements]
        judgement = self._agreement.judge([c.learner for c, _ in given], gradients)
        factors = [per_cent / 100 for per_cent in judgement.factors] or None
        accord = merge.merge(piece.merge, gradients, weights, steps, self._turn_steps, merged, factors)
        self._pending_merges.add_owed(shard, merged)
        how = how or self._down
        bodies, length = merge.encode(how, merged, longest, compression.index_bytes(len(self._chunks(shard))))
        payload = payload_of(bodies, how, is_coded)
        payload_digest = digest_of(payload)
        listed = self._next_digests(shard, bodies, outer_optimizer.factors_of(self._outer, version))
        self._pending_merges.put(shard, base, payload_digest, bodies, how, merged)
        return MergeResult(payload, payload_digest, listed, length, accord, tuple(judgement.factors))

    def _next_digests(self, shard: ShardId, bodies: Sequence[Body], factors: outer_optimizer.Factors) -> bytes:
        """Of the chunks of what a shard's state becomes with a merged outer gradient. What is signed here the others
        believe, so each chunk is seen to be what it should be, while it is in the cache."""
        found = []
        for chunk, (body, span) in enumerate(zip(bodies, self._chunks(shard), strict=True)):
            self.verify(shard, chunk)
            found.append(digests.chunk_digest(*self._next_chunk(body, span, factors)))
        return b"".join(found)

    def dissenters(self) -> dict[str, int]:
        """See ``AgreementHistory.dissenters``; of the merges that this peer made."""
        return self._agreement.dissenters()

    def merge_error(self, shard: ShardId, payload: Payload) -> float:
        """Relative error of the first chunk of what was just merged."""
        span = self._chunks(shard)[0]
        return self._error(shard, payload, self._scratch.merged[: span.stop - span.start])

    def encode_error(self, shard: ShardId, payload: Payload) -> float:
        """Relative error of the first chunk of what was just encoded."""
        span = self._chunks(shard)[0]
        return self._error(shard, payload, self.theta[span] - self.shifts.snapshot[span])

    def _error(self, shard: ShardId, payload: Payload, exact: Tensor) -> float:
        chunks = quantization.chunk_count(self.layout.shards[shard].elements)
        body, found = next(compression.split(payload, chunks, quantization.LARGEST_BODY)), torch.empty_like(exact)
        quantization.decode_chunk(body, found)
        size = float(exact.norm())
        return float(found.sub_(exact).norm()) / size if size else 0.0

    def encode(
        self, shard: ShardId, base: Digest, how: quantization.Recipe | None = None, *, is_coded: bool = True
    ) -> tuple[Payload, Digest]:
        """The learner's outer gradient for one shard: compressed payload (``is_coded``: with Huffman codes) and its
        digest. ``how`` None: as the run says. Each snapshot is encoded once.

        Raises:
            StaleBaseError: the shard's head is not ``base``, or there is no snapshot.
            ValueError: the learner's parameters are not finite.
        """
        if self.heads[shard] != base or not self.shifts.has_snapshot(shard) or self.integrity.is_spoilt(shard):
            raise StaleBaseError(f"shard {shard} is not at {base[:8]}")
        how = how or self._up
        vectors = self._range(self.theta, shard), self._range(self.shifts.snapshot, shard)
        bodies = quantization.encode_vector(how, *vectors, compression.index_bytes(len(self._chunks(shard))))
        self.shifts.release_snapshot(shard)
        payload = payload_of(bodies, how, is_coded)
        self._own[shard] = payload, bodies
        return payload, digest_of(payload)
