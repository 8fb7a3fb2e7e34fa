"""A running average of the global parameters: what a model whose learning rate is still high would be if it fell.

Rules of this file:
1. Each shard's average looks at every version that this peer takes. Look k counts (POWER + 1) / (k + POWER), so that
   about the last k / (POWER + 1) versions count, whatever the run's length (polynomial decay, arXiv 1212.1824). Until
   there are enough it is the mean of what there is.
2. It is this peer's own affair: it does not travel, no other peer's depends on it, and merges know nothing of it. Who
   comes late begins with what it finds.
3. Looks are made on the shard's worker thread, which alone changes its global parameters.
4. It lies beside the checkpoints as one file, which appears whole or not at all. One that is not of this run, or not as
   it was written, is not used.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from p2pdiloco.codec.digests import as_bytes
from p2pdiloco.peer.checkpoint import AVERAGE
from p2pdiloco.peer.host import PART, Disk
from p2pdiloco.protocol.ids import Digest, RunId, ShardId, digest_of
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.util import logs

if TYPE_CHECKING:
    from p2pdiloco.peer.host import Host
    from p2pdiloco.peer.model_state import ModelState

log = logs.get("node")

POWER: Final = 16
"""docs/results.md, "Running average"."""
WIDTH: Final = 4
"""Bytes of a parameter."""


class Seal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands behind the values in the file, as JSON."""

    run: RunId
    looks: tuple[int, ...]
    """By shard."""
    digests: tuple[Digest, ...]
    """Of the shards' values."""


class RunningAverage:
    """Of one peer. ``theta`` is float32 [all parameters], in the layout's order."""

    def __init__(self, run: RunId, layout: Layout) -> None:
        self._run = run
        self._layout = layout
        self.theta = torch.zeros(layout.elements)
        self.looks = [0] * len(layout.shards)

    def begin(self, folder: Path, disk: Disk, state: ModelState) -> None:
        """As an earlier life has left it in ``folder``, or with the parameters that are here now. Blocks."""
        try:
            self.load(folder, disk)
        except (OSError, ValueError) as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("the running average begins anew", folder=folder, reason=str(error))
            for piece, head in zip(self._layout.shards, state.heads, strict=True):
                if head is not None:
                    self.look(piece.shard, state.theta[piece.start : piece.stop])

    def look(self, shard: ShardId, theta: Tensor) -> None:
        """The shard has a new version: these parameters, float32 [the shard's]."""
        self.looks[shard] += 1
        self._of(shard).lerp_(theta, weight(self.looks[shard]))

    def _of(self, shard: ShardId) -> Tensor:
        piece = self._layout.shards[shard]
        return self.theta[piece.start : piece.stop]

    async def save(self, folder: Path, host: Host) -> None:
        """Into ``folder``, shard by shard, each as it is when its turn comes; not before all have been looked at.

        Raises:
            OSError: the disk is full or not writable; what is there stays.
        """
        if not all(self.looks):
            return
        disk, path = host.disk, folder / AVERAGE
        half = path.with_name(f".{AVERAGE}{PART}")
        looks, digests = [], []
        try:
            await host.work("disk", lambda: disk.write(half, []))
            for piece in self._layout.shards:
                count, data = await host.work("tensors", partial(self._copied, piece.shard), piece.shard)
                looks.append(count)
                digests.append(digest_of(data))
                await host.work("disk", partial(disk.append, half, data))
            seal = Seal(run=self._run, looks=tuple(looks), digests=tuple(digests))
            await host.work("disk", lambda: _finish(disk, half, path, seal))
        except OSError:
            with contextlib.suppress(OSError):
                await host.work("disk", lambda: disk.remove(half))
            raise

    def _copied(self, shard: ShardId) -> tuple[int, bytes]:
        return self.looks[shard], as_bytes(self._of(shard)).tobytes()

    def load(self, folder: Path, disk: Disk) -> None:
        """What an earlier life has saved in ``folder``. Blocks.

        Raises:
            OSError: there is nothing, or it cannot be read.
            ValueError: it is of another run, or not as it was written: the next look is the first.
        """
        path, values = folder / AVERAGE, WIDTH * self._layout.elements
        seal = msgspec.json.decode(disk.read(path, values), type=Seal)
        if seal.run != self._run or not len(seal.looks) == len(seal.digests) == len(self.looks) or not all(seal.looks):
            raise ValueError("it is of another run")
        self.looks = [0] * len(self.looks)
        for piece, digest in zip(self._layout.shards, seal.digests, strict=True):
            data = disk.read(path, WIDTH * piece.start, WIDTH * piece.elements)
            if digest_of(data) != digest:
                raise ValueError(f"shard {piece.shard} is not as it was written")
            as_bytes(self._of(piece.shard))[:] = np.frombuffer(data, np.uint8)
        self.looks = list(seal.looks)


def weight(look: int) -> float:
    """Of the ``look``-th, 1 for the first: how far the average moves towards what it sees."""
    return (POWER + 1) / (look + POWER)


def span(looks: int) -> int:
    """About how many of the last versions an average of so many counts."""
    return max(1, looks // (POWER + 1))


def _finish(disk: Disk, half: Path, path: Path, seal: Seal) -> None:
    disk.append(half, msgspec.json.encode(seal))
    disk.sync(half)
    disk.rename(half, path)
    disk.sync_folder(path.parent)
