"""Merge of the contributions for one shard: weights, length bounds, and the average.

Legend: v_m is learner m's outer gradient (Theta - theta_m), w_m its weight, W the sum of the weights.

Rules of this file:
1. Sums over gradients run in the given order (the caller sorts by learner), element by element in float32. Norms are
   float64, summed in a fixed order (``quantization``). So whoever has the contributions can make the merge again, and
   gets the same bits.
2. phi(v) = 0 if v is shorter than ``SHORTEST``: zeros, noise, and gradients that cancel out have no direction. As no
   contribution is longer than ``MOST``, each factor and each sum is a finite float32.
3. With a total weight of 0 the result is zero: no peer trained, so nothing moves.
4. A contribution's declarations are not proved, so none counts for more than the others do. Its weight is at most
   ``MOST_WEIGHT`` times the median of the others' weights. Its length is at most ``LONGEST`` times the median of their
   lengths, or of their lengths per step times its own steps (up to a round's). Each contribution has one vote in a
   median, whatever its weight. Progress that is cut off is lost; it is not contributed again.
5. Merging works chunk by chunk and decodes only one chunk of each gradient. Its memory does not grow with the peers.

Source: Decoupled DiLoCo, arXiv 2604.21428. Learners' outer gradients are nearly orthogonal, so their plain mean shrinks
like 1/sqrt(M). Radial-directional averaging (RDA) keeps the mean length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from torch import Tensor

from p2pdiloco.codec import quantization, shard_codec
from p2pdiloco.codec.formats import CHUNK, LARGEST
from p2pdiloco.codec.shard_codec import Bodies
from p2pdiloco.protocol.manifest import MergeRule
from p2pdiloco.protocol.messages import Contributor

if TYPE_CHECKING:
    from typing_extensions import Buffer


MOST_WEIGHT: Final = 1.0
"""Maximum weight of a contribution, in medians of the others' weights."""
LONGEST: Final = 1.5
"""Maximum counted length of a contribution, in medians of the others' lengths."""
SHORTEST: Final = 2.0**-100
MOST: Final = LARGEST / 2
"""Maximum norm of a contribution. Twice that can be encoded, so that rounding may make their merge longer."""
SHORTENED = 0.9
"""Share of the allowed length to which a longer vector is scaled, since quantization may lengthen it a little."""


class Agreement(NamedTuple):
    """Agreement of the contributions to a merge."""

    cosine: float | None
    """Weighted mean of the cosines between two contributions; None if there were fewer than two."""
    shortened: int
    """Number of contributions that counted with less than their full length."""


class Gradient(Protocol):
    """A contribution's outer gradient, float32 [elements]."""

    elements: int

    def norm(self) -> float:
        """Euclidean norm, summed in float64."""

    def add_to(self, out: Tensor, chunk: int, factor: float) -> None:
        """Add ``factor`` times the chunk of that index to ``out``; both operations are rounded to float32."""


class EncodedGradient:
    """A gradient held as its chunks' encoded bodies (``formats``).

    Raises:
        ValueError: a body is malformed, not finite or missing.
    """

    def __init__(self, bodies: Sequence[Buffer], elements: int) -> None:
        if len(bodies) != quantization.chunk_count(elements):
            raise ValueError(f"got {len(bodies)} bodies for {elements} elements")
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
    """Check a contribution of another peer and return it for merging.

    Raises:
        ValueError: a body is malformed, not finite or missing, or the gradient is longer than ``MOST``, in which case
            its merge might not be encodable.
    """
    found = EncodedGradient(bodies, elements)
    if found.norm() > MOST:
        raise ValueError(f"its norm is {found.norm():.1e}; the maximum is {MOST:.0e}")
    return found


def token_weight(tokens: int, steps: int) -> float:
    """Return a contribution's weight: tokens * (tokens / steps), quantity times batch size; 0 without steps."""
    return tokens * (tokens / steps) if steps else 0.0


def merge(
    rule: MergeRule,
    gradients: Sequence[Gradient],
    weights: Sequence[float],
    steps: Sequence[int],
    round_steps: int,
    out: Tensor,
    factors: Sequence[float] | None = None,
    longest: float = math.inf,
    members: Sequence[int] = (),
) -> Agreement:
    """Merge by ``rule`` into ``out``, float32 [n] (see ``direct_mean`` and ``radial_directional``).

    Each contribution declares its weight (``token_weight``) and its inner steps. ``round_steps`` is H.
    ``factors`` multiply the weights after these have been limited (``agreement``). ``longest`` is the length that the
    result may have if all count in full; what counts for less may not make up for it by its length. ``members``: how
    many learners' each is; empty: one's.
    """
    norms = [_length(v) for v in gradients]
    weights, lengths = counted_weights(weights, members), counted_lengths(norms, steps, round_steps)
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
        out.mul_(scale * _shortened(norm(out), longest))
    shortened = sum(counted < n for counted, n in zip(lengths, norms, strict=True))
    return Agreement(_mean_cosine(parts, length * math.fsum(weights)), shortened)


def merge_declared(
    rule: MergeRule,
    gradients: Sequence[Gradient],
    declared: Sequence[Contributor],
    per_cent: Sequence[int],
    round_steps: int,
    out: Tensor,
    longest: float,
    members: Sequence[int] = (),
) -> Agreement:
    """Merge as ``merge`` does, with what a commit says: its contributors and its factors (empty: 100 per cent each)."""
    weights, steps = [token_weight(c.tokens, c.steps) for c in declared], [c.steps for c in declared]
    factors = [factor / 100 for factor in per_cent] or None
    return merge(rule, gradients, weights, steps, round_steps, out, factors, longest, members)


