"""A fetched state on its way into the global one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from p2pdiloco.protocol.identifiers import Digest
from p2pdiloco.tensors import merge
from p2pdiloco.tensors.states import StateForm


class Staged(NamedTuple):
    """Checked against its digests."""

    head: Digest
    chunks: Sequence[memoryview]
    """As they travel."""
    digests: bytes

    def distance(self, form: StateForm, theta: Tensor, momentum: Tensor) -> float:
        """Of its parameters from ``theta``, and of its momentum from ``momentum``, both [all n]; the larger."""
        squares, start = [0.0, 0.0], 0
        for chunk in self.chunks:
            theirs = form.vectors(chunk)
            span = slice(start, start + theirs[0].numel())
            start = span.stop
            for i, mine in enumerate((theta, momentum)):
                squares[i] += merge.norm(theirs[i].float() - mine[span].float()) ** 2
        return math.sqrt(max(squares))
