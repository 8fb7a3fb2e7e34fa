"""A peer's state on its disk: the manifest, every shard's head with its proof, global parameters and momentum.

Rules of this file:
1. A checkpoint appears whole or not at all: tensors first, then the small JSON that names them, each by rename. The
   newest few stay, so that one that the disk has spoilt is not the last.
2. What is read back is checked: the manifest against the run's id, every shard against the digest that its owner
   signed. Of several checkpoints the newest that passes is used.
3. Checkpoints of several peers of a run can be put together: of each shard the heaviest head, by the protocol's own
   rule. Where they come from, and in which order, does not matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from p2pdiloco.peer.disk import Disk, replace
from p2pdiloco.peer.proofs import proven_digest
from p2pdiloco.protocol.chain import is_heavier
from p2pdiloco.protocol.identifiers import RunId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.soundness import decode_manifest
from p2pdiloco.runtime import logs
from p2pdiloco.runtime.files import LOCAL
from p2pdiloco.tensors.digests import state_digest
from p2pdiloco.wire.bodies import StateProof

log = logs.get("node")

MANIFEST = "manifest.msgpack"
FORMAT = 2
PLACES = ("checkpoint", "*/checkpoint")
"""Where checkpoints lie in the folder that a user names (a run's folder, a peer's state), if it is not one itself."""


class CheckpointError(Exception):
    """No checkpoint can be used; the message says why."""


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON beside the tensors, which have its name but for the suffix."""

    format: int = FORMAT
    run: RunId
    shards: tuple[StateProof, ...]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What was read back."""

    manifest: Manifest
    shards: tuple[StateProof, ...]
    """By shard."""
    theta: Tensor
    momentum: Tensor


def save(
    folder: Path,
    manifest: Manifest,
    shards: tuple[StateProof, ...],
    theta: Tensor,
    momentum: Tensor,
    *,
    keep: int,
    disk: Disk = LOCAL,
) -> None:
    """Write a checkpoint; of all in ``folder`` the newest ``keep`` stay. Blocks; call it on a thread.

    Raises:
        OSError: the disk is full or not writable; what is there stays.
    """
    earlier = _numbers(disk, folder)
    number = earlier[0] + 1 if earlier else 1
    replace(disk, folder / MANIFEST, [manifest.encode()])
    index = Index(run=manifest.run, shards=shards)
    try:
        replace(disk, _tensors(folder, number), [safetensors.torch.save({"theta": theta, "momentum": momentum})])
        replace(disk, _index(folder, number), [msgspec.json.format(msgspec.json.encode(index))])
    except OSError:
        with contextlib.suppress(OSError):
            disk.remove(_tensors(folder, number))
        raise
    for old in _numbers(disk, folder)[keep:]:
        disk.remove(_index(folder, old))
        disk.remove(_tensors(folder, old))


def load(folder: Path, disk: Disk = LOCAL) -> Checkpoint | None:
    """The newest checkpoint in ``folder`` that is whole, or None if there is none at all.

    Raises:
        CheckpointError: there are some, but each is torn, altered, or of another format.
    """
    reasons = []
    for number in _numbers(disk, folder):
        try:
            return _read(disk, folder, number)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            reasons.append(f"{_index(folder, number).name}: {error}")
            log.warning("checkpoint cannot be used", folder=folder, number=number, reason=str(error))
    if reasons:
        raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(reasons)}")
    return None


def load_all(folders: Iterable[Path]) -> list[Checkpoint]:
    """Whatever can be used of the checkpoints in ``folders`` and in the run folders below them; what cannot be is told
    in the log.

    Raises:
        CheckpointError: nothing can.
    """
    found, reasons, searched = [], [], list(folders)
    below = (place for folder in searched for pattern in PLACES for place in folder.glob(pattern))
    for place in sorted({*searched, *below}):
        try:
            checkpoint = load(place)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            found += [] if checkpoint is None else [checkpoint]
    if not found:
        where = ", ".join(map(str, searched))
        raise CheckpointError("; ".join(reasons) or f"there is no checkpoint in {where}: give peers' state folders")
    return found


def best_of(checkpoints: Iterable[Checkpoint]) -> Checkpoint:
    """Of each shard the heaviest head in any of ``checkpoints``, at least one.

    Raises:
        CheckpointError: they are of several runs.
    """
    first, *others = checkpoints
    if any(other.manifest.run != first.manifest.run for other in others):
        runs = sorted({c.manifest.run[:12] for c in (first, *others)})
        raise CheckpointError(f"the checkpoints are of several runs ({', '.join(runs)}): give those of one")
    shards, theta, momentum = list(first.shards), first.theta.clone(), first.momentum.clone()
    for other in others:
        for piece, proof in zip(Layout.of(first.manifest).shards, other.shards, strict=True):
            if is_heavier(proof.state.head, shards[piece.shard].state.head):
                span = slice(piece.start, piece.stop)
                shards[piece.shard] = proof
                theta[span], momentum[span] = other.theta[span], other.momentum[span]
    return Checkpoint(manifest=first.manifest, shards=tuple(shards), theta=theta, momentum=momentum)


def _index(folder: Path, number: int) -> Path:
    return folder / f"state-{number:08d}.json"


def _tensors(folder: Path, number: int) -> Path:
    return folder / f"state-{number:08d}.safetensors"


def _numbers(disk: Disk, folder: Path) -> list[int]:
    """Of the checkpoints in ``folder``, newest first."""
    names = (name for name in disk.names(folder) if name.startswith("state-") and name.endswith(".json"))
    stems = (name.removeprefix("state-").removesuffix(".json") for name in names)
    return sorted((int(stem) for stem in stems if stem.isdecimal()), reverse=True)


def _read(disk: Disk, folder: Path, number: int) -> Checkpoint:
    index = msgspec.json.decode(disk.read(_index(folder, number)), type=Index)
    if index.format != FORMAT:
        raise ValueError(f"it has format {index.format}, this version reads {FORMAT}")
    manifest = decode_manifest(disk.read(folder / MANIFEST), index.run)
    tensors = safetensors.torch.load(disk.read(_tensors(folder, number)))
    theta, momentum = tensors["theta"], tensors["momentum"]
    layout = Layout.of(manifest)
    for vector in (theta, momentum):
        if vector.shape != torch.Size([layout.elements]) or vector.dtype != torch.float32:
            raise ValueError("its tensors do not fit its manifest")
    if [proof.state.head.shard for proof in index.shards] != [s.shard for s in layout.shards]:
        raise ValueError("it does not have every shard once")
    for piece, proof in zip(layout.shards, index.shards, strict=True):
        span = slice(piece.start, piece.stop)
        if state_digest(theta[span], momentum[span]) != proven_digest(manifest, proof):
            raise ValueError(f"shard {piece.shard} does not have the digest that its owner signed")
    return Checkpoint(manifest=manifest, shards=index.shards, theta=theta, momentum=momentum)
