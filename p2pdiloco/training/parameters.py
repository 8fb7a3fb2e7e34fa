"""Parameters of a model, addressed as the run's flat vector without being moved.

Rules of this file:
1. The parameters stay where the model has them. For each shard, a list of pieces (a part of one parameter, and its
   place in the flat vector) is made once. Shifting or copying a shard then takes a few calls.
2. A parameter's memory is looked up at each use, because some optimizers replace it (``p.data = ...``, as SAM does).
   The new memory must be contiguous and on the same device.
3. On CUDA a copy may still be running when a call returns. The returned function says when it has ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from p2pdiloco.protocol.ids import Digest, RunId, ShardId, digest_of
from p2pdiloco.protocol.manifest import Layout, TensorSpec
from p2pdiloco.training.cuda_copies import CudaCopies, Finished
from p2pdiloco.util.files import open_regular, read_regular, write_atomically

# Maximum number of differing tensors that a message names.
MOST_TOLD = 3
# What a fingerprint covers of each frozen parameter: runs of so many values, evenly spread. A file that is mapped into
# memory is not read as a whole.
FROZEN_RUNS, FROZEN_RUN = 16, 256


# Maximum number of elements of a model's buffers (statistics, position tables and the like).
MAX_BUFFERS = 1 << 28

OnUpdate = Callable[[Tensor, Tensor], None]
"""Called with a parameter and a float32 tensor of its shape that was added to it."""


class Piece(msgspec.Struct, frozen=True):
    """A part of one parameter: elements ``start`` to ``stop`` of the flat vector."""

    start: int
    stop: int
    parameter: Tensor
    first: int
    """Index of the part's first element in the flattened parameter."""

    @property
    def view(self) -> Tensor:
        """The part, 1-D, in the parameter's present memory."""
        return self.parameter.detach().reshape(-1)[self.first : self.first + self.stop - self.start]


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
                raise ValueError(f"{name} is not contiguous in memory: set p.data = p.data.contiguous() first")
        parameters = [parameter for _, parameter in given]
        self._placed = [(parameters[index], start) for index, start in zip(layout.order, layout.starts, strict=True)]
        self._shards = tuple(_pieces(self._placed, shard.start, shard.stop) for shard in layout.shards)
        self.layout = layout
        self._side: CudaCopies | None = None
        devices = {parameter.device for parameter in parameters}
        if len(devices) == 1 and (device := devices.pop()).type == "cuda":
            self._side = CudaCopies(device)
        # All shards, for ``copy_from`` and ``copy_to``.
        self.everything: tuple[ShardId, ...] = tuple(shard.shard for shard in layout.shards)

    def copy_from(self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int] = ()) -> Finished | None:
        """Set the parameters of these shards to ``vector``. ``at``: see ``moves``.

        ``vector`` may be changed again when the returned function says that the copy has ended (None: at once).
        """
        return self._take(vector, shards, at, Tensor.copy_)

    def add_from(self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int] = ()) -> Finished | None:
        """Add ``vector`` to the parameters of these shards. ``at``: see ``moves``.

        ``vector`` may be changed again when the returned function says that the copy has ended (None: at once).
        """
        return self._take(vector, shards, at, Tensor.add_)

    @torch.no_grad()
    def _take(
        self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int], change: Callable[[Tensor, Tensor], object]
    ) -> Finished | None:
        pairs = self._pairs(vector, shards, at)
        if self._side is not None:
            return self._side.to_device(pairs, change)
        for view, part in pairs:
            change(view, part.to(view.device))
        return None

    @torch.no_grad()
    def copy_to(self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int] = ()) -> Finished | None:
        """Copy the present parameters of these shards to ``vector``. ``at``: see ``moves``.

        The copy is complete when the returned function says so (None: at once).
        """
        pairs = self._pairs(vector, shards, at)
        if self._side is None:
            for view, part in pairs:
                part.copy_(view)
            return None
        return self._side.to_host(pairs)

    @torch.no_grad()
    def changes(
        self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int] = (), *, replace: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        """Return what ``add_from`` (or ``copy_from``) would add: each parameter, and a float32 tensor of its shape."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for piece, here in self._of(shards, at):
            p = piece.parameter
            _, change = found.setdefault(id(p), (p, torch.zeros_like(p, dtype=torch.float32)))
            part = change.view(-1)[piece.first : piece.first + piece.stop - piece.start]
            part.copy_(vector[here])
            if replace:
                part.sub_(piece.view)
        return list(found.values())

    @contextlib.contextmanager
    def showing(self, vector: Tensor) -> Iterator[None]:
        """Show ``vector`` as the model's parameters inside the ``with`` block. Do not train in it.

        Nothing is copied if device and type allow it. Afterwards the model has its own parameters again.
        """
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
        """Page-lock these vectors, which copies use, if that helps. Undone by ``unpin``."""
        if self._side is not None:
            for vector in vectors:
                self._side.pin(vector)

    def unpin(self, vectors: Sequence[Tensor]) -> None:
        """Undo ``pin``. Call it before the memory is released."""
        if self._side is not None:
            for vector in vectors:
                self._side.unpin(vector)

    def _of(self, shards: Iterable[ShardId], at: Sequence[int]) -> Iterator[tuple[Piece, slice]]:
        """Yield the shards' pieces, and where each is in a vector."""
        for shard, moved in moves(self.layout, shards, at):
            for piece in self._shards[shard]:
                yield piece, slice(piece.start + moved, piece.stop + moved)

    def _pairs(self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        return ((piece.view, vector[here]) for piece, here in self._of(shards, at))


def moves(layout: Layout, shards: Iterable[ShardId], at: Sequence[int]) -> Iterator[tuple[ShardId, int]]:
    """Yield each shard, and by how many elements it lies further on in a vector than in the flat layout.

    ``at``: the first element of each shard in the vector; empty: as in the flat layout.
    """
    if not at:
        return ((shard, 0) for shard in shards)
    return ((shard, start - layout.shards[shard].start) for shard, start in zip(shards, at, strict=True))


def check_tensors(given: Sequence[tuple[str, Tensor]], tensors: Sequence[TensorSpec]) -> None:
    """Check that the tensors have the names, shapes and order of the manifest.

    Raises:
        ValueError: they do not. The message names the differences.
    """
    found, wanted = {name: tuple(p.shape) for name, p in given}, {t.name: tuple(t.shape) for t in tensors}
    odd = compared(found, wanted)
    if not odd and list(found) != list(wanted):
        odd = f"{next(a for a, b in zip(found, wanted, strict=True) if a != b)} is in another position"
    if odd:
        raise ValueError(
            f"the model's tensors differ from the run's: {odd}. Build the model as the run's founder does, with the "
            "same configuration and vocabulary, and freeze the same parameters (requires_grad)"
        )


def compared(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: str = "trained here"
) -> str:
    """Describe how the tensors ``found`` (name to shape) differ from those ``wanted``; empty if they do not.

    ``where`` completes the sentence "NAME is not ..." for a missing tensor.
    """
    odd = [
        f"{name} is {shape} here and {wanted[name]} there"
        for name, shape in found.items()
        if wanted.get(name, shape) != shape
    ]
    odd += [f"{name} is not {where}" for name in wanted if name not in found]
    odd += [f"{name} is trained only here" for name in found if name not in wanted]
    return "; ".join(odd[:MOST_TOLD]) + (f"; and {len(odd) - MOST_TOLD} more" if len(odd) > MOST_TOLD else "")


def _pieces(placed: Sequence[tuple[Tensor, int]], start: int, stop: int) -> tuple[Piece, ...]:
    """Return the parts of the placed parameters that lie in [start, stop)."""
    pieces = []
    for parameter, at in placed:
        first, last = max(start, at), min(stop, at + parameter.numel())
        if first < last:
            pieces.append(Piece(first, last, parameter, first - at))
    return tuple(pieces)


# -- Trainable parameters of a script ----------------------------------------------------------------------------------
# The parameters of a script's model that are synchronized, and their names.
# Rules of this section:
# 1. All parameters that require a gradient, in the model's own order; tied ones once.
# 2. Names are those of the bare model. DDP, ``torch.compile`` and activation checkpointing add prefixes, which would
#    make the same model look different on a laptop and on eight GPUs.


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return names and trainable parameters of the bare model.

    Raises:
        ValueError: the model is wrapped in FSDP's first version, which hides its parameters.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "FullyShardedDataParallel hides the model's parameters: use torch.distributed.fsdp.fully_shard"
        )
    return [(_bare(name), p) for name, p in unwrapped(model).named_parameters() if p.requires_grad]


