"""Corpus: the bytes that a peer trains on, and its held-out split.

Rules of this file:
1. An epoch's samples are adjacent windows, in a random order that all peers share, cut into numbered blocks. The
   protocol decides which learner trains which block (``protocol.data_blocks``). A learner without blocks draws random
   windows of its own, seeded with a text that names its life. Held-out windows are the same on every peer with the same
   files.
2. ``dataset_files`` finds the files and decides which are held out. ``tokenized_dataset`` turns documents into tokens.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from p2pdiloco.protocol.data_blocks import MAX_BLOCKS, Block
from p2pdiloco.protocol.ids import Digest, RunId, digest_of
from p2pdiloco.protocol.manifest import BlockSpec, DataConfig, Manifest
from p2pdiloco.training.dataset_files import (
    BROKEN,
    PATTERNS,
    Corpus,
    CorpusError,
    ReadingProgress,
    cached,
    find_files,
    is_compressed,
    is_held_out,
    log,
    mapped,
    open_file,
    stamp,
)
from p2pdiloco.training.tokenized_dataset import load_tokens

STDLIB_MAX_BYTES = 32 << 20
# A split of more bytes is mapped.
MEMORY_BYTES = 1 << 30
PIECE_BYTES = 1 << 20
# A file that is mapped is not read from end to end: so many places of a page each are checked for text.
PROBES, PAGE = 256, 4096
# An epoch of more samples has no blocks: their order would not fit into memory, and nobody trains so many.
MOST_SAMPLES = 1 << 25
# An epoch of fewer blocks cannot be shared well: most blocks would always be assigned to somebody.
FEWEST_BLOCKS = 32


class Part(NamedTuple):
    """A part of a file: the bytes from ``start`` to ``stop``, after decompression."""

    file: Path
    start: int
    stop: int


def load_corpus(
    config: DataConfig,
    data: str | None = None,
    tokenizer: str | None = None,
    max_bytes: int = sys.maxsize,
    *,
    context: int = 1,
) -> Corpus:
    """Read the files of the folder ``data`` in the order of their paths, up to ``max_bytes`` (standard library: 32
    MiB). Splits of more than ``MEMORY_BYTES`` are mapped instead.

    A file is trained on or held out as a whole. If that leaves one split without a sample (a single book, say), the
    tail of each file is held out instead. For documents and ``tokenizer`` see ``tokenized_dataset``.

    Raises:
        CorpusError: there is no such folder or no matching file, a file cannot be read or is no text, or a split has
            fewer than ``context`` + 1 bytes.
    """
    if config.kind in PATTERNS:
        return load_tokens(config, data, tokenizer, max_bytes, context)
    root, files = find_files(config, data)
    left = min(max_bytes, STDLIB_MAX_BYTES) if config.kind == "stdlib" and data is None else max_bytes
    parts: dict[bool, list[Part]] = {False: [], True: []}
    for file in files:
        part = Part(file, 0, min(_size(file), left))
        left -= part.stop
        parts[is_held_out(file.relative_to(root).as_posix(), config.held_out_share)].append(part)
        if not left:
            break
    short = [held_out for held_out, split in parts.items() if _total(split) <= context]
    if len(short) == 1:
        parts = _tails(parts[not short[0]], config.held_out_share)
    for held_out, label in ((False, "training"), (True, "held-out")):
        if _total(parts[held_out]) <= context:
            raise CorpusError(
                f"the {label} split of {root} has {_total(parts[held_out])} bytes, a sample needs {context + 1}: "
                "add files, or change data.held_out_share"
            )
    found = Corpus(train=_split(parts[False]), held_out=_split(parts[True]))
    log.info("data-read", place=root, files=len(files), bytes=found.train.numel(), held_out=found.held_out.numel())
    return found


def _size(file: Path) -> int:
    try:
        if not is_compressed(file):
            return file.stat().st_size
        with open_file(file) as stream:
            return sum(map(len, iter(partial(stream.read, PIECE_BYTES), b"")))
    except BROKEN as error:
        raise _unreadable(file, error) from error


def _total(parts: Sequence[Part]) -> int:
    return sum(part.stop - part.start for part in parts)


def _tails(parts: Sequence[Part], share: float) -> dict[bool, list[Part]]:
    """Divide each file: its tail, ``share`` of it, is held out."""
    cuts = [part.stop - round(share * part.stop) for part in parts]
    return {
        False: [Part(part.file, 0, cut) for part, cut in zip(parts, cuts, strict=True)],
        True: [Part(part.file, cut, part.stop) for part, cut in zip(parts, cuts, strict=True)],
    }


def _split(parts: Sequence[Part]) -> Tensor:
    """Return the bytes of ``parts``, uint8: from memory, from the only file, or from a copy in the cache."""
    if _total(parts) <= MEMORY_BYTES:
        content = bytearray()
        for piece in _pieces(parts):
            content += piece
        return torch.frombuffer(content, dtype=torch.uint8)
    file, start, stop = parts[0]
    if len(parts) == 1 and not is_compressed(file):
        found = mapped(file, np.uint8)[start:stop]
        for at in range(0, len(found), max(PAGE, len(found) // PROBES)):
            if not found[at : at + PAGE].any():
                raise _empty(file)
        return found

    def write(folder: Path) -> None:
        with (folder / "bytes").open("wb") as target:
            target.writelines(_pieces(parts))

    return mapped(cached([(*stamp(p.file), p.start, p.stop) for p in parts], write, _total(parts)) / "bytes", np.uint8)


def _pieces(parts: Sequence[Part]) -> Iterator[bytes]:
    progress = ReadingProgress("reading-data", _total(parts))
    for file, start, stop in parts:
        try:
            with open_file(file) as stream:
                position = 0
                while position < stop and (piece := stream.read(PIECE_BYTES)):
                    if not piece.strip(b"\0"):
                        raise _empty(file)
                    wanted = piece[max(0, start - position) : stop - position]
                    position += len(piece)
                    progress.add(len(wanted))
                    yield wanted
        except BROKEN as error:
            raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> CorpusError:
    told = getattr(error, "strerror", None) or error
    return CorpusError(f"{file} cannot be read ({told}): fix its permissions, repair it or move it away")


def _empty(file: Path) -> CorpusError:
    return CorpusError(
        f"{file} has NUL bytes instead of text: it is a file with holes; download it again or move it away"
    )


def cut_into_blocks(corpus: Corpus, context: int, batch: int, block: int) -> BlockSpec:
    """Divide an epoch into blocks of about ``block`` samples, whole batches each.

    Blocks are larger if there would be too many, and smaller if there would be too few to share. There are none if even
    blocks of one batch are too few, or if the samples are too many to be shuffled.
    """
    samples = _samples(corpus, context)
    if samples > MOST_SAMPLES:
        return BlockSpec()
    size = max(min(block, samples // FEWEST_BLOCKS), -(-samples // MAX_BLOCKS))
    size = -(-size // batch) * batch
    if not block or not size or samples // size < FEWEST_BLOCKS:
        return BlockSpec()
    return BlockSpec(number=samples // size, samples=size, data=data_digest(corpus))


def data_digest(corpus: Corpus) -> Digest:
    """Return a digest that identifies the training split."""
    return digest_of(memoryview(corpus.train.numpy()).cast("B"))  # type: ignore[arg-type]  # bytes-like, contiguous


def _samples(corpus: Corpus, context: int) -> int:
    """Return the samples of an epoch: adjacent windows, wherever the first begins within a window's length."""
    return max(0, (corpus.train.numel() - context - 1) // context)


class Blocks:
    """The run's numbered blocks. Every epoch has a random order of its own, the same on all peers."""

    def __init__(self, corpus: Corpus, context: int, batch: int, spec: BlockSpec, run: RunId) -> None:
        self._bytes = corpus.train
        self._samples = _samples(corpus, context)
        if spec.number * spec.samples > self._samples:
            raise CorpusError(
                f"the manifest divides an epoch into {spec.number} blocks of {spec.samples} samples, but the data has "
                f"only {self._samples} samples"
            )
        self._context = context
        self._window = torch.arange(context + 1)
        self._batch = batch
        self._spec = spec
        self._run = run
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)
        self._offset = 0

    def batches(self, block: Block) -> Iterator[Tensor]:
        """Yield the block's samples, int64 [at most batch, context + 1] each time."""
        epoch, index = divmod(block, self._spec.number)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(_seed(f"{self._run}/epoch {epoch}"))
            self._offset = int(torch.randint(0, self._context, (), generator=generator))
            self._order = torch.randperm(self._samples, generator=generator)
            self._epoch = epoch
        first = index * self._spec.samples
        starts = self._order[first : first + self._spec.samples] * self._context + self._offset
        for at in range(0, self._spec.samples, self._batch):
            yield self._bytes[starts[at : at + self._batch, None] + self._window].long()


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Batches:
    """An endless, deterministic stream of batches: random windows of the training split, int64 [batch, context + 1]."""

    def __init__(self, corpus: Corpus, context: int, batch: int, seed_text: str) -> None:
        if corpus.train.numel() <= context:
            raise CorpusError(f"the training split has {corpus.train.numel()} bytes, a sample needs {context + 1}")
        self._bytes = corpus.train
        self._batch = batch
        self._window = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(_seed(seed_text))

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def state(self) -> Tensor:
        """Return the position of the stream, uint8. Pass it to ``set_state`` of a stream with the same arguments (any
        seed)."""
        return self._generator.get_state()

    def set_state(self, state: Tensor) -> None:
        """Continue from this position.

        Raises:
            RuntimeError, TypeError: it is not such a state.
        """
        self._generator.set_state(state)

    def __next__(self) -> Tensor:
        last = self._bytes.numel() - self._window.numel()
        starts = torch.randint(0, last + 1, (self._batch, 1), generator=self._generator)
        return self._bytes[starts + self._window].long()


class DataSupply:
    """An endless supply of batches for the shipped script, so that training never waits for data: blocks that its node
    has assigned, and random windows when there is none."""

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


def held_out_batches(corpus: Corpus, context: int, samples: int, batch: int = 16) -> Iterator[Tensor]:
    """Yield ``samples`` windows spread evenly over the held-out split, in batches int64 [at most ``batch``, context +
    1]."""
    last = corpus.held_out.numel() - (context + 1)
    if last < 0:
        raise CorpusError(f"the held-out split has {corpus.held_out.numel()} bytes, a sample needs {context + 1}")
    starts = torch.tensor([last * i // max(1, samples - 1) for i in range(samples)])
    window = torch.arange(context + 1)
    for at in range(0, samples, batch):
        yield corpus.held_out[starts[at : at + batch, None] + window].long()
