"""Supplies a built-in learner with data: blocks that its node has assigned to it, and random windows between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.training.corpus import Batches, Blocks, data_digest
from p2pdiloco.training.dataset_files import Corpus


class DataSupply:
    """Batches without end: training never waits for data. ``incarnation`` seeds the random ones."""

    def __init__(self, manifest: Manifest, corpus: Corpus, incarnation: str) -> None:
        context, batch = manifest.config.model.context, manifest.config.inner.batch
        self.windows = Batches(corpus, context, batch, f"{manifest.run}/{incarnation}")
        """Random samples, when there is no block."""
        self._data: Blocks | None = None
        if manifest.blocks.number and data_digest(corpus) == manifest.blocks.data:
            self._data = Blocks(corpus, context, batch, manifest.blocks, manifest.run)
        self._in_a_block = manifest.blocks.samples // batch
        self._assigned: deque[Block] = deque()
        self._block: Block | None = None
        """In training; of it the batches that are left, and how many."""
        self._in_block: Iterator[Tensor] = iter(())
        self._left = 0

    @property
    def has_blocks(self) -> bool:
        """The corpus is the run's, whose blocks are numbered."""
        return self._data is not None

    def assign(self, block: Block) -> None:
        """It is next but those given before."""
        self._assigned.append(block)

    def clear(self) -> None:
        """Nothing that was assigned is trained."""
        self._assigned.clear()
        self._block = None

    def next(self) -> Tensor:
        """Of the block in hand, of the next one, or random windows."""
        if self._block is None and self._assigned and self._data is not None:
            self._block = self._assigned.popleft()
            self._in_block = self._data.batches(self._block)
            self._left = self._in_a_block
        return next(self.windows if self._block is None else self._in_block)

    def trained(self) -> Block | None:
        """The last batch is; the block that it ends."""
        self._left -= 1
        if self._block is None or self._left:
            return None
        block, self._block = self._block, None
        return block
