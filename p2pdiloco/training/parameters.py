"""A model's parameters as the run's flat vector, without moving them.

Rules of this file:
1. The parameters stay where the model has them. For every shard the list of pieces (a view into one parameter, and its
   place in the flat vector) is made once; a shard is then shifted or copied with a few calls.
2. The views hold while the parameters' storage does: optimizers must update in place, and the model must not move to
   another device afterwards.
3. On CUDA a copy may still be under way when a call returns; what it returns then says when it has ended.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from p2pdiloco.protocol.ids import FragmentId, ShardId
from p2pdiloco.protocol.manifest import Layout, TensorSpec
from p2pdiloco.training.cuda_copies import CudaCopies, Finished

MOST_TOLD = 3
"""Tensors that differ."""


class Piece(msgspec.Struct, frozen=True):
    """Elements ``start`` to ``stop`` of the flat vector are ``view``, 1-D, a part of one parameter."""

    view: Tensor
    start: int
    stop: int


class FlatParameters:
    """A model's parameters, addressed by shard and fragment."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], tensors: Sequence[TensorSpec], layout: Layout) -> None:
        """``named``: the model's trainable parameters, contiguous.

        Raises:
            ValueError: they are not the tensors of the manifest, or not contiguous.
        """
        given = list(named)
        check_tensors(given, tensors)
        for name, parameter in given:
            if not parameter.is_contiguous():
                raise ValueError(f"{name} is not contiguous in memory: set p.data = p.data.contiguous() before")
        parameters = [parameter for _, parameter in given]
        placed = [
            (start, parameters[index].detach().view(-1))
            for index, start in zip(layout.order, layout.starts, strict=True)
        ]
        self._placed = [(parameters[index], start) for index, start in zip(layout.order, layout.starts, strict=True)]
        self._shards = tuple(_pieces(placed, shard.start, shard.stop) for shard in layout.shards)
        self.layout = layout
        self._side: CudaCopies | None = None
        devices = {parameter.device for parameter in parameters}
        if len(devices) == 1 and (device := devices.pop()).type == "cuda":
            self._side = CudaCopies(device)
        self.everything: tuple[ShardId, ...] = tuple(shard.shard for shard in layout.shards)
        """All shards, for ``copy_from`` and ``copy_to``."""

    @torch.no_grad()
    def copy_from(self, vector: Tensor, shards: Iterable[ShardId]) -> Finished | None:
        """Parameters = ``vector`` for these shards. ``vector`` is free again when what is returned says so."""
        pieces = self._of(shards)
        if self._side is None:
            for piece in pieces:
                piece.view.copy_(vector[piece.start : piece.stop])
            return None
        return self._side.to_device(_pairs(pieces, vector), Tensor.copy_)

    @torch.no_grad()
    def add_from(self, vector: Tensor, shards: Iterable[ShardId]) -> Finished | None:
        """Parameters += ``vector`` for these shards. ``vector`` is free again when what is returned says so."""
        pieces = self._of(shards)
        if self._side is None:
            for piece in pieces:
                piece.view.add_(vector[piece.start : piece.stop].to(piece.view.device))
            return None
        return self._side.to_device(_pairs(pieces, vector), Tensor.add_)

    @torch.no_grad()
    def copy_to(self, vector: Tensor, shards: Iterable[ShardId]) -> Finished | None:
        """``vector`` = parameters for these shards, as they are now, when what is returned says so."""
        pieces = self._of(shards)
        if self._side is None:
            for piece in pieces:
                vector[piece.start : piece.stop].copy_(piece.view)
            return None
        return self._side.to_host(_pairs(pieces, vector))

    @contextlib.contextmanager
    def showing(self, vector: Tensor) -> Iterator[None]:
        """Inside the block the model's parameters are those of ``vector``, which is looked at and not copied where
        device and type allow it; afterwards they are their own again. Nothing may be trained in it."""
        own = [parameter.data for parameter, _ in self._placed]
        try:
            for parameter, start in self._placed:
                shown = vector[start : start + parameter.numel()].view(parameter.shape)
                parameter.data = shown.to(parameter.device, parameter.dtype)
            yield
        finally:
            for (parameter, _), data in zip(self._placed, own, strict=True):
                parameter.data = data

    def pin(self, vectors: Sequence[Tensor]) -> None:
        """These are what is copied from and to: they are page-locked if that makes sense. Undone by ``unpin``."""
        if self._side is not None:
            for vector in vectors:
                self._side.pin(vector)

    def unpin(self, vectors: Sequence[Tensor]) -> None:
        """To be called before their memory goes."""
        if self._side is not None:
            for vector in vectors:
                self._side.unpin(vector)

    def of_fragment(self, fragment: FragmentId) -> tuple[ShardId, ...]:
        """The shards of ``fragment``."""
        return self.layout.fragments[fragment]

    def _of(self, shards: Iterable[ShardId]) -> list[Piece]:
        return [piece for shard in shards for piece in self._shards[shard]]