def frozen_digest(model: nn.Module, *, norms_only: bool = False) -> Digest | None:
    """Return a fingerprint of the parameters that are not exchanged: names, shapes, and up to 4,096 values of each;
    None if there are none, or if this process does not hold them whole.

    Values count in bfloat16, so that the same weights in float32 and in 16 bits have one fingerprint. Quantized weights
    count as they are packed, with their scales. ``norms_only``: of the weights that no quantization packs.
    """
    parts: list[bytes | memoryview] = []
    for name, p in named_parameters(model).items():
        if p.requires_grad or (norms_only and (p.dim() != 1 or name.endswith("bias"))):
            continue
        if (stored := _stored(p)) is None:
            return None
        parts += [f"{name} {tuple(p.shape)}\n".encode(), *map(_sampled, stored)]
    return digest_of(*parts) if parts else None


def _stored(p: Any) -> list[Tensor] | None:
    """Return the tensors that hold a parameter's values: of a quantized one, the packed values and the scales. None: it
    has no values yet, or is a rank's shard."""
    if p.is_meta or isinstance(p, UninitializedParameter) or hasattr(p, "to_local"):
        return None
    if is_traceable_wrapper_subclass(p):  # torchao
        inner = [_stored(getattr(p, name)) for name in p.__tensor_flatten__()[0]]
        return None if None in inner else [tensor for one in inner for tensor in one or ()]
    scales = getattr(getattr(p, "quant_state", None), "absmax", None)  # bitsandbytes
    return [p.detach()] if scales is None else [p.detach(), scales]