def _mean_cosine(parts: Sequence[float], length: float) -> float | None:
    """Return the mean cosine between vectors of the lengths ``parts`` whose sum has length ``length``.

    It follows from the square of that sum.
    """
    squares = math.fsum(p * p for p in parts)
    pairs = math.fsum(parts) ** 2 - squares
    return None if pairs <= 1e-9 * squares else (length * length - squares) / pairs


def _length(v: Gradient) -> float:
    """Return the norm of a gradient, or 0 if it counts as having no direction (rule 2)."""
    found = v.norm()
    return found if found >= SHORTEST else 0.0


def counted_weights(weights: Sequence[float], members: Sequence[int] = ()) -> list[float]:
    """Return the weight with which each contribution counts, from the declared weights (rule 4).

    The merge of a group's ``members`` counts for as many contributions, each of its mean weight.
    """
    numbers = members or [1] * len(weights)
    means = [w / number for w, number in zip(weights, numbers, strict=True)]
    counted = [min(w, MOST_WEIGHT * typical) for w, typical in zip(means, _typical(means), strict=True)]
    return [w * number for w, number in zip(counted, numbers, strict=True)]


def counted_lengths(norms: Sequence[float], steps: Sequence[int], round_steps: int) -> list[float]:
    """Return the length with which each contribution counts, from its norm and its declared steps (rule 4)."""
    paces = _typical([n / s if s else 0.0 for n, s in zip(norms, steps, strict=True)])
    reaches = [pace * min(s, round_steps) if s else 0.0 for pace, s in zip(paces, steps, strict=True)]
    found = zip(norms, _typical(norms), reaches, strict=True)
    return [min(n, LONGEST * max(typical, reach)) for n, typical, reach in found]


def _typical(values: Sequence[float]) -> list[float]:
    """Return, for each value, the median of the other nonzero values; infinite if there is no other.

    Of two middle values the larger is taken, so that a single liar among three does not choose it.
    """
    known = sorted((index for index, value in enumerate(values) if value), key=values.__getitem__)
    middle = (len(known) - 1) // 2
    found = [math.inf] * len(values)
    for place, index in enumerate(known if len(known) > 1 else ()):
        found[index] = values[known[middle + (place <= middle)]]
    return found


def direct_mean(
    gradients: Sequence[Gradient], weights: Sequence[float], out: Tensor, lengths: Sequence[float] | None = None
) -> float:
    """Compute ``out`` = sum_m w_m v_m / W, float32 [n], and return its length.

    ``lengths`` are the lengths with which the v_m count (None: their own).

    Raises:
        ValueError: as for ``radial_directional``.
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
    """Compute ``out`` = (sum_m w_m ||v_m|| / W) * phi(sum_m w_m phi(v_m) / W), float32 [n].

    ``lengths`` are the lengths with which the v_m count (None: their own). Return ||sum_m w_m phi(v_m) / W||.

    Raises:
        ValueError: Sizes differ, or a weight is negative or not finite.
    """
    total = _checked_total(gradients, weights, out)
    shares = [w / total if total else 0.0 for w in weights]
    norms = [_length(v) for v in gradients]
    factors = [s / n if n else 0.0 for s, n in zip(shares, norms, strict=True)]
    length = _weighted_sum(gradients, factors, out)
    radius = math.fsum(s * n for s, n in zip(shares, norms if lengths is None else lengths, strict=True))
    factor = radius / length if length >= SHORTEST else 0.0
    if factor > LARGEST:  # the factor itself may exceed float32, so scale in two steps
        out.mul_(1.0 / length)
        factor = radius
    out.mul_(factor)
    return length


def encode(how: quantization.Recipe, merged: Tensor, longest: float, room: int = 0) -> tuple[Bodies, float]:
    """Encode ``merged``, float32 [n], and return its bodies, after ``room`` bytes, and the length that they hold.

    A vector longer than ``longest`` is scaled down in place.

    Raises:
        ValueError: as for ``quantization.encode_vector``.
    """
    while True:
        bodies = quantization.encode_vector(how, merged, room=room)
        length = EncodedGradient(bodies, merged.numel()).norm()
        if length <= longest:
            return bodies, length
        merged.mul_(SHORTENED * longest / length)


def _checked_total(gradients: Sequence[Gradient], weights: Sequence[float], out: Tensor) -> float:
    if len(gradients) != len(weights):
        raise ValueError(f"got {len(gradients)} gradients and {len(weights)} weights")
    if any(v.elements != out.numel() for v in gradients):
        raise ValueError(f"a gradient's length is not {out.numel()}")
    if any(not (math.isfinite(w) and w >= 0.0) for w in weights):
        raise ValueError("a weight is negative or not finite")
    return math.fsum(weights)


def _weighted_sum(gradients: Sequence[Gradient], factors: Sequence[float], out: Tensor) -> float:
    """Compute ``out`` = sum of factor * gradient, in order, and return its length. A factor of 0 skips its gradient."""
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
    """Return the Euclidean norm, summed in float64."""
    return math.sqrt(quantization.sum_of_squares(v.contiguous()))
