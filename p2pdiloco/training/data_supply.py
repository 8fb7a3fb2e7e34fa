"""Data supply of a built-in learner: blocks that its node has assigned, and random windows when there is none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.training.corpus import Batches, Blocks, data_digest
from p2pdiloco.training.dataset_files import Corpus


class DataSupply:
    """An endless supply of batches, so that training never waits for data. ``incarnation`` seeds the random windows."""

    def __init__(self, manifest: Manifest, corpus: Corpus, incarnation: str) -> None:
        context, batch = manifest.config.model.context, manifest.config.inner.batch
        # Random samples, used when no block is assigned.
        self.windows = Batches(corpus, context, batch, f"{manifest.run}/{incarnation}")
        self._data: Blocks | None = None
        if manifest.blocks.number and data_digest(corpus) == manifest.blocks.data:
            self._data = Blocks(corpus, context, batch, manifest.blocks, manifest.run)
        self._in_a_block = manifest.blocks.samples // batch
        self._assigned: deque[Block] = deque()
        # The block in training. ``_in_block`` yields its remaining batches; ``_left`` is their number.
        self._block: Block | None = None
        self._in_block: Iterator[Tensor] = iter(())
        self._left = 0

    @property
    def has_blocks(self) -> bool:
        """True if the corpus is the run's own, whose blocks are numbered."""
        return self._data is not None

    def assign(self, block: Block) -> None:
        """Queue a block, after the blocks that were assigned before."""
        self._assigned.append(block)

    def clear(self) -> None:
        """Drop all assigned blocks."""
        self._assigned.clear()
        self._block = None

    def next(self) -> Tensor:
        """Return the next batch: of the present block, of the next assigned one, or random windows."""
        if self._block is None and self._assigned and self._data is not None:
            self._block = self._assigned.popleft()
            self._in_block = self._data.batches(self._block)
            self._left = self._in_a_block
        return next(self.windows if self._block is None else self._in_block)

    def trained(self) -> Block | None:
        """Note that the last batch was trained; return the block that it completes, if any."""
        self._left -= 1
        if self._block is None or self._left:
            return None
        block, self._block = self._block, None
        return block
