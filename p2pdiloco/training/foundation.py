"""What a training script founds its run with: the settings and the first parameters of its model, in one file.

The script writes it, its node reads it and makes of it the manifest and version 0. So a script needs nothing of a node.

Rules of this file:
1. It is a safetensors file with the parameters in float32; the settings lie in its header.
2. It is written once a state folder. A script that is started again founds the run that it founded first, whatever its
   model's parameters are by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.runtime.files import write_atomically

NAME = "foundation.safetensors"
_HEADER = "p2pdiloco"


class FoundationError(Exception):
    """The file cannot be used; the message says why."""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    config: RunConfig
    names: tuple[str, ...]
    """Of the tensors, in the model's own order, which safetensors does not keep."""
    embeddings: frozenset[str]


class Foundation(msgspec.Struct, frozen=True):
    """What was read."""

    config: RunConfig
    named: list[tuple[str, Tensor]]
    """The model's trainable parameters, float32, in its own order."""
    embeddings: frozenset[str]
    """Which of them are embeddings: those are merged by the direct mean."""


def write(path: Path, config: RunConfig, named: Sequence[tuple[str, Tensor]], embeddings: frozenset[str]) -> None:
    """Write ``path``, whole or not at all. ``named``: the trainable parameters, on any device, of any float type.

    Raises:
        OSError: the disk is full, the folder is not writable.
    """
    tensors = {name: p.detach().to("cpu", torch.float32, copy=True).contiguous() for name, p in named}
    header = _Header(config, tuple(name for name, _ in named), embeddings)
    text = msgspec.json.encode(header).decode()
    write_atomically(path, safetensors.torch.save(tensors, {_HEADER: text}))


def read(path: Path) -> Foundation:
    """What ``write`` wrote.

    Raises:
        FoundationError: it is not there, torn, or of another version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = msgspec.json.decode((file.metadata() or {})[_HEADER], type=_Header)
            named = [(name, file.get_tensor(name)) for name in header.names]
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise FoundationError(
            f"{path} cannot be used ({error}): remove it, and the script founds its run anew"
        ) from error
    return Foundation(header.config, named, header.embeddings)
