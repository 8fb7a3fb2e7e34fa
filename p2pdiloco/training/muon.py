"""Muon: momentum, orthogonalized by five Newton-Schulz steps (Jordan et al., 2024), scaled to AdamW's update size
(arXiv 2502.16982), so that AdamW's learning rate and weight decay serve. As inner optimizer: MuLoCo (arXiv 2505.23725).

``torch.optim.Muon`` is the same for one matrix, but iterates in bfloat16 everywhere: on a CPU without bfloat16 units a
step of ours took 27 s at width 256. This one takes the parameters' own type on the CPU, and stacks of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import overload

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5
MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Parameters are matrices [..., rows, columns], each of the last two dimensions one matrix."""

    def __init__(
        self, parameters: Iterable[Tensor], *, lr: float = 0.0, weight_decay: float = 0.1, momentum: float = MOMENTUM
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; ``closure`` is not used."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                buffer = self.state[p]["momentum"]
                buffer.lerp_(p.grad, 1.0 - group["momentum"])
                update = orthogonalized(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-0.2 * group["lr"] * float(max(p.shape[-2:])) ** 0.5)
        return None


def orthogonalized(x: Tensor) -> Tensor:
    """Matrices [..., rows, columns] with their singular values near 1."""
    dtype, is_tall = x.dtype, x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(_ROUNDS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    return (x.mT if is_tall else x).to(dtype)
