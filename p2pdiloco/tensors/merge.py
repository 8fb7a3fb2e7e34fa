"""How an owner merges the contributions for one shard.

Legend: v_m is learner m's outer gradient (Theta - theta_m), w_m its weight, W the sum of the weights.

Rules of this file:
1. Sums run in the order given (the caller sorts by peer id), element by element in float32; norms are float64.
   Only the owner merges, so that its sums' order may be its machine's.
2. phi(0) = 0: a contribution of zeros, or several that cancel out, have no direction.
3. With no weight at all the result is zero: nobody trained, so nothing moves.
4. Chunk by chunk, and of each gradient no more is decoded than the chunk at hand: memory does not grow with the peers.

Source: Decoupled DiLoCo, arXiv 2604.21428. Learners' outer gradients are nearly orthogonal, so that their plain mean
shrinks like 1/sqrt(M); radial-directional averaging (RDA) keeps the mean length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from p2pdiloco.protocol.manifest import MergeRule
from p2pdiloco.tensors import kernels, quantizers
from p2pdiloco.tensors.recipes import CHUNK

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Gradient(Protocol):
    """A contribution's outer gradient, float32 [elements]."""

    elements: int

    def norm(self) -> float:
        """Euclidean norm, summed in float64."""

    def add_to(self, out: Tensor, chunk: int, factor: float) -> None:
        """``out`` += ``factor`` * the chunk of that index; both operations rounded to float32."""


class Vector:
    """A gradient as it is."""

    def __init__(self, values: Tensor) -> None:
        self.elements = values.numel()
        self._values = values

    def norm(self) -> float:
        return norm(self._values)

    def add_to(self, out: Tensor, chunk: int, factor: float) -> None:
        out.add_(self._values[chunk * CHUNK : (chunk + 1) * CHUNK] * factor)


class EncodedGradient:
    """A gradient as its chunks' bodies (``quantizers``).

    Raises:
        ValueError: a body is malformed, not finite or missing.
    """

    def __init__(self, bodies: Sequence[Buffer], elements: int) -> None:
        if len(bodies) != quantizers.chunk_count(elements):
            raise ValueError(f"{len(bodies)} bodies came for {elements} elements")
        self.elements = elements
        self._bodies = bodies
        sizes = (min(CHUNK, elements - start) for start in range(0, elements, CHUNK))
        squares = [quantizers.squared_norm(body, size) for body, size in zip(bodies, sizes, strict=True)]
        self._norm = math.sqrt(math.fsum(squares))

    def norm(self) -> float:
        return self._norm

    def add_to(self, out: Tensor, chunk: int, factor: float) -> None:
        quantizers.add_chunk(self._bodies[chunk], factor, out)


def token_weight(tokens: int, steps: int) -> float:
    """A contribution's weight: tokens * (tokens / steps), quantity times batch size; 0 when it made no step."""
    return tokens * (tokens / steps) if steps else 0.0


def merge(rule: MergeRule, gradients: Sequence[Gradient], weights: Sequence[float], out: Tensor) -> None:
    """Merge by ``rule`` into ``out``; see the two functions."""
    match rule:
        case "direct":
            direct_mean(gradients, weights, out)
        case "rda":
            radial_directional(gradients, weights, out)


def direct_mean(gradients: Sequence[Gradient], weights: Sequence[float], out: Tensor) -> None:
    """``out`` = sum_m w_m v_m / W. ``out`` is float32 [n].

    Raises:
        ValueError: see ``radial_directional``.
    """
    total = _checked_total(gradients, weights, out)
    _weighted_sum(gradients, [w / total if total else 0.0 for w in weights], out)


def radial_directional(gradients: Sequence[Gradient], weights: Sequence[float], out: Tensor) -> None:
    """``out`` = (sum_m w_m ||v_m|| / W) * phi(sum_m w_m phi(v_m) / W). ``out`` is float32 [n].

    Raises:
        ValueError: lengths differ, or a weight is negative or not finite.
    """
    total = _checked_total(gradients, weights, out)
    shares = [w / total if total else 0.0 for w in weights]
    norms = [v.norm() for v in gradients]
    _weighted_sum(gradients, [s / n if n else 0.0 for s, n in zip(shares, norms, strict=True)], out)
    radius = math.fsum(s * n for s, n in zip(shares, norms, strict=True))
    length = norm(out)
    out.mul_(radius / length if length else 0.0)


def _checked_total(gradients: Sequence[Gradient], weights: Sequence[float], out: Tensor) -> float:
    if len(gradients) != len(weights):
        raise ValueError(f"{len(gradients)} gradients came with {len(weights)} weights")
    if any(v.elements != out.numel() for v in gradients):
        raise ValueError(f"a gradient's length is not {out.numel()}")
    if any(not (math.isfinite(w) and w >= 0.0) for w in weights):
        raise ValueError("a weight is negative or not finite")
    return math.fsum(weights)


def _weighted_sum(gradients: Sequence[Gradient], factors: Sequence[float], out: Tensor) -> None:
    """``out`` = sum of factor * gradient, in order; a factor of 0 leaves its gradient out."""
    for chunk, start in enumerate(range(0, out.numel(), CHUNK)):
        piece = out[start : start + CHUNK].zero_()
        for gradient, factor in zip(gradients, factors, strict=True):
            if factor:
                gradient.add_to(piece, chunk, factor)


def norm(v: Tensor) -> float:
    """Euclidean norm, summed in float64."""
    if kernels.AVAILABLE and v.is_contiguous():
        return math.sqrt(kernels.squares(v.numpy()))
    pieces = (v[start : start + CHUNK] for start in range(0, v.numel(), CHUNK))
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(p, dtype=torch.float64)) ** 2 for p in pieces))
