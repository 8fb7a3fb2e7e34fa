"""A simulated learner's parameters, of which every step leaves a mark.

A learner has a *lane*: one element of each chunk of the model. Each of its inner steps takes 1 off the parameters
there, so its outer gradient holds, in its lane and nowhere else, how many steps it is about. Whoever loses a step, or
counts one twice, changes these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from p2pdiloco.peersim.knobs import CHUNK
from p2pdiloco.protocol.identifiers import ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.training.parameters import FlatParameters


class _Watched(FlatParameters):
    """Tells which shards the learner threw away to take the global parameters."""

    replaced: Callable[[Iterable[ShardId]], None]

    def copy_from(self, vector: Tensor, shards: Iterable[ShardId]) -> None:
        """Parameters = ``vector``."""
        super().copy_from(vector, shards)
        self.replaced(shards)


class MarkedModel:
    """Parameters of which every step leaves a mark in ``lane``."""

    def __init__(self, manifest: Manifest, layout: Layout, lane: int) -> None:
        self.lane = lane
        self.parameters = [torch.zeros(spec.shape) for spec in manifest.tensors]
        named = [(spec.name, tensor) for spec, tensor in zip(manifest.tensors, self.parameters, strict=True)]
        self.flat = _Watched(named, manifest.tensors, layout)
        self._mark = torch.zeros(layout.elements)
        """What one step adds, as the run's flat vector."""
        for shard in layout.shards:
            for start in range(shard.start, shard.stop, CHUNK):
                self._mark[start + lane] = -1.0

    def step(self) -> None:
        """One inner step."""
        self.flat.add_from(self._mark, self.flat.everything)

    def poison(self) -> None:
        """They are not numbers any more."""
        self.parameters[0].view(-1)[self.lane] = float("nan")

    def vector(self) -> Tensor:
        """As the run's flat vector."""
        out = torch.empty(len(self._mark))
        self.flat.copy_to(out, self.flat.everything)
        return out
