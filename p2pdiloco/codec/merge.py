"""Merge of the contributions for one shard: weights, length bounds, and the average.

Legend: v_m is learner m's outer gradient (Theta - theta_m), w_m its weight, W the sum of the weights.

Rules of this file:
1. Sums run in the order given (the caller sorts by peer id), element by element in float32; norms are float64.
   Only the owner merges, so that its sums' order may be its machine's.
2. phi(v) = 0 for what is shorter than ``SHORTEST``: zeros, noise that somebody sends, or several that cancel out, have
   no direction. With that, and no contribution longer than ``MOST``, each factor and each sum is a finite float32.
3. With no weight at all the result is zero: nobody trained, so nothing moves.
4. Nothing proves what a contribution declares, so none counts for more than the others do: its weight is at most
   ``MOST_WEIGHT`` times the median of the others' weights, its length at most ``LONGEST`` times the median of their
   lengths (or of their lengths for a step, for as many steps as it is about, up to a turn's). Each contribution has one
   vote in a median, whatever its weight. What is cut off is lost, not given again.
5. Chunk by chunk, and of each gradient no more is decoded than the chunk at hand: memory does not grow with the peers.

Source: Decoupled DiLoCo, arXiv 2604.21428. Learners' outer gradients are nearly orthogonal, so that their plain mean
shrinks like 1/sqrt(M); radial-directional averaging (RDA) keeps the mean length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from p2pdiloco.codec import native, quantization, shard_codec
from p2pdiloco.codec.formats import CHUNK, LARGEST
from p2pdiloco.codec.shard_codec import Bodies
from p2pdiloco.protocol.manifest import MergeRule
from p2pdiloco.protocol.medians import medians_of_others

if TYPE_CHECKING:
    from typing_extensions import Buffer


MOST_WEIGHT: Final = 1.0
"""How many times the median of the others' weights a contribution's may be."""
LONGEST: Final = 1.5
"""How many times as long as the median of the others a contribution may count."""
SHORTEST: Final = 2.0**-100
MOST: Final = LARGEST / 2
"""The length of a contribution. Twice that can be encoded, so that rounding may make a merge of such ones longer."""
SHORTENED = 0.9
"""Of the longest that is allowed: quantized again a vector may come out a little longer."""


class Accord(NamedTuple):
    """How much the contributions of a merge had in common."""

    cosine: float | None
    """The mean of the cosines between two of them, by weight; None: there were not two."""
    shortened: int
    """How many did not count as long as they are."""


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
    """A gradient as its chunks' bodies (``formats``).

    Raises:
        ValueError: a body is malformed, not finite or missing.
    """

    def __init__(self, bodies: Sequence[Buffer], elements: int) -> None:
        if len(bodies) != quantization.chunk_count(elements):
            raise ValueError(f"{len(bodies)} bodies came for {elements} elements")
        self.elements = elements
        self.bodies = bodies
        squares = shard_codec.squared_norms(bodies, elements)
        if squares is None:
            sizes = (min(CHUNK, elements - start) for start in range(0, elements, CHUNK))
            squares = [quantization.squared_norm(body, size) for body, size in zip(bodies, sizes, strict=True)]
        self._norm = math.sqrt(math.fsum(squares))

    def norm(self) -> float:
        return self._norm

    def add_to(self, out: Tensor, chunk: int, factor: float) -> None:
        quantization.add_chunk(self.bodies[chunk], factor, out)


def contribution(bodies: Sequence[Buffer], elements: int) -> EncodedGradient:
    """What another peer has sent, to be merged.

    Raises:
        ValueError: a body is malformed, not finite or missing, or all together are longer than ``MOST``: what is
            merged of such a one cannot be encoded, whatever it is merged with.
    """
    found = EncodedGradient(bodies, elements)
    if found.norm() > MOST:
        raise ValueError(f"it is {found.norm():.1e} long, at most {MOST:.0e} can be merged")
    return found


def token_weight(tokens: int, steps: int) -> float:
    """A contribution's weight: tokens * (tokens / steps), quantity times batch size; 0 when it made no step."""
    return tokens * (tokens / steps) if steps else 0.0


def merge(
    rule: MergeRule,
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    steps: Sequence[int],
    turn_steps: int,
    out: Tensor,
    factors: Sequence[float] | None = None,
) -> Accord:
    """Merge by ``rule`` into ``out``; see the two functions. Each contribution declares its weight (``token_weight``)
    and its inner steps. ``turn_steps``: inner steps of a turn (H). ``factors``: multiply the weights, once they are
    bounded (``agreement``)."""
    norms = [_length(v) for v in gradients]
    weights, lengths = counted_weights(weights), counted_lengths(norms, steps, turn_steps)
    scale = 1.0
    if factors is not None:
        heaviest = max(weights, default=0.0)
        weights = [w * f for w, f in zip(weights, factors, strict=True)]
        if heaviest:
            scale = min(1.0, math.fsum(weights) / heaviest)
    match rule:
        case "direct":
            length = direct_mean(gradients, weights, out, lengths)
            parts = [w * n for w, n in zip(weights, lengths, strict=True)]
        case "rda":
            length = radial_directional(gradients, weights, out, lengths)
            parts = [w if n else 0.0 for w, n in zip(weights, norms, strict=True)]
    if scale < 1.0:  # no weight is left that a low factor would count beside: the contribution becomes shorter instead
        out.mul_(scale)
    shortened = sum(counted < n for counted, n in zip(lengths, norms, strict=True))
    return Accord(_mean_cosine(parts, length * math.fsum(weights)), shortened)


