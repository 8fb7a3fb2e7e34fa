"""Inner momentum of the learners, shared when a fragment is merged or turned towards the merged step.

- ``share`` is an upper bound: the moments of all learners become their mean, in float32 and at once. Sending them would
  cost as many bytes again as the contributions.
- ``head`` (after FedCM, arXiv 2106.10874) costs nothing. Muon ignores the length of its momentum, so a matrix's buffer
  is blended with the direction of the merged step, scaled to the buffer's length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.quality.learners import Group, ended
from benchmarks.quality.stacked import Stack
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.protocol.manifest import Layout, TensorSpec


class Moments:
    """Of all learners, in the flat layout; they have made a step at least."""

    def __init__(self, groups: Sequence[Group], tensors: Sequence[TensorSpec], layout: Layout) -> None:
        stacks = [(group.stack, range(len(group.members))) for group in groups]
        places = [(stack, place) for stack, all_of_it in stacks if isinstance(stack, Stack) for place in all_of_it]
        self._first = [stack.moments(place, tensors, layout, is_second=False) for stack, place in places]
        self._second = [stack.moments(place, tensors, layout, is_second=True) for stack, place in places]
        self._mean, self._own = torch.zeros(layout.elements), torch.zeros(layout.elements)
        self._layout = layout

    def share(self, shards: Sequence[ShardId]) -> None:
        """See the module."""
        for flats in (self._first, self._second):
            spans = [slice(self._layout.shards[s].start, self._layout.shards[s].stop) for s in shards]
            for span in spans:
                self._mean[span] = 0.0
            for flat in flats:
                ended(flat.copy_to(self._own, shards))
                for span in spans:
                    self._mean[span] += self._own[span] / len(flats)
            for flat in flats:
                ended(flat.copy_from(self._mean, shards))

    def head(self, index: int, shard: ShardId, change: Tensor, matrices: Sequence[slice], strength: float) -> None:
        """Learner ``index``'s, ``change`` float32 [elements] being new - old global parameters."""
        start = self._layout.shards[shard].start
        ended(self._first[index].copy_to(self._own, (shard,)))
        for piece in matrices:
            buffer, way = self._own[piece], change[piece.start - start : piece.stop - start]
            buffer.lerp_(way * (-buffer.norm() / way.norm().clamp(min=1e-30)), strength)
        ended(self._first[index].copy_from(self._own, (shard,)))
