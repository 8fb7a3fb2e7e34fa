"""Muon for stacked matrices: momentum, orthogonalized by five Newton-Schulz steps (Jordan et al., 2024), scaled to
AdamW's update size (arXiv 2502.16982), so that AdamW's learning rate and weight decay serve.

In the laboratory only, as inner optimizer (MuLoCo, arXiv 2505.23725).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315


class Muon(torch.optim.Optimizer):
    """Parameters are matrices [k, rows, columns], one for each learner."""

    def __init__(self, parameters: list[Tensor], *, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": 0.0, "share": 1.0, "weight_decay": weight_decay, "momentum": momentum})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; ``closure`` is not used."""
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1.0 - group["momentum"])
                update = orthogonalized(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-0.2 * group["lr"] * float(max(p.shape[1:])) ** 0.5)
        return None


def orthogonalized(x: Tensor) -> Tensor:
    """Matrices [k, rows, columns] with their singular values near 1."""
    is_tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x.transpose(1, 2) if is_tall else x