def _mean_cosine(parts: Sequence[float], length: float) -> float | None:
    """Between vectors as long as ``parts`` whose sum is ``length`` long, by that sum's square."""
    squares = math.fsum(p * p for p in parts)
    pairs = math.fsum(parts) ** 2 - squares
    return None if pairs <= 1e-9 * squares else (length * length - squares) / pairs


def _length(v: Gradient) -> float:
    """Rule 2."""
    found = v.norm()
    return found if found >= SHORTEST else 0.0


def counted_weights(weights: Sequence[float]) -> list[float]:
    """How much each contribution counts, by its declared weight; rule 4."""
    return [min(w, MOST_WEIGHT * typical) for w, typical in zip(weights, _typical(weights), strict=True)]


def counted_lengths(norms: Sequence[float], steps: Sequence[int], turn_steps: int) -> list[float]:
    """How long each contribution counts, by its gradient's norm and its declared inner steps; rule 4."""
    paces = _typical([n / s if s else 0.0 for n, s in zip(norms, steps, strict=True)])
    reaches = [pace * min(s, turn_steps) if s else 0.0 for pace, s in zip(paces, steps, strict=True)]
    found = zip(norms, _typical(norms), reaches, strict=True)
    return [min(n, LONGEST * max(typical, reach)) for n, typical, reach in found]


def _typical(values: Sequence[float]) -> list[float]:
    """For each value the median of the others, those aside that are 0; infinite where there is no other."""
    known = [index for index, value in enumerate(values) if value]
    found = [math.inf] * len(values)
    if len(known) > 1:
        for index, median in zip(known, medians_of_others([values[index] for index in known]), strict=True):
            found[index] = median
    return found


def direct_mean(
    gradients: Sequence[Gradient], weights: Sequence[float], out: Tensor, lengths: Sequence[float] | None = None
) -> float:
    """``out`` = sum_m w_m v_m / W. ``out`` is float32 [n]; ``lengths``: as which the v_m count (None: their own).
    Returns its length.

    Raises:
        ValueError: see ``radial_directional``.
    """
    total = _checked_total(gradients, weights, out)
    factors = [w / total if total else 0.0 for w in weights]
    if lengths is not None:
        pairs = zip(gradients, lengths, strict=True)
        factors = [f * _shortened(v.norm(), length) for f, (v, length) in zip(factors, pairs, strict=True)]
    return _weighted_sum(gradients, factors, out)


def _shortened(norm_: float, length: float) -> float:
    return length / norm_ if length < norm_ else 1.0


def radial_directional(
    gradients: Sequence[Gradient], weights: Sequence[float], out: Tensor, lengths: Sequence[float] | None = None
) -> float:
    """``out`` = (sum_m w_m ||v_m|| / W) * phi(sum_m w_m phi(v_m) / W). ``out`` is float32 [n]; ``lengths``: as which
    the v_m count (None: their own). Returns ||sum_m w_m phi(v_m) / W||.

    Raises:
        ValueError: lengths differ, or a weight is negative or not finite.
    """
    total = _checked_total(gradients, weights, out)
    shares = [w / total if total else 0.0 for w in weights]
    norms = [_length(v) for v in gradients]
    factors = [s / n if n else 0.0 for s, n in zip(shares, norms, strict=True)]
    length = _weighted_sum(gradients, factors, out)
    radius = math.fsum(s * n for s, n in zip(shares, norms if lengths is None else lengths, strict=True))
    factor = radius / length if length >= SHORTEST else 0.0
    if factor > LARGEST:  # it may be no float32
        out.mul_(1.0 / length)
        factor = radius
    out.mul_(factor)
    return length


def encode(how: quantization.Recipe, merged: Tensor, longest: float, room: int = 0) -> tuple[Bodies, float]:
    """The bodies of ``merged``, float32 [n], behind ``room`` bytes, and the length of what they hold, at most
    ``longest``: a longer vector is made shorter, in place.

    Raises:
        ValueError: as ``quantization.encode_vector``.
    """
    while True:
        bodies = quantization.encode_vector(how, merged, room=room)
        length = EncodedGradient(bodies, merged.numel()).norm()
        if length <= longest:
            return bodies, length
        merged.mul_(SHORTENED * longest / length)


def _checked_total(gradients: Sequence[Gradient], weights: Sequence[float], out: Tensor) -> float:
    if len(gradients) != len(weights):
        raise ValueError(f"{len(gradients)} gradients came with {len(weights)} weights")
    if any(v.elements != out.numel() for v in gradients):
        raise ValueError(f"a gradient's length is not {out.numel()}")
    if any(not (math.isfinite(w) and w >= 0.0) for w in weights):
        raise ValueError("a weight is negative or not finite")
    return math.fsum(weights)


def _weighted_sum(gradients: Sequence[Gradient], factors: Sequence[float], out: Tensor) -> float:
    """``out`` = sum of factor * gradient, in order; a factor of 0 leaves its gradient out. Returns its length."""
    encoded = [gradient.bodies for gradient in gradients if isinstance(gradient, EncodedGradient)]
    if len(encoded) == len(gradients):
        square = shard_codec.weighted_sum(encoded, factors, out)
        if square is not None:
            return math.sqrt(square)
    for chunk, start in enumerate(range(0, out.numel(), CHUNK)):
        piece = out[start : start + CHUNK].zero_()
        for gradient, factor in zip(gradients, factors, strict=True):
            if factor:
                gradient.add_to(piece, chunk, factor)
    return norm(out)


def norm(v: Tensor) -> float:
    """Euclidean norm, summed in float64."""
    if native.is_used and v.is_contiguous():
        return math.sqrt(native.squares(v.numpy()))
    pieces = (v[start : start + CHUNK] for start in range(0, v.numel(), CHUNK))
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(p, dtype=torch.float64)) ** 2 for p in pieces))
