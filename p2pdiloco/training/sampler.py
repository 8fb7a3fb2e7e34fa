"""Sampler that gives each peer its own samples of a dataset, so that scripts with the same data train different
samples.

Rules of this file:
1. An epoch of the swarm is a random order of all samples, the same at every peer, divided into pieces. Each piece
   belongs to one of the training peers, by rendezvous hashing: a peer that joins or leaves moves no pieces between
   others.
2. The set of training peers is read for each piece, so a newcomer gets its part of the present epoch. It may repeat
   samples that another peer trained before it came; ``wait_for_peers`` avoids that.
3. Each peer goes through its pieces, and through each of them, in an order of its own. Even if two peers train the same
   samples, their batches differ.
4. All ranks of a rank group are one peer, and go through the same samples; each takes every n-th of them.
5. Samples that a trainer repeats, because it compares several answers to one prompt (GRPO), stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from p2pdiloco.protocol.ids import digest_of

# Samples per piece, if there are enough.
PIECE = 64
# Minimum pieces per epoch, if there are enough samples. This many make fair shares.
PIECES = 1024
# After this many epochs without a sample for this peer, it takes any samples: there are more peers than samples.
EMPTY_EPOCHS = 64
# Number of batches whose digests are reported.
DIGESTS = 4
_REPLACED = ("RandomSampler", "SequentialSampler", "DistributedSampler", "SeedableRandomSampler")

# Returns this peer's ID and the IDs of all training peers.
Known = Callable[[], tuple[str, tuple[str, ...]]]


def owner(peers: tuple[str, ...], epoch: int, piece: int) -> str:
    """Return the peer that a piece belongs to."""
    return max(peers, key=lambda peer: digest_of(f"{peer}/{epoch}/{piece}".encode()))


class OwnSamples(Sampler[int]):
    """A sampler for ``DataLoader(dataset, sampler=...)``, endless over the swarm's epochs.

    Each pass takes as many samples as the dataset has, divided by ``replicas``.
    """

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
        """Yield this peer's samples of an epoch of the swarm."""
        order = _shuffled(self._samples, f"epoch {epoch}")
        size = max(1, min(PIECE, self._samples // PIECES))
        me, _ = self._known()
        for piece in _shuffled(-(-self._samples // size), f"{me}/pieces {epoch}"):
            me, peers = self._known()
            if owner(tuple({*peers, me}), epoch, piece) == me:
                own = order[piece * size : (piece + 1) * size]
                yield from (own[i] for i in _shuffled(len(own), f"{me}/{epoch}/{piece}"))


class OwnGroups(Sampler[int]):
    """This peer's samples, repeated as trl's ``RepeatSampler`` does it, which is ``before``."""

    def __init__(self, own: OwnSamples, before: Any) -> None:
        self._own, self._before = own, before

    def __len__(self) -> int:
        return len(self._before)

    def __iter__(self) -> Iterator[int]:
        own, before = iter(self._own), self._before
        while len(chunk := list(islice(own, before.batch_size))) == before.batch_size:
            for index in chunk * before.repeat_count:
                yield from [index] * before.mini_repeat_count


def share_loader(loader: Any, known: Known) -> bool:
    """Make ``loader`` draw this peer's samples. Call it before anything iterates over it.

    Returns False if the loader's samples cannot be changed (a custom sampler).
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    while isinstance(getattr(batches, "batch_sampler", None), Sampler):  # accelerate wraps torch's batch sampler
        batches = batches.batch_sampler
    if not isinstance(loader, DataLoader) or getattr(type(batches), "__iter__", None) is not BatchSampler.__iter__:
        return False
    before = batches.sampler
    if type(before).__name__ == "RepeatSampler" and type(before).__module__.startswith("trl."):
        batches.sampler = OwnGroups(OwnSamples(len(loader.dataset), known), before)  # type: ignore[arg-type]
        return True
    is_plain = isinstance(before, RandomSampler | SequentialSampler | DistributedSampler)
    if not is_plain or type(before).__name__ not in _REPLACED:
        return False
    rank, replicas = getattr(before, "rank", 0), getattr(before, "num_replicas", 1)
    batches.sampler = OwnSamples(len(loader.dataset), known, rank=rank, replicas=replicas)  # type: ignore[arg-type]
    return True


class FirstBatches:
    """Digests of the first batches that a script trains. Peers compare them to detect that they train the same data."""

    def __init__(self) -> None:
        self.digests: tuple[str, ...] = ()
        self._told = 0

    def add(self, *values: Any) -> None:
        """Add a batch: tensors, or containers of tensors."""
        if not self.is_full:
            tensors = [t for value in values for t in _tensors(value)]
            if tensors:
                self.digests += (digest_of(*map(_bytes, tensors))[:16],)

    @property
    def is_full(self) -> bool:
        """True if further batches do not count."""
        return len(self.digests) >= DIGESTS

    def news(self) -> tuple[str, ...]:
        """Return all digests if there are new ones since the last call, else nothing."""
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
