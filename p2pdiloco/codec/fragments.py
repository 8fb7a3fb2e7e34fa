"""Assignment of tensors to fragments.

Rules of this file:
1. Greedy bin packing, largest tensor first: each tensor goes to the emptiest bin. No bin is larger than 4/3 of the
   optimum (Graham 1969). Decoupled DiLoCo (arXiv 2604.21428) balances its fragments in the same way.
   If a bin is then larger than ``LARGEST`` times the mean (an embedding), large tensors are cut by rows, no finer than
   needed. With parts of half a mean no bin can exceed that size, since each part goes to a bin not above the mean.
2. The result does not depend on the order of a set or dictionary: the same sizes give the same fragments on every
   machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from msgspec import UNSET

from p2pdiloco.protocol.ids import FragmentId
from p2pdiloco.protocol.manifest import TensorSpec

LARGEST: Final = 1.5
"""Maximum size of a fragment, in multiples of the mean."""
FINENESS: Final = (0, 4, 3, 2)
"""Part sizes that are tried one after the other, in quarters of the mean fragment; 0: no tensor is cut."""
MOST_PARTS: Final = 4096
"""Maximum number of parts of one tensor."""


def assign_fragments(sizes: Sequence[int], fragments: int) -> list[int]:
    """Return the fragment of each tensor, for tensors of ``sizes`` parameters each.

    The largest tensor comes first (ties: the lower index). Among equally full bins the one with fewer tensors comes
    first, then the one with the lower number. Every fragment has a tensor if there are at least as many tensors as
    fragments.

    Raises:
        ValueError: ``fragments`` is not positive.
    """
    if fragments < 1:
        raise ValueError(f"fragments = {fragments} must be at least 1")
    bins = [(0, 0, fragment) for fragment in range(fragments)]
    assigned = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        filled, members, fragment = bins[0]
        heapq.heapreplace(bins, (filled + sizes[index], members + 1, fragment))
        assigned[index] = fragment
    return assigned


def tensor_specs(
    named: Iterable[tuple[str, torch.Size, bool]], fragments: int, largest: float = LARGEST
) -> tuple[TensorSpec, ...]:
    """Return the manifest's list of tensors, in the model's own order.

    ``named`` gives each tensor's name, its shape and whether it is an embedding. Embeddings are merged by the direct
    mean, everything else by radial-directional averaging, as in arXiv 2604.21428. No fragment is larger than
    ``largest`` times their mean, as far as cuts between rows allow.
    """
    tensors = list(named)
    total = sum(shape.numel() for _, shape, _ in tensors)
    parts: list[int] = []
    assigned: list[int] = []
    for quarters in FINENESS:
        parts = [_parts(shape, total * quarters, 4 * fragments) for _, shape, _ in tensors]
        sizes = [n for (_, shape, _), k in zip(tensors, parts, strict=True) for n in _sizes(shape, k)]
        assigned = assign_fragments(sizes, fragments)
        loads = [0] * fragments
        for size, fragment in zip(sizes, assigned, strict=True):
            loads[fragment] += size
        if max(loads) * fragments <= largest * total:
            break
    placed = iter(assigned)
    return tuple(
        _spec(name, tuple(shape), is_embedding, tuple(FragmentId(next(placed)) for _ in range(k)))
        for (name, shape, is_embedding), k in zip(tensors, parts, strict=True)
    )


def _parts(shape: torch.Size, limit: int, scale: int) -> int:
    """Return the number of parts of a tensor, so that none has more than ``limit`` / ``scale`` parameters.

    A part has at least one row, so single rows may exceed the limit.
    """
    wanted = -(-shape.numel() * scale // limit) if limit else 1
    return max(1, min(wanted, shape[0] if shape else 1, MOST_PARTS))


def _sizes(shape: torch.Size, parts: int) -> list[int]:
    """Return the sizes of a tensor's parts, cut as ``TensorSpec.parts`` cuts them."""
    if parts == 1:
        return [shape.numel()]
    rows, row = shape[0], shape.numel() // shape[0]
    return [row * (rows * (i + 1) // parts - rows * i // parts) for i in range(parts)]


def _spec(name: str, shape: tuple[int, ...], is_embedding: bool, where: tuple[FragmentId, ...]) -> TensorSpec:
    return TensorSpec(
        name=name,
        shape=shape,
        merge="direct" if is_embedding else "rda",
        fragment=where[0],
        fragments=where if len(where) > 1 else UNSET,
    )
