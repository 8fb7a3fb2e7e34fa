"""Which tensor belongs to which fragment.

Rules of this file:
1. Greedy bin-packing, largest tensor first: each tensor goes to the bin that is least full. No bin is more than 4/3 of
   the best possible (Graham 1969); that is how Decoupled DiLoCo (arXiv 2604.21428) balances its fragments.
2. Nothing here depends on a set's or a dictionary's order: the same sizes give the same fragments on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import torch

from p2pdiloco.protocol.identifiers import FragmentId
from p2pdiloco.protocol.manifest import TensorSpec


def assign_fragments(sizes: Sequence[int], fragments: int) -> list[int]:
    """The fragment of each tensor, for tensors of ``sizes`` parameters each.

    The largest tensor comes first (ties: the lower index); among equally full bins, first the one with fewer tensors,
    then the one with the lower number. Every fragment has a tensor when there are at least as many tensors as
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


def tensor_specs(named: Iterable[tuple[str, torch.Size, bool]], fragments: int) -> tuple[TensorSpec, ...]:
    """The manifest's list of tensors, in the model's own order.

    ``named`` gives each tensor's name, its shape and whether it is an embedding. Embeddings are merged by the direct
    mean, everything else by radial-directional averaging, as in arXiv 2604.21428.
    """
    tensors = list(named)
    assigned = assign_fragments([shape.numel() for _, shape, _ in tensors], fragments)
    return tuple(
        TensorSpec(
            name=name,
            shape=tuple(shape),
            merge="direct" if is_embedding else "rda",
            fragment=FragmentId(fragment),
        )
        for (name, shape, is_embedding), fragment in zip(tensors, assigned, strict=True)
    )