def _sampled(tensor: Tensor) -> bytes:
    flat = tensor.reshape(-1)
    parts = flat[: flat.numel() // FROZEN_RUNS * FROZEN_RUNS].view(FROZEN_RUNS, -1)[:, :FROZEN_RUN]
    sample = (flat if flat.numel() <= FROZEN_RUNS * FROZEN_RUN else parts).reshape(-1)
    sample = sample.to("cpu", torch.bfloat16 if sample.is_floating_point() else None).contiguous()
    return bytes(sample.view(torch.uint8).numpy())


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters by the bare model's names; tied ones once."""
    return {_bare(name): p for name, p in unwrapped(model).named_parameters()}


def trained_share(model: nn.Module) -> float:
    """Return how much of a model is trained, 0 to 1, by its parameters. Frozen ones without values yet do not count."""
    every = [p for p in named_parameters(model).values() if not isinstance(p, UninitializedParameter)]
    return sum(map(_weights, (p for p in every if p.requires_grad))) / max(1, sum(map(_weights, every)))


def _weights(p: Tensor) -> int:
    """Return how many weights a parameter stands for: bitsandbytes packs two in a byte."""
    shape: torch.Size = getattr(getattr(p, "quant_state", None), "shape", p.shape)
    return shape.numel()


def embedding_names(model: nn.Module) -> set[str]:
    """Return the names of the trainable weights of all ``nn.Embedding``. They are merged by the direct mean (arXiv
    2604.21428)."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return {name for name, p in trainable(model) if any(p is e for e in embeddings)}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrapper modules."""
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


# -- Buffers of a script -----------------------------------------------------------------------------------------------
# What a model learns without a gradient, such as BatchNorm's running statistics. Peers do not exchange it: each peer's
# script saves its own beside the run's state, and exports on that machine contain it.


BUFFERS = "buffers.safetensors"


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a ``state_dict`` holds, by the bare model's names."""
    return {
        _bare(f"{prefix}.{name}" if prefix else name): buffer
        for prefix, module in unwrapped(model).named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def describe_lacking_buffers(model: nn.Module, given: Mapping[str, Tensor]) -> str:
    """Return a sentence about the model's buffers that are not among those ``given``; empty if all are."""
    lacking = [name for name, b in named_buffers(model).items() if name not in given or given[name].shape != b.shape]
    names = ", ".join(lacking[:MOST_TOLD]) + (f" and {len(lacking) - MOST_TOLD} more" * (len(lacking) > MOST_TOLD))
    if not lacking:
        return ""
    return (
        f"the model's buffers ({names}) are missing, because peers do not exchange them: export on a machine whose "
        "script has trained in this run"
    )


def write_buffers(folder: Path, run: RunId, model: nn.Module) -> None:
    """Write the model's buffers into a script's state folder, if they are others than those there.

    More than ``MAX_BUFFERS`` elements are not written: such a model is quantized, and its weights are buffers.

    Raises:
        OSError: the file cannot be read or written.
    """
    found = named_buffers(model)
    if not found or sum(buffer.numel() for buffer in found.values()) > MAX_BUFFERS:
        return
    copies = {name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in found.items()}
    if any(bool(copy.isnan().any()) for copy in copies.values()):
        return  # training has failed: the run does not merge such parameters either
    path, data = folder / BUFFERS, safetensors.torch.save(copies, metadata={"run": run})
    if not path.is_file() or read_regular(path) != data:
        write_atomically(path, data)


def read_buffers(folder: Path, run: RunId) -> dict[str, Tensor]:
    """Return the buffers that a script of this run has saved in its state folder; empty if there are none.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged.
    """
    path = folder / BUFFERS
    try:
        os.close(open_regular(path))  # safetensors would wait for the writer of a FIFO
        with safe_open(path, framework="pt") as file:
            is_ours = (file.metadata() or {}).get("run") == run
            return {name: file.get_tensor(name) for name in file.keys()} if is_ours else {}  # noqa: SIM118
    except FileNotFoundError:
        return {}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it") from error
