"""Sampler that gives each peer its own samples of a dataset, so that scripts with the same data train different ones.

Rules of this file:
1. An epoch of the swarm is a random order of all samples, the same at every peer, cut into pieces; a piece belongs to
   the peer that hashing draws for it among those that train (rendezvous: who comes or goes moves no others' pieces).
2. Who trains is looked at anew for each piece, so a newcomer gets its part of the epoch that is under way. What a peer
   had trained before somebody came may be trained again by that one; ``wait_for_peers`` avoids that.
3. A peer goes through its pieces, and through each of them, in an order of its own: even where two have trained the
   same samples, no batch of them is the same.
4. All ranks of an island are one peer, and draw the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from p2pdiloco.protocol.ids import digest_of

PIECE = 64
"""Samples in one, where there are enough of them."""
PIECES = 1024
"""At least in an epoch, where there are enough samples: so many make fair shares."""
EMPTY_EPOCHS = 64
"""Without one sample for this peer, whereupon it takes any: there are more peers than samples."""
DIGESTS = 4
"""Batches whose digests are told."""
_REPLACED = ("RandomSampler", "SequentialSampler", "DistributedSampler", "SeedableRandomSampler")

Known = Callable[[], tuple[str, tuple[str, ...]]]
"""This peer, and all that train."""


def owner(peers: tuple[str, ...], epoch: int, piece: int) -> str:
    """Whose piece it is."""
    return max(peers, key=lambda peer: digest_of(f"{peer}/{epoch}/{piece}".encode()))


class OwnSamples(Sampler[int]):
    """A sampler for ``DataLoader(dataset, sampler=...)``: endless in epochs of the swarm, of which each pass takes as
    many samples as the dataset has (of those, every ``replicas``-th)."""

    def __init__(self, samples: int, known: Known, *, rank: int = 0, replicas: int = 1) -> None:
        if samples < 1:
            raise ValueError("the dataset is empty")
        self._samples = samples
        self._known = known
        self._rank, self._replicas = rank, replicas
        self._stream = self._own()

    def __len__(self) -> int:
        return self._samples // self._replicas

    def __iter__(self) -> Iterator[int]:
        return islice(self._stream, self._rank, len(self) * self._replicas, self._replicas)

    def _own(self) -> Iterator[int]:
        epoch, empty = 0, 0
        while True:
            taken = 0
            for index in self.epoch(epoch):
                taken += 1
                yield index
            empty = 0 if taken else empty + 1
            if empty >= EMPTY_EPOCHS:
                yield from _shuffled(self._samples, f"{self._known()[0]}/{epoch}")
            epoch += 1

    def epoch(self, epoch: int) -> Iterator[int]:
        """This peer's samples of an epoch of the swarm."""
        order = _shuffled(self._samples, f"epoch {epoch}")
        size = max(1, min(PIECE, self._samples // PIECES))
        me, _ = self._known()
        for piece in _shuffled(-(-self._samples // size), f"{me}/pieces {epoch}"):
            me, peers = self._known()
            if owner(tuple({*peers, me}), epoch, piece) == me:
                own = order[piece * size : (piece + 1) * size]
                yield from (own[i] for i in _shuffled(len(own), f"{me}/{epoch}/{piece}"))


def share_loader(loader: Any, known: Known) -> bool:
    """Give ``loader``, which nobody goes through yet, this peer's samples; False if its samples are not ours to choose
    (an iterable dataset, a sampler of its user's own)."""
    batches: Any = getattr(loader, "batch_sampler", None)
    while isinstance(getattr(batches, "batch_sampler", None), Sampler):  # accelerate's, around torch's
        batches = batches.batch_sampler
    if not isinstance(loader, DataLoader) or type(batches) is not BatchSampler:
        return False
    before = batches.sampler
    is_plain = isinstance(before, RandomSampler | SequentialSampler | DistributedSampler)
    if not is_plain or type(before).__name__ not in _REPLACED:
        return False
    rank, replicas = getattr(before, "rank", 0), getattr(before, "num_replicas", 1)
    batches.sampler = OwnSamples(len(loader.dataset), known, rank=rank, replicas=replicas)  # type: ignore[arg-type]
    return True


class FirstBatches:
    """Digests of the first batches that a script trains, by which peers find out that they train the same."""

    def __init__(self) -> None:
        self.digests: tuple[str, ...] = ()
        self._told = 0

    def add(self, *values: Any) -> None:
        """A batch: tensors, and whatever holds them."""
        if not self.is_full:
            tensors = [t for value in values for t in _tensors(value)]
            if tensors:
                self.digests += (digest_of(*map(_bytes, tensors))[:16],)

    @property
    def is_full(self) -> bool:
        """Whether no more of them count."""
        return len(self.digests) >= DIGESTS

    def news(self) -> tuple[str, ...]:
        """All, if there are more than were told before."""
        if self._told == len(self.digests):
            return ()
        self._told = len(self.digests)
        return self.digests


def _shuffled(number: int, seed: str) -> list[int]:
    generator = torch.Generator().manual_seed(int(digest_of(seed.encode())[:15], 16))
    return torch.randperm(number, generator=generator).tolist()


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
