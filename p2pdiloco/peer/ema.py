"""Running average of the global parameters: usable for evaluation while the learning rate is still high.

Rules of this file:
1. Each shard's average is updated with every version that this peer takes. Update k has weight (POWER + 1) / (k +
   POWER), so about the last k / (POWER + 1) versions count, whatever the run's length (polynomial decay averaging,
   arXiv 1212.1824).
2. The average is local to this peer. It is not sent, and merges do not use it. A peer that joins late begins with the
   parameters that it finds.
3. Updates run on the shard's worker thread, which alone changes the shard's global parameters.
4. The average is saved as one file beside the checkpoints, which appears whole or not at all. A file of another run, or
   an altered one, is not used.
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

# Weight exponent; measurement in docs/results.md, "Running average".
POWER: Final = 16
# Bytes per parameter.
WIDTH: Final = 4


class Seal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON at the end of the file that identifies and verifies the values before it."""

    run: RunId
    looks: tuple[int, ...]
    """Number of updates, by shard."""
    digests: tuple[Digest, ...]
    """Digest of each shard's values."""


class RunningAverage:
    """The running average that one peer keeps. ``theta`` is float32 [all parameters], in the layout's order."""

    def __init__(self, run: RunId, layout: Layout) -> None:
        self._run = run
        self._layout = layout
        self.theta = torch.zeros(layout.elements)
        self.looks = [0] * len(layout.shards)

    def begin(self, folder: Path, disk: Disk, state: ModelState) -> None:
        """Load the average of an earlier life from ``folder``, or begin with the present parameters. Blocks."""
        try:
            self.load(folder, disk)
        except (OSError, ValueError) as error:
            if not isinstance(error, FileNotFoundError):
                log.warning(
                    "cannot use the saved running average; starting a new one", folder=folder, reason=str(error)
                )
            for piece, head in zip(self._layout.shards, state.heads, strict=True):
                if head is not None:
                    self.look(piece.shard, state.theta[piece.start : piece.stop])

    def look(self, shard: ShardId, theta: Tensor) -> None:
        """Update a shard's average with a new version's parameters, float32 [the shard's]."""
        self.looks[shard] += 1
        self._of(shard).lerp_(theta, weight(self.looks[shard]))

    def _of(self, shard: ShardId) -> Tensor:
        piece = self._layout.shards[shard]
        return self.theta[piece.start : piece.stop]

    async def save(self, folder: Path, host: Host) -> None:
        """Save into ``folder``, shard by shard. Does nothing until every shard has had an update.

        Raises:
            OSError: the disk is full or not writable. The existing file is untouched.
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
        """Load the average that an earlier life saved in ``folder``. Blocks.

        Raises:
            OSError: there is no file, or it cannot be read.
            ValueError: the file is of another run, or altered. The next update is then the first.
        """
        path, values = folder / AVERAGE, WIDTH * self._layout.elements
        seal = msgspec.json.decode(disk.read(path, values), type=Seal)
        if seal.run != self._run or not len(seal.looks) == len(seal.digests) == len(self.looks) or not all(seal.looks):
            raise ValueError("it belongs to another run")
        self.looks = [0] * len(self.looks)
        for piece, digest in zip(self._layout.shards, seal.digests, strict=True):
            data = disk.read(path, WIDTH * piece.start, WIDTH * piece.elements)
            if digest_of(data) != digest:
                raise ValueError(f"shard {piece.shard} was altered on disk")
            as_bytes(self._of(piece.shard))[:] = np.frombuffer(data, np.uint8)
        self.looks = list(seal.looks)


def weight(look: int) -> float:
    """Return the weight of update number ``look``: how far the average moves towards the new value. The first has
    weight 1."""
    return (POWER + 1) / (look + POWER)


def span(looks: int) -> int:
    """Return about how many of the last versions an average after ``looks`` updates covers."""
    return max(1, looks // (POWER + 1))


def _finish(disk: Disk, half: Path, path: Path, seal: Seal) -> None:
    disk.append(half, msgspec.json.encode(seal))
    disk.sync(half)
    disk.rename(half, path)
    disk.sync_folder(path.parent)
