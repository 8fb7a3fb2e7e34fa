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
from p2pdiloco.training.side_stream import Finished


class _Watched(FlatParameters):
    """Tells which shards the learner threw away to take the global parameters."""

    replaced: Callable[[Iterable[ShardId]], None]
    looks: Callable[[], int]
    """How often the next copy is asked for before it has ended."""

    def copy_from(self, vector: Tensor, shards: Iterable[ShardId]) -> Finished | None:
        """Parameters = ``vector``."""
        super().copy_from(vector, shards)
        self.replaced(shards)
        return self._under_way(lambda: None)

    def add_from(self, vector: Tensor, shards: Iterable[ShardId]) -> Finished | None:
        """Parameters += ``vector``."""
        super().add_from(vector, shards)
        return self._under_way(lambda: None)

    def copy_to(self, vector: Tensor, shards: Iterable[ShardId]) -> Finished | None:
        """``vector`` = parameters of now, when the copy ends."""
        copy, shards = torch.empty_like(vector), tuple(shards)
        super().copy_to(copy, shards)

        def arrive(of: tuple[ShardId, ...]) -> None:
            for shard in of:
                piece = self.layout.shards[shard]
                vector[piece.start : piece.stop].copy_(copy[piece.start : piece.stop])

        arrive(shards[:1])  # a copy under way is there in part
        return self._under_way(lambda: arrive(shards[1:]))

    def _under_way(self, arrive: Callable[[], None]) -> Finished | None:
        left = self.looks()
        if not left:
            arrive()
            return None

        def is_finished() -> bool:
            nonlocal left
            left -= 1
            if not left:
                arrive()
            return left <= 0

        return is_finished


class MarkedModel:
    """Parameters of which every step leaves a mark in ``lane``."""

    def __init__(self, manifest: Manifest, layout: Layout, lane: int) -> None:
        self.lane = lane
        self.parameters = [torch.zeros(spec.shape) for spec in manifest.tensors]
        named = [(spec.name, tensor) for spec, tensor in zip(manifest.tensors, self.parameters, strict=True)]
        self.flat = _Watched(named, manifest.tensors, layout)
        self.flat.looks = lambda: 0
        self._mark = torch.zeros(layout.elements)
        """What one step adds, as the run's flat vector."""
        for shard in layout.shards:
            for start in range(shard.start, shard.stop, CHUNK):
                self._mark[start + lane] = -1.0

    def step(self) -> None:
        """One inner step."""
        FlatParameters.add_from(self.flat, self._mark, self.flat.everything)

    def poison(self) -> None:
        """They are not numbers any more."""
        self.parameters[0].view(-1)[self.lane] = float("nan")

    def vector(self) -> Tensor:
        """As the run's flat vector."""
        out = torch.empty(len(self._mark))
        FlatParameters.copy_to(self.flat, out, self.flat.everything)
        return out