def _pairs(pieces: Iterable[Piece], vector: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return ((piece.view, vector[piece.start : piece.stop]) for piece in pieces)


def check_tensors(given: Sequence[tuple[str, Tensor]], tensors: Sequence[TensorSpec]) -> None:
    """Raises:
    ValueError: names, shapes or their order are not the manifest's; the message says which.
    """
    found, wanted = {name: tuple(p.shape) for name, p in given}, {t.name: tuple(t.shape) for t in tensors}
    odd = compared(found, wanted)
    if not odd and list(found) != list(wanted):
        odd = f"{next(a for a, b in zip(found, wanted, strict=True) if a != b)} comes at another place"
    if odd:
        raise ValueError(
            f"its tensors are others: {odd}. Build the model as the run's founder does: the same configuration and "
            "vocabulary, the same parameters frozen (requires_grad)"
        )


def compared(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: str = "trained here"
) -> str:
    """How the tensors that were ``found``, by their shapes, differ from those ``wanted``; empty if they do not.
    ``where``: what they are there."""
    odd = [
        f"{name} is {shape} here and {wanted[name]} there"
        for name, shape in found.items()
        if wanted.get(name, shape) != shape
    ]
    odd += [f"{name} is not {where}" for name in wanted if name not in found]
    odd += [f"{name} is trained here alone" for name in found if name not in wanted]
    return "; ".join(odd[:MOST_TOLD]) + (f"; and {len(odd) - MOST_TOLD} more" if len(odd) > MOST_TOLD else "")


def _pieces(placed: Sequence[tuple[int, Tensor]], start: int, stop: int) -> tuple[Piece, ...]:
    """What of each placed tensor lies in [start, stop)."""
    pieces = []
    for at, flat in placed:
        first, last = max(start, at), min(stop, at + flat.numel())
        if first < last:
            pieces.append(Piece(flat[first - at : last - at], first, last))
    return tuple(pieces)


# -- Trainable parameters of a script ----------------------------------------------------------------------------------
# Which of a script's parameters travel, and under which names.
# Rules of this file:
# 1. Those that require a gradient, in the model's own order; tied ones once.
# 2. Names are the bare model's. DDP, ``torch.compile`` and activation checkpointing put words into them, which would
#    tell peers apart that train the same model, one on a laptop and one on eight GPUs.


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters.

    Raises:
        ValueError: the model is wrapped in FSDP's first version, whose parameters are not its own.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "FullyShardedDataParallel hides the model's parameters: use torch.distributed.fsdp.fully_shard"
        )
    return [(_bare(name), p) for name, p in _unwrapped(model).named_parameters() if p.requires_grad]


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All of them, by the bare model's names; tied ones once."""
    return {_bare(name): p for name, p in _unwrapped(model).named_parameters()}


def embedding_names(model: nn.Module) -> set[str]:
    """Names of the weights of all ``nn.Embedding``: they are merged by the direct mean (arXiv 2604.21428)."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return {name for name, p in trainable(model) if any(p is e for e in embeddings)}


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers that are modules of their own."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel | DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _bare(name: str) -> str:
    for word in _WRAPPERS:
        name = name.replace(word, "")
    return name
