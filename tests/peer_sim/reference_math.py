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
    vectors: Sequence[NDArray[np.float64]],
    declared: Sequence[float],
    steps: Sequence[int],
    sync_round: int,
    how: str,
    factors: Sequence[int] = (),
    longest: float = 0.0,
    members: Sequence[int] = (),
) -> NDArray[np.float64]:
    """Return the merge of ``vectors`` that declare these weights and inner steps.

    ``sync_round``: inner steps of a round; ``factors``: per cent of each weight that count; ``longest``: the length
    that the merge may have, 0: any; ``members``: how many learners' each is, empty: one's.
    """
    numbers = members or [1] * len(declared)
    means = [w / number for w, number in zip(declared, numbers, strict=True)]
    weights = [numbers[i] * min((w, *_others(means, i))) for i, w in enumerate(means)]
    heaviest = max(weights)
    weights = [w * (per_cent / 100) for w, per_cent in zip(weights, factors or [100] * len(weights), strict=True)]
    total = sum(weights)
    scale = min(1.0, total / heaviest) if heaviest else 1.0
    norms = [float(np.linalg.norm(v)) for v in vectors]
    counted = _counted(norms, steps, sync_round)
    found = zip(weights, vectors, norms, counted, strict=True)
    if how != "rda":
        result = np.asarray(sum(w / total * v * (count / n) for w, v, n, count in found if n))
    else:
        mean = sum(w / total * v / n for w, v, n, _ in found if n)
        length = float(np.linalg.norm(mean))
        radius = sum(w / total * n for w, n in zip(weights, counted, strict=True))
        result = np.asarray(mean * (radius / length if length else 0.0))
    length, most = float(np.linalg.norm(result)), longest or np.inf
    if scale < 1.0:
        scale *= min(1.0, most / max(length, 1e-300))
    if scale * length > most:
        scale = 0.9 * most / length
    return scale * result


def _counted(norms: Sequence[float], steps: Sequence[int], sync_round: int) -> list[float]:
    """As how long each contribution counts: at most 1.5 times the others' median, by length or by length of a step."""
    paces = [n / s for n, s in zip(norms, steps, strict=True)]
    found = []
    for index, (norm, made) in enumerate(zip(norms, steps, strict=True)):
        length, pace = _others(norms, index), _others(paces, index)
        found.append(min((norm, *(1.5 * max(a, b * min(made, sync_round)) for a, b in zip(length, pace, strict=True)))))
    return found


def _others(values: Sequence[float], index: int) -> tuple[float, ...]:
    """The median of the others that are not 0, the larger one of two; nothing if there are none."""
    others = sorted(v for i, v in enumerate(values) if i != index and v)
    return (others[len(others) // 2],) if others else ()
