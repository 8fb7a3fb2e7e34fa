"""Sparse codec for trials: the largest values of each chunk in 2 bits, and their places (SparseLoCo, arXiv 2508.15706).

A chunk of 4,096 values becomes (bits in numpy's order)::

    levels   bfloat16[2]  the two magnitudes
    rice     uint8        parameter r of the Rice code
    bits     for each kept value how many are left out before it, in Rice's code: number >> r ones, a zero, r low bits;
             then a sign bit for each, then for each whether it has the larger magnitude

The magnitudes are split at their mean; a level is the mean of its part. A peer that knows the share knows how many
values are kept. The product has no such codec.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK = 4096
MOST_RICE = 11


def kept_of(share: float, elements: int) -> int:
    """How many values of a chunk are kept."""
    return math.ceil(share * elements)


def encode(share: float, x: Tensor) -> tuple[list[bytes], Tensor]:
    """Chunks as bytes, and what they decode to, float32 [elements].

    Raises:
        ValueError: ``share`` is not in (0, 1].
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share = {share} must be above 0 and at most 1")
    values = torch.zeros_like(x)
    spans = [slice(start, start + CHUNK) for start in range(0, x.numel(), CHUNK)]
    return [_encode_chunk(kept_of(share, x[span].numel()), x[span], values[span]) for span in spans], values


def _encode_chunk(count: int, x: Tensor, out: Tensor) -> bytes:
    places = x.abs().topk(count).indices.sort().values
    found = x[places]
    magnitudes = found.abs()
    is_large = magnitudes > magnitudes.mean()
    parts = [magnitudes[~is_large], magnitudes[is_large]]
    levels = torch.stack([part.mean() if part.numel() else part.new_zeros(()) for part in parts]).bfloat16()
    out[places] = torch.where(is_large, levels[1], levels[0]).float() * found.sign()
    r, bits = _rice(np.diff(places.numpy(), prepend=-1) - 1)
    packed = np.packbits(np.concatenate([bits, (found < 0).numpy(), is_large.numpy()]))
    return levels.view(torch.uint8).numpy().tobytes() + bytes([r]) + packed.tobytes()


def _rice(left_out: NDArray[np.int64]) -> tuple[int, NDArray[np.bool_]]:
    """The parameter that gives the fewest bits, and the bits."""
    r = min(range(MOST_RICE + 1), key=lambda r: int((left_out >> r).sum()) + len(left_out) * r)
    ends = np.cumsum((left_out >> r) + 1 + r)
    bits = np.ones(int(ends[-1]), dtype=np.bool_)
    bits[ends - r - 1] = False
    for place in range(r):
        bits[ends - r + place] = left_out >> (r - 1 - place) & 1
    return r, bits
