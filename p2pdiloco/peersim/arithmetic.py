"""The merge and the outer step in the checkers' own hand, beside those of ``tensors``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from p2pdiloco.protocol.manifest import OuterConfig

Vector = NDArray[np.float32]


def outer_step(
    theta: Vector, momentum: Vector, change: Vector, outer: OuterConfig, version: int, *, is_short: bool
) -> tuple[Vector, Vector]:
    """Parameters and momentum after ``change`` made this version. ``is_short``: momentum is kept in bfloat16."""
    age = 1.0 - outer.momentum ** (version + 1) if outer.bias_correction is True else 1.0
    rate, factor = np.float32(outer.learning_rate / age), np.float32(outer.momentum)
    new = momentum * factor + change
    step = new * factor + change
    if is_short:
        bits = new.view(np.uint32)
        kept = ((bits + ((bits >> 16) & 1) + 0x7FFF) & 0xFFFF0000).view(np.float32)
        step += (new - kept) * np.float32(outer.momentum * outer.momentum / (1.0 - outer.momentum))
        new = kept
    return theta - rate * step, new


def merged(
    vectors: Sequence[NDArray[np.float64]], weights: Sequence[float], steps: Sequence[int], how: str
) -> NDArray[np.float64]:
    """What is made of contributions with these weights, of so many inner steps each."""
    total = sum(weights)
    norms = [float(np.linalg.norm(v)) for v in vectors]
    counted = _counted(norms, weights, steps)
    found = zip(weights, vectors, norms, counted, strict=True)
    if how != "rda":
        return np.asarray(sum(w / total * v * (count / n) for w, v, n, count in found if n))
    mean = sum(w / total * v / n for w, v, n, _ in found if n)
    length = float(np.linalg.norm(mean))
    radius = sum(w / total * n for w, n in zip(weights, counted, strict=True))
    return np.asarray(mean * (radius / length if length else 0.0))


def _counted(norms: Sequence[float], weights: Sequence[float], steps: Sequence[int]) -> list[float]:
    """As how long each contribution counts: at most twice the median, by length or by length of a step."""

    def median(values: Sequence[float]) -> float:
        known = sorted((value, w) for value, w in zip(values, weights, strict=True) if value and w)
        sums = np.cumsum([w for _, w in known])
        return known[int(np.searchsorted(sums, sums[-1] / 2 * (1 - 1e-12)))][0] if known else 0.0

    length = median(norms)
    pace = median([n / s for n, s in zip(norms, steps, strict=True)])
    return [min(n, 2 * max(length, pace * s)) for n, s in zip(norms, steps, strict=True)]
