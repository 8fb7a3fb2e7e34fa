"""Shards that came while a peer was joining, on its disk until its first checkpoint: a join that is cut off goes on.

A file is one shard: its offer's length (4 bytes, big-endian), the offer (proof and digests, MessagePack), and the
chunks as they travelled.

Rules of this file:
1. A file appears whole or not at all, by rename. It is not forced to the disk: after a crash of the machine it may be
   torn, and what is read back is checked against the owner's signature, chunk by chunk.
2. Keeping is a convenience: a full or slow disk costs files, never the join. What waits to be written is bounded.
3. What cannot be used is removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from p2pdiloco.codec.digests import StateForm
from p2pdiloco.peer.disk import Disk, replace, sweep
from p2pdiloco.peer.offers import checked_offer
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.util import logs
from p2pdiloco.util.files import LOCAL
from p2pdiloco.wire.control_messages import StateOffer, StateProof, encode

log = logs.get("node")

INCOMING = "incoming"
"""The folder in a run's folder."""
LENGTH_BYTES = 4
SUFFIX = ".state"


class Kept(NamedTuple):
    """Shards that were read back, and all vectors with them in their place."""

    shards: tuple[StateProof, ...]
    theta: Tensor
    momentum: Tensor


def keep(folder: Path, offer: StateOffer, chunks: Sequence[memoryview], disk: Disk = LOCAL) -> None:
    """Write one shard; chunks as they travel.

    Raises:
        OSError: the disk is full; nothing is left behind.
    """
    path, head = folder / f"shard-{offer.proof.state.head.shard:08d}{SUFFIX}", encode(offer)
    parts = (len(head).to_bytes(LENGTH_BYTES, "big"), head)
    replace(disk, path, chain(parts, chunks), is_durable=False)


def clear(folder: Path, disk: Disk = LOCAL) -> None:
    """A checkpoint has it all."""
    disk.remove_folder(folder)


def load(folder: Path, manifest: Manifest, disk: Disk = LOCAL) -> Kept | None:
    """What can be used of the files in ``folder``; None if nothing can."""
    layout, proofs = Layout.of(manifest), []
    sweep(disk, folder)
    names = [name for name in disk.names(folder) if name.startswith("shard-") and name.endswith(SUFFIX)]
    if not names:
        return None
    theta = torch.zeros(layout.elements)
    momentum = StateForm.of(manifest.config.outer).still(layout.elements)
    for name in names:
        try:
            proofs.append(_read(name, disk.read(folder / name), manifest, layout, theta, momentum))
        except (OSError, ValueError) as error:
            log.warning("downloaded shard cannot be used", path=folder / name, reason=str(error))
            with contextlib.suppress(OSError):
                disk.remove(folder / name)
    return Kept(tuple(proofs), theta, momentum) if proofs else None


def _read(name: str, data: bytes, manifest: Manifest, layout: Layout, theta: Tensor, momentum: Tensor) -> StateProof:
    """One file's proof, its state put into ``theta`` and ``momentum``.

    Raises:
        ValueError: it is torn or altered, or not of this run.
    """
    shard = ShardId(int(name.removeprefix("shard-").removesuffix(SUFFIX)))
    if not 0 <= shard < len(layout.shards):
        raise ValueError(f"there is no shard {shard}")
    piece, view = layout.shards[shard], memoryview(data)
    at = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "big")
    offer = checked_offer(manifest, layout, shard, bytes(view[LENGTH_BYTES:at]))
    span = slice(piece.start, piece.stop)
    form = StateForm.of(manifest.config.outer)
    if form.unpacked(view[at:], theta[span], momentum[span]) != offer.digests:
        raise ValueError("it is not what its owner signed")
    return offer.proof
