"""Contributions that are turned before they are merged, for learners whose data and directions differ.

The momentum is the outer optimizer's before this exchange, the direction in which the run was going.

- ``heloco`` (after arXiv 2606.00271): a contribution whose cosine with the momentum is below ``strength`` is turned
  towards it at the same length; one that points against it loses that component.
- ``surgery`` (PCGrad, arXiv 2001.06782): of two contributions that point against each other, each loses the component
  against the other.
- ``agree``: an element of the merged step is shortened by how far signs differ (the size of their mean, to the power of
  ``strength``); the whole step keeps its length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def turned(kind: str, strength: float, given: Sequence[Tensor], momentum: Tensor) -> list[Tensor]:
    """``given``, float32 [n] each, turned.

    Raises:
        ValueError: there is no such kind.
    """
    match kind:
        case "heloco":
            return [_towards(v, momentum.float(), strength) for v in given]
        case "surgery":
            return [_without_conflicts(index, given) for index in range(len(given))]
        case "agree":
            return list(given)
    raise ValueError(f"there is no heading {kind!r}")


def agreed(given: Sequence[Tensor], merged: Tensor, strength: float) -> None:
    """``merged``, in place, where signs agree."""
    length = merged.norm()
    share = torch.stack([v.sign() for v in given]).mean(0).abs().pow(strength)
    merged.mul_(share)
    merged.mul_(length / merged.norm().clamp(min=1e-30))


def _towards(v: Tensor, momentum: Tensor, least: float) -> Tensor:
    size, usual = v.norm(), momentum.norm()
    if not size or not usual:
        return v
    way = momentum / usual
    cosine = float(v @ way / size)
    if cosine >= least:
        return v
    if cosine < 0.0:
        return torch.sub(v, cosine * size * way)
    nearer: Tensor = v / size + (least - cosine) * way
    return nearer.mul_(size / nearer.norm())


def _without_conflicts(index: int, given: Sequence[Tensor]) -> Tensor:
    v = given[index].clone()
    for other, w in enumerate(given):
        dot = float(v @ w)
        if other != index and dot < 0.0:
            v -= dot / float(w @ w) * w
    return v
