"""What ``p2pdiloco export --format safetensors`` has written, as a model again."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from p2pdiloco.training.export import WEIGHTS, About, ExportError
from p2pdiloco.training.parameters import compared
from p2pdiloco.training.trainable import trainable
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
    ``torch.compile`` and DDP have made of their names. Others, and buffers, stay.

    Raises:
        ExportError: it has others, or of other shapes.
        OSError: it cannot be read.
    """
    path = Path(folder)
    path = path / WEIGHTS if path.is_dir() else path
    try:
        written = safetensors.torch.load_file(path)
    except SafetensorError as error:
        raise ExportError(f"{path} is not what `p2pdiloco export --format safetensors` writes: {error}") from error
    here = dict(trainable(model))
    odd = compared({n: tuple(p.shape) for n, p in here.items()}, {n: tuple(t.shape) for n, t in written.items()})
    if odd:
        raise ExportError(f"{path} is not of this model: {odd}")
    with torch.no_grad():
        for name, values in written.items():
            here[name].copy_(values)
