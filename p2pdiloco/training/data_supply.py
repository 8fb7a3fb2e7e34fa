"""Data supply of the shipped script: blocks that its node has assigned, and random windows when there is none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.training.corpus import Batches, Blocks, data_digest
from p2pdiloco.training.dataset_files import Corpus


class DataSupply:
    """An endless supply of batches, so that training never waits for data."""

    def __init__(self, manifest: Manifest, corpus: Corpus, incarnation: str, assigned: deque[Block]) -> None:
        """``incarnation`` seeds the random windows. ``assigned``: blocks that the node has assigned and that are not
        finished. Whoever loses the node clears it."""
        context, batch = manifest.config.model.context, manifest.config.inner.batch
        # Random samples, used when no block is assigned.
        self.windows = Batches(corpus, context, batch, f"{manifest.run}/{incarnation}")
        self._data: Blocks | None = None
        if manifest.blocks.number and data_digest(corpus) == manifest.blocks.data:
            self._data = Blocks(corpus, context, batch, manifest.blocks, manifest.run)
        self._in_a_block = manifest.blocks.samples // batch
        self._assigned = assigned
        # The block in training. ``_in_block`` yields its remaining batches; ``_left`` is their number.
        self._block: Block | None = None
        self._in_block: Iterator[Tensor] = iter(())
        self._left = 0

    @property
    def has_blocks(self) -> bool:
        """True if the corpus is the run's own, whose blocks are numbered."""
        return self._data is not None

    def next(self) -> Tensor:
        """Return the next batch: of the first assigned block, or random windows."""
        if not self._assigned or self._data is None:
            self._block = None
            return next(self.windows)
        if self._block != self._assigned[0]:
            self._block, self._left = self._assigned[0], self._in_a_block
            self._in_block = self._data.batches(self._block)
        self._left -= 1
        return next(self._in_block)

    def trained(self) -> Block | None:
        """Note that the last batch was trained. Remove and return the block that it completes, if any."""
        if self._block is None or self._left:
            return None
        block, self._block = self._block, None
        return self._assigned.popleft() if self._assigned and self._assigned[0] == block else None
