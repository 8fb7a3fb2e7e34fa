"""Vector that the baselines average: filled anew for each round, and compared with the mean afterwards."""

from __future__ import annotations

import torch

BLOCK = 1 << 20
"""Parameters that repeat."""


def _block(index: int) -> torch.Tensor:
    return torch.randn(BLOCK, generator=torch.Generator().manual_seed(index)) * 1e-3


class Averaged:
    """``vector``: float32 [parameters], of the peer of that ``index``, one of ``peers``."""

    def __init__(self, index: int, peers: int, parameters: int) -> None:
        self.vector = torch.zeros(parameters)
        self._own = _block(index)
        self._mean = torch.stack([_block(i) for i in range(peers)]).mean(0)

    def fill(self) -> None:
        """The peer's own, as before a round."""
        for start in range(0, self.vector.numel(), BLOCK):
            piece = self.vector[start : start + BLOCK]
            piece.copy_(self._own[: piece.numel()])

    def error(self) -> float:
        """Relative, of the first block."""
        found = self.vector[:BLOCK]
        mean = self._mean[: found.numel()]
        return float((found - mean).norm() / mean.norm())
