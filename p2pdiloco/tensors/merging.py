"""How an owner merges the contributions for one shard.

Legend: v_m is learner m's outer gradient (Theta - theta_m), w_m its weight, W the sum of the weights.

Rules of this file:
1. Sums run in the order given (the caller sorts by peer id), element by element in float32; norms are float64.
2. phi(0) = 0: a contribution of zeros, or several that cancel out, have no direction.
3. With no weight at all the result is zero: nobody trained, so nothing moves.

Source: Decoupled DiLoCo, arXiv 2604.21428. Learners' outer gradients are nearly orthogonal, so that their plain mean
shrinks like 1/sqrt(M); radial-directional averaging (RDA) keeps the mean length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from p2pdiloco.protocol.manifest import MergeRule

_CHUNK = 1 << 18


def token_weight(tokens: int, steps: int) -> float:
    """A contribution's weight: tokens * (tokens / steps), quantity times batch size; 0 when it made no step."""
    return tokens * (tokens / steps) if steps else 0.0


def merge(rule: MergeRule, gradients: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """Merge by ``rule`` into ``out``; see the two functions."""
    match rule:
        case "direct":
            direct_mean(gradients, weights, out)
        case "rda":
            radial_directional(gradients, weights, out)


def direct_mean(gradients: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """``out`` = sum_m w_m v_m / W. All are float32 [n]; ``out`` is none of the gradients.

    Raises:
        ValueError: see ``radial_directional``.
    """
    total = _checked_total(gradients, weights, out)
    _weighted_sum(gradients, [w / total if total else 0.0 for w in weights], out)


def radial_directional(gradients: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """``out`` = (sum_m w_m ||v_m|| / W) * phi(sum_m w_m phi(v_m) / W). All are float32 [n]; ``out`` is none of the
    gradients.

    Raises:
        ValueError: lengths differ, or a weight is negative or not finite.
    """
    total = _checked_total(gradients, weights, out)
    shares = [w / total if total else 0.0 for w in weights]
    norms = [_norm(v) for v in gradients]
    _weighted_sum(gradients, [s / n if n else 0.0 for s, n in zip(shares, norms, strict=True)], out)
    radius = math.fsum(s * n for s, n in zip(shares, norms, strict=True))
    length = _norm(out)
    out.mul_(radius / length if length else 0.0)


def _checked_total(gradients: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> float:
    if len(gradients) != len(weights):
        raise ValueError(f"{len(gradients)} gradients came with {len(weights)} weights")
    if any(v.shape != out.shape for v in gradients):
        raise ValueError(f"a gradient's shape is not {tuple(out.shape)}")
    if any(not (math.isfinite(w) and w >= 0.0) for w in weights):
        raise ValueError("a weight is negative or not finite")
    return math.fsum(weights)


def _weighted_sum(gradients: Sequence[Tensor], factors: Sequence[float], out: Tensor) -> None:
    """``out`` = sum of factor * gradient, in order; a factor of 0 leaves its gradient out."""
    out.zero_()
    scaled = torch.empty(min(_CHUNK, out.numel()))
    for start in range(0, out.numel(), _CHUNK):
        piece = out[start : start + _CHUNK]
        work = scaled[: piece.numel()]
        for gradient, factor in zip(gradients, factors, strict=True):
            if factor:
                piece.add_(torch.mul(gradient[start : start + _CHUNK], factor, out=work))


def _norm(v: Tensor) -> float:
    """Euclidean norm, summed in float64."""
    pieces = (v[start : start + _CHUNK] for start in range(0, v.numel(), _CHUNK))
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(p, dtype=torch.float64)) ** 2 for p in pieces))
