"""A fetched state on its way into the global one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from p2pdiloco.codec import merge
from p2pdiloco.codec.digests import StateForm
from p2pdiloco.protocol.ids import Digest

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
