"""The outer optimizer's step.

Legend: Theta are the global parameters, m the outer momentum, Delta the merged outer gradient, mu the momentum factor.

Rules of this file:
1. SGD with Nesterov momentum: m <- mu m + Delta; Theta <- Theta - lr (Delta + mu m) (DiLoCo, arXiv 2311.08105).
2. Every operation is one elementwise IEEE float32 multiply or add, each rounded on its own: no ``alpha=``, no addcmul,
   no lerp, which may round once for two operations on one machine and twice on another. lr and mu are rounded to
   float32 first. So all peers compute the same bits, and digests can be compared.
3. Temporary memory is one chunk, whatever the size of the shard.
4. Where numba is installed ``kernels`` does the same in one pass over memory, with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p2pdiloco.tensors import kernels

_CHUNK = 1 << 18


def outer_step(
    theta: Tensor, momentum: Tensor, gradient: Tensor, *, learning_rate: float, momentum_factor: float
) -> None:
    """Update ``theta`` and ``momentum`` in place with the merged outer ``gradient``, which becomes new - old ``theta``;
    all are float32 [n] on the CPU.

    Raises:
        ValueError: shapes or types differ.
    """
    for name, vector in (("theta", theta), ("momentum", momentum), ("gradient", gradient)):
        if vector.dtype != torch.float32 or vector.shape != theta.shape or vector.dim() != 1:
            raise ValueError(f"{name} is {vector.dtype} of shape {tuple(vector.shape)}, not float32 like theta")
    if kernels.AVAILABLE:
        kernels.outer_step(theta.numpy(), momentum.numpy(), gradient.numpy(), learning_rate, momentum_factor)
    else:
        outer_step_by_torch(theta, momentum, gradient, learning_rate, momentum_factor)


def outer_step_by_torch(
    theta: Tensor, momentum: Tensor, gradient: Tensor, learning_rate: float, momentum_factor: float
) -> None:
    """The reference for ``kernels.outer_step``."""
    scratch = torch.empty(min(_CHUNK, theta.numel()))
    for start in range(0, theta.numel(), _CHUNK):
        t = theta[start : start + _CHUNK]
        m = momentum[start : start + _CHUNK]
        delta = gradient[start : start + _CHUNK]
        m.mul_(momentum_factor)
        m.add_(delta)
        step = torch.mul(m, momentum_factor, out=scratch[: t.numel()])
        step.add_(delta)
        step.mul_(learning_rate)
        new = torch.sub(t, step, out=step)
        torch.sub(new, t, out=delta)
        t.copy_(new)
