"""Step of the outer optimizer.

Legend: Theta are the global parameters, m the outer momentum, Delta the merged outer gradient, mu the momentum factor.

Rules of this file:
1. SGD with Nesterov momentum: m <- mu m + Delta; Theta <- Theta - lr (Delta + mu m) (DiLoCo, arXiv 2311.08105).
   With bias correction (m begins at 0), lr is that of ``rate_at``.
   Momentum stored in bfloat16 is computed in float32 and rounded to nearest (ties to even). The rounding error r would
   have moved Theta by -lr r mu^2 / (1 - mu) in all later steps, so Theta moves by that now. The final parameters then
   do not depend on rounding, and small gradients are not lost in a large momentum.
2. Every operation is one elementwise IEEE float32 multiply or add, each rounded on its own. ``alpha=``, addcmul and
   lerp are not used, because they may round once for two operations on one machine and twice on another. lr and mu
   are rounded to float32 first. So all peers compute the same bits, and digests can be compared.
3. Temporary memory is one chunk, whatever the size of the shard.
4. The C library, if present, does the same in one pass over memory, with the same bits: it decodes, steps, and updates
   the caller's buffer at once.
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
    """Factors of one outer step."""

    learning_rate: float
    momentum_factor: float


def factors_of(config: OuterConfig, version: int) -> Factors:
    """Return the factors of the outer step that makes ``version`` of a shard."""
    rate, momentum = config.learning_rate, config.momentum
    if config.bias_correction is True:
        rate = rate_at(version, rate, momentum)
    return {"learning_rate": rate, "momentum_factor": momentum}


def rate_at(version: int, learning_rate: float, momentum: float) -> float:
    """Return the bias-corrected learning rate of the step that makes ``version`` (1 is the first) of a shard.

    A gradient of that step moves the parameters by learning_rate (1 + mu + ... + mu^version) if all earlier ones were
    equal, and by learning_rate / (1 - mu) once m is old. The rate is divided by 1 - mu^(version + 1), so the first
    rounds move as far as later ones. Every peer reads the age of m from the commit. Only multiplications are used,
    because a library's power function may differ between machines.
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
    """Update ``theta`` and ``momentum`` in place with the merged outer ``gradient``.

    On return ``gradient`` holds the change, new - old ``theta``. All vectors are float32 [n] on the CPU; ``momentum``
    may be bfloat16.

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
    """Return the future effect of one unit of momentum on the parameters, in units of the learning rate."""
    return momentum_factor * momentum_factor / (1.0 - momentum_factor)


def outer_step_by_torch(
    theta: Tensor, momentum: Tensor, gradient: Tensor, learning_rate: float, momentum_factor: float
) -> None:
    """Do ``outer_step`` with torch: the reference for the C library."""
    scratch = torch.empty(min(CHUNK, theta.numel()))
    for start in range(0, theta.numel(), CHUNK):
        t = theta[start : start + CHUNK]
        delta = gradient[start : start + CHUNK]
        kept = momentum[start : start + CHUNK]
        m = kept.float()  # the same tensor if it is float32 already
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
    """Round ``exact``, float32 [n], to the nearest values in ``narrow``, bfloat16 [n].

    It works on the bits, because the library's rounding of NaN is not specified.
    """
    bits = exact.view(torch.int32)
    odd = (bits >> 16) & 1
    narrow.view(torch.int16).copy_((bits + odd + 0x7FFF) >> 16)


def _bits(momentum: Tensor) -> NDArray[np.int16]:
    found: NDArray[np.int16] = momentum.view(torch.int16).numpy()
    return found


def _pair(momentum: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Return momentum as the C library takes it: a float32 and a bfloat16 vector, one of them empty."""
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
    """Compute ``new`` from ``theta``, ``momentum`` and the merged outer gradient in one chunk's body (``formats``).

    All vectors are [n] for one chunk, with the types of ``outer_step``.

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
    """Do the outer step with a shard's ``bodies`` in one call of the C library.

    The change of ``theta`` and the values of ``own`` (bodies, too) are written to ``buffer``, or added to it if
    ``is_added``. Return False, without any change, if the library cannot do it; the caller then steps chunk by chunk.
    """
    momentum_factor = factors["momentum_factor"]
    by = factors["learning_rate"], momentum_factor, carry(momentum_factor)
    return shard_codec.stepped(bodies, own, theta, _pair(momentum), buffer, is_added, by)
