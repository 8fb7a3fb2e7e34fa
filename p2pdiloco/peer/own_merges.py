"""Merged steps that this peer made as an owner: those ready to be committed, and what coarse rounding took off them.

Rules of this file:
1. What a coarse codec takes off a shard's merged step is added to the shard's next one, if this peer makes that, too:
   small values that are rounded to 0 each time would never move otherwise. Whoever makes the next one instead knows
   nothing of it, and it is lost, as it is at a restart. No other peer has to know: a commit is what its payload says.
2. It counts at the head that the step led to and nowhere else, however often that head's successor is made: a commit
   of somebody else's, or another state, ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from p2pdiloco.codec import quantization
from p2pdiloco.codec.compression import Body
from p2pdiloco.protocol.ids import Digest, ShardId

COARSE: Final = 1.0
"""Step from which on rounding's error is kept: a quarter of the merged step and more. Finer ones lose an eighth, which
is not worth two bytes a parameter."""


class _Ready(NamedTuple):
    """A merged step: that it gives the digests it promises is known."""

    base: Digest
    payload: Digest
    bodies: Sequence[Body]
    remainder: Tensor | None


class OwnMerges:
    """By shard."""

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

    def taken(self, shard: ShardId, parent: Digest, payload: Digest) -> Sequence[Body] | None:
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
