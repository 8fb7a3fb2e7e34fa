"""A gradient that was not encoded, for merges in benchmarks and tests; a peer has encoded ones only."""

from __future__ import annotations

from torch import Tensor

from p2pdiloco.codec import merge
from p2pdiloco.codec.formats import CHUNK


class Vector:
    """A gradient held as a plain vector, float32 [n]."""

    def __init__(self, values: Tensor) -> None:
        self.elements = values.numel()
        self._values = values

    def norm(self) -> float:
        """See ``merge.Gradient``."""
        return merge.norm(self._values)

    def add_to(self, out: Tensor, chunk: int, factor: float) -> None:
        """See ``merge.Gradient``."""
        out.add_(self._values[chunk * CHUNK : (chunk + 1) * CHUNK] * factor)
