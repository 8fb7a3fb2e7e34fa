"""Contributions that are turned before they are merged, for learners whose data and directions differ.

``heloco`` (after arXiv 2606.00271): a contribution whose cosine with the outer momentum before this exchange, the
direction in which the run was going, is below ``strength`` is turned towards it at the same length; one that points
against it loses that component.
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
    if kind != "heloco":
        raise ValueError(f"there is no heading {kind!r}")
    return [_towards(v, momentum.float(), strength) for v in given]


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
