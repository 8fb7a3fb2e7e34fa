"""What ``p2pdiloco export --format safetensors`` has written, as a model again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from p2pdiloco.training.export import WEIGHTS, About, ExportError
from p2pdiloco.training.parameters import compared
from p2pdiloco.training.trainable import named_parameters
from p2pdiloco.training.transformer import build_model


def load_model(folder: str | os.PathLike[str]) -> nn.Module:
    """The built-in transformer that ``export --format safetensors`` has written: float32 on the CPU, in evaluation
    mode; tokens int64 [batch, time] to logits [batch, time, vocabulary], and bytes are tokens.

    Raises:
        ExportError: there is none, or it is of another kind.
        OSError: it cannot be read.
    """
    path = Path(folder)
    path = path / WEIGHTS if path.is_dir() else path
    try:
        with safe_open(path, framework="pt") as file:
            told = (file.metadata() or {}).get("p2pdiloco", "")
        config = msgspec.json.decode(told, type=About).model
        if config.kind != "transformer":
            raise ExportError(f"{path} is a {config.kind} model: load it with the library that it is of")
        model = build_model(config, 0)
        model.load_state_dict(safetensors.torch.load_file(path))
    except (SafetensorError, msgspec.DecodeError, RuntimeError) as error:
        raise ExportError(f"{path} is not what `p2pdiloco export --format safetensors` writes: {error}") from error
    return model.eval()


def load_into(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Set the parameters of ``model`` that a run trained to those of an export (a folder, or its file), whatever
    ``torch.compile``, DDP and ``fully_shard`` have made of them, frozen or not. Others, and buffers, stay.

    Raises:
        ExportError: it has not all of them, or some of other shapes.
        OSError: it cannot be read.
    """
    path = Path(folder)
    path = path / WEIGHTS if path.is_dir() else path
    try:
        written = safetensors.torch.load_file(path)
    except SafetensorError as error:
        raise ExportError(f"{path} is not what `p2pdiloco export --format safetensors` writes: {error}") from error
    here = named_parameters(model)
    if any(p.is_meta for p in here.values()):
        raise ExportError("the model has parameters without memory (meta): model.to_empty(device=...) before")
    found = {name: tuple(here[name].shape) for name in written if name in here}
    if odd := compared(found, {name: tuple(values.shape) for name, values in written.items()}, "in the model"):
        raise ExportError(f"{path} is not of this model: {odd}")
    with torch.no_grad():
        for name, values in written.items():
            _set(here[name], values)


def _set(p: Any, values: Tensor) -> None:
    if hasattr(p, "device_mesh"):  # fully_shard's; the import is dear
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values.to(p.device, p.dtype), p.device_mesh, p.placements)
    p.copy_(values)
