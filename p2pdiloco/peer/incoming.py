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
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from p2pdiloco.peer.offers import checked_offer, chunk_sizes, is_listed
from p2pdiloco.protocol.identifiers import ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.runtime import logs
from p2pdiloco.wire.bodies import StateOffer, StateProof, encode

log = logs.get("node")

INCOMING = "incoming"
"""The folder in a run's folder."""
LENGTH_BYTES = 4
OFFER_MOST_BYTES = 1 << 20
PATTERN = "shard-*.state"


class Kept(NamedTuple):
    """Shards that were read back, and all vectors with them in their place."""

    shards: tuple[StateProof, ...]
    theta: Tensor
    momentum: Tensor


def keep(folder: Path, offer: StateOffer, chunks: Sequence[Tensor]) -> None:
    """Write one shard; chunks as they travel.

    Raises:
        OSError: the disk is full; nothing is left behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, head = folder / f"shard-{offer.proof.state.head.shard:08d}.state", encode(offer)
    temporary = path.with_suffix(".part")
    try:
        with temporary.open("wb") as file:
            file.write(len(head).to_bytes(LENGTH_BYTES, "big"))
            file.write(head)
            for chunk in chunks:
                file.write(chunk.numpy().data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def clear(folder: Path) -> None:
    """A checkpoint has it all."""
    shutil.rmtree(folder, ignore_errors=True)


def load(folder: Path, manifest: Manifest) -> Kept | None:
    """What can be used of the files in ``folder``; None if nothing can."""
    layout, proofs = Layout.of(manifest), []
    theta, momentum = torch.zeros(layout.elements), torch.zeros(layout.elements)
    for part in folder.glob("shard-*.part"):
        part.unlink(missing_ok=True)
    for path in sorted(folder.glob(PATTERN)):
        try:
            proofs.append(_read(path, manifest, layout, theta, momentum))
        except (OSError, ValueError) as error:
            log.warning("downloaded shard cannot be used", path=path, reason=str(error))
            with contextlib.suppress(OSError):
                path.unlink()
    return Kept(tuple(proofs), theta, momentum) if proofs else None


def _read(path: Path, manifest: Manifest, layout: Layout, theta: Tensor, momentum: Tensor) -> StateProof:
    """One file's proof, its state put into ``theta`` and ``momentum``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is torn or altered, or not of this run.
    """
    shard = ShardId(int(path.stem.removeprefix("shard-")))
    if not 0 <= shard < len(layout.shards):
        raise ValueError(f"there is no shard {shard}")
    piece = layout.shards[shard]
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "big")
        if length > OFFER_MOST_BYTES:
            raise ValueError("it is no downloaded shard")
        offer = checked_offer(manifest, layout, shard, file.read(length))
        at = piece.start
        for chunk, size in enumerate(chunk_sizes(piece.elements)):
            data = bytearray(size)
            if file.readinto(data) != size or not is_listed(offer, chunk, data):
                raise ValueError(f"chunk {chunk} is not what its owner signed")
            new, moved = torch.frombuffer(data, dtype=torch.float32).chunk(2)
            theta[at : at + new.numel()], momentum[at : at + new.numel()] = new, moved
            at += new.numel()
    return offer.proof
