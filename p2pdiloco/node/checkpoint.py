"""A peer's state on its disk: the manifest, every shard's head with its proof, global parameters and momentum.

Rules of this file:
1. A checkpoint appears whole or not at all: tensors first, then the small JSON that names them, each by rename.
2. What is read back is checked: the manifest against the run's id, every shard against the digest that its owner
   signed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import safetensors.torch
import torch
from msgspec import Meta
from safetensors import SafetensorError
from torch import Tensor

from p2pdiloco.protocol.identifiers import RunId
from p2pdiloco.protocol.manifest import Layout, Manifest, decode_manifest
from p2pdiloco.runtime.files import write_atomically
from p2pdiloco.wire.bodies import StateProof

INDEX = "checkpoint.json"
MANIFEST = "manifest.msgpack"
FORMAT = 1


class CheckpointError(Exception):
    """The checkpoint cannot be used; the message says why."""


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON beside the tensors."""

    format: int = FORMAT
    run: RunId
    tensors: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+\.safetensors$")]
    shards: tuple[StateProof, ...]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What was read back."""

    manifest: Manifest
    shards: tuple[StateProof, ...]
    theta: Tensor
    momentum: Tensor


def save(folder: Path, manifest: Manifest, shards: tuple[StateProof, ...], theta: Tensor, momentum: Tensor) -> None:
    """Write a checkpoint and drop the one before. Blocks; call it on a thread.

    Raises:
        OSError: the disk is full or not writable; the last checkpoint stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    version = sum(proof.state.head.version for proof in shards)
    name = f"state-{version:012d}.safetensors"
    data = safetensors.torch.save({"theta": theta, "momentum": momentum})
    write_atomically(folder / MANIFEST, manifest.encode())
    write_atomically(folder / name, data)
    index = Index(run=manifest.run, tensors=name, shards=shards)
    write_atomically(folder / INDEX, msgspec.json.format(msgspec.json.encode(index)))
    for old in folder.glob("state-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)


def load(folder: Path) -> Checkpoint | None:
    """The checkpoint in ``folder``, or None if there is none.

    Raises:
        CheckpointError: it is torn, altered, or of another format.
    """
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
        manifest = decode_manifest((folder / MANIFEST).read_bytes(), index.run)
        tensors = safetensors.torch.load((folder / index.tensors).read_bytes())
        theta, momentum = tensors["theta"], tensors["momentum"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint in {folder} cannot be read: {error}") from error
    layout = Layout.of(manifest)
    shape = torch.Size([layout.elements])
    if index.format != FORMAT or theta.shape != shape or momentum.shape != shape or theta.dtype != torch.float32:
        raise CheckpointError(f"the checkpoint in {folder} does not fit its manifest")
    if [proof.state.head.shard for proof in index.shards] != [s.shard for s in layout.shards]:
        raise CheckpointError(f"the checkpoint in {folder} does not have every shard once")
    return Checkpoint(manifest=manifest, shards=index.shards, theta=theta, momentum=momentum)
