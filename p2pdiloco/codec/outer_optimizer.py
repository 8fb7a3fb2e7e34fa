"""The outer optimizer's step.

Legend: Theta are the global parameters, m the outer momentum, Delta the merged outer gradient, mu the momentum factor.

Rules of this file:
1. SGD with Nesterov momentum: m <- mu m + Delta; Theta <- Theta - lr (Delta + mu m) (DiLoCo, arXiv 2311.08105).
   Where the run corrects the bias of m, which begins at 0, lr is that of ``rate_at``.
   Momentum that is kept in bfloat16 is computed in float32 and rounded to the nearest (ties to even). What that took
   off it, r, would have moved Theta by -lr r mu^2 / (1 - mu) in all later steps: Theta gets that now, so that where
   parameters end does not depend on rounding, and small gradients are not lost in a large momentum.
2. Every operation is one elementwise IEEE float32 multiply or add, each rounded on its own: no ``alpha=``, no addcmul,
   no lerp, which may round once for two operations on one machine and twice on another. lr and mu are rounded to
   float32 first. So all peers compute the same bits, and digests can be compared.
3. Temporary memory is one chunk, whatever the size of the shard.
4. The C library, where it is there, does the same in one pass over memory, with the same bits: it decodes, steps and
   hands over at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch import Tensor

from p2pdiloco.codec import native, quantization, shard_codec
from p2pdiloco.codec.formats import CHUNK
from p2pdiloco.protocol.manifest import OuterConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

_NOWHERE = np.empty(0, np.float32)
_NOT_NARROW = np.empty(0, np.int16)


class Factors(TypedDict):
    """Of one outer step."""

    learning_rate: float
    momentum_factor: float


def factors_of(config: OuterConfig, version: int) -> Factors:
    """Of the outer step that makes ``version`` of a shard."""
    rate, momentum = config.learning_rate, config.momentum
    if config.bias_correction is True:
        rate = rate_at(version, rate, momentum)
    return {"learning_rate": rate, "momentum_factor": momentum}


def rate_at(version: int, learning_rate: float, momentum: float) -> float:
    """The bias-corrected rate of the step that makes ``version`` (1 is the first) of a shard.

    What merges alike goes learning_rate (1 + mu + ... + mu^version) far in that step, and learning_rate / (1 - mu) once
    m is old; so the rate is divided by 1 - mu^(version + 1), and the first turns go as far as the later ones. How old m
    is every peer reads from the commit. Multiplications alone: a library's power may differ from machine to machine.
    """
    left, power, factor = version + 1, 1.0, momentum
    while left:
        if left & 1:
            power *= factor
        factor *= factor
        left >>= 1
    return learning_rate / (1.0 - power)


def outer_step(
    theta: Tensor, momentum: Tensor, gradient: Tensor, *, learning_rate: float, momentum_factor: float
) -> None:
    """Update ``theta`` and ``momentum`` in place with the merged outer ``gradient``, which becomes new - old ``theta``;
    all are float32 [n] on the CPU, but that ``momentum`` may be bfloat16.

    Raises:
        ValueError: shapes or types differ.
    """
    for name, vector in (("theta", theta), ("momentum", momentum), ("gradient", gradient)):
        allowed = (torch.float32, torch.bfloat16) if vector is momentum else (torch.float32,)
        if vector.dtype not in allowed or vector.shape != theta.shape or vector.dim() != 1:
            raise ValueError(f"{name} is {vector.dtype} of shape {tuple(vector.shape)}, not float32 like theta")
    if not native.is_used:
        outer_step_by_torch(theta, momentum, gradient, learning_rate, momentum_factor)
    elif momentum.dtype == torch.bfloat16:
        vectors = theta.numpy(), _bits(momentum), gradient.numpy()
        native.outer_step_narrow(*vectors, learning_rate, momentum_factor, carry(momentum_factor))
    else:
        native.outer_step(theta.numpy(), momentum.numpy(), gradient.numpy(), learning_rate, momentum_factor)


def carry(momentum_factor: float) -> float:
    """What one unit of momentum still moves the parameters by after this step, in units of the learning rate."""
    return momentum_factor * momentum_factor / (1.0 - momentum_factor)


def outer_step_by_torch(
    theta: Tensor, momentum: Tensor, gradient: Tensor, learning_rate: float, momentum_factor: float
) -> None:
    """Do ``outer_step`` by torch: the reference for the C library."""
    scratch = torch.empty(min(CHUNK, theta.numel()))
    for start in range(0, theta.numel(), CHUNK):
        t = theta[start : start + CHUNK]
        delta = gradient[start : start + CHUNK]
        kept = momentum[start : start + CHUNK]
        m = kept.float()  # itself, if it is
        m.mul_(momentum_factor)
        m.add_(delta)
        step = torch.mul(m, momentum_factor, out=scratch[: t.numel()])
        step.add_(delta)
        if m is not kept:
            round_to(kept, m)
            step.add_(m.sub_(kept.float()).mul_(carry(momentum_factor)))
        step.mul_(learning_rate)
        new = torch.sub(t, step, out=step)
        torch.sub(new, t, out=delta)
        t.copy_(new)


def round_to(narrow: Tensor, exact: Tensor) -> None:
    """``narrow``, bfloat16 [n], becomes the nearest of ``exact``, float32 [n]. By the bits, since what a library makes
    of values that are no numbers is its own affair."""
    bits = exact.view(torch.int32)
    odd = (bits >> 16) & 1
    narrow.view(torch.int16).copy_((bits + odd + 0x7FFF) >> 16)


def _bits(momentum: Tensor) -> NDArray[np.int16]:
    found: NDArray[np.int16] = momentum.view(torch.int16).numpy()
    return found


def _pair(momentum: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Momentum as the C library takes it: float32 and bfloat16, of which one is empty."""
    if momentum.dtype == torch.bfloat16:
        return _NOWHERE, _bits(momentum)
    return momentum.numpy(), _NOT_NARROW


def step_aside(
    body: Buffer,
    theta: Tensor,
    momentum: Tensor,
    new: tuple[Tensor, Tensor],
    *,
    learning_rate: float,
    momentum_factor: float,
) -> None:
    """Compute ``new`` from ``theta``, ``momentum`` and the merged outer gradient in one chunk's body (``formats``); all
    are [n] of one chunk, with the types of ``outer_step``.

    Raises:
        ValueError: the body is malformed.
    """
    old, aside = (theta.numpy(), *_pair(momentum)), (new[0].numpy(), *_pair(new[1]))
    factors = learning_rate, momentum_factor, carry(momentum_factor)
    if shard_codec.stepped_aside(body, old, aside, factors):
        return
    gradient = quantization.decode_chunk(body, torch.empty_like(theta))
    new[0].copy_(theta)
    new[1].copy_(momentum)
    outer_step(new[0], new[1], gradient, learning_rate=learning_rate, momentum_factor=momentum_factor)


def step_shard(
    bodies: Sequence[Buffer],
    own: Sequence[Buffer] | None,
    theta: Tensor,
    momentum: Tensor,
    buffer: Tensor | None,
    is_added: bool,
    factors: Factors,
) -> bool:
    """Do the outer step with a shard's ``bodies`` in one call of the C library. The change of ``theta``, and the values
    of ``own`` (bodies, too), go to ``buffer``, or ``is_added`` to what that holds. False: nothing is done, and the
    caller must step chunk by chunk."""
    momentum_factor = factors["momentum_factor"]
    by = factors["learning_rate"], momentum_factor, carry(momentum_factor)
    return shard_codec.stepped(bodies, own, theta, _pair(momentum), buffer, is_added, by)
