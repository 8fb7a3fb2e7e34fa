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
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from p2pdiloco.protocol.data_blocks import MAX_BLOCKS, Block
from p2pdiloco.protocol.ids import Digest, RunId, digest_of
from p2pdiloco.protocol.manifest import BlockSpec, DataConfig
from p2pdiloco.training.dataset_files import PATTERNS, Corpus, CorpusError, find_files, is_held_out
from p2pdiloco.training.tokenized_dataset import load_tokens

DEFAULT_MAX_BYTES = 1 << 32
STDLIB_MAX_BYTES = 32 << 20
# An epoch of fewer blocks cannot be shared well: most blocks would always be assigned to somebody.
FEWEST_BLOCKS = 32


def load_corpus(
    config: DataConfig,
    data: str | None = None,
    tokenizer: str | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    *,
    context: int = 1,
) -> Corpus:
    """Read the files of the folder ``data`` in the order of their paths, up to ``max_bytes`` (standard library: 32
    MiB).

    A file is trained on or held out as a whole. If that leaves one split without a sample (a single book, say), the
    tail of each file is held out instead. For documents and ``tokenizer`` see ``tokenized_dataset``.

    Raises:
        CorpusError: there is no such folder or no matching file, a file cannot be read, or a split has fewer than
            ``context`` + 1 bytes.
    """
    if config.kind in PATTERNS:
        return load_tokens(config, data, tokenizer, max_bytes, context)
    root, files = find_files(config, data)
    limit = min(max_bytes, STDLIB_MAX_BYTES) if config.kind == "stdlib" and data is None else max_bytes
    splits: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    ends: dict[bool, list[int]] = {False: [], True: []}
    for file in files:
        room = limit - sum(len(s) for s in splits.values())
        if room <= 0:
            break
        held_out = is_held_out(file.relative_to(root).as_posix(), config.held_out_share)
        splits[held_out] += _read(file, room)
        ends[held_out].append(len(splits[held_out]))
    short = [held_out for held_out, split in splits.items() if len(split) <= context]
    if len(short) == 1:
        _share_out(splits, ends[not short[0]], config.held_out_share, to=short[0])
    for held_out, label in ((False, "training"), (True, "held-out")):
        if len(splits[held_out]) <= context:
            raise CorpusError(
                f"the {label} split of {root} has {len(splits[held_out])} bytes, a sample needs {context + 1}: "
                "add files, or change data.held_out_share"
            )
    return Corpus(
        train=torch.frombuffer(splits[False], dtype=torch.uint8),
        held_out=torch.frombuffer(splits[True], dtype=torch.uint8),
    )


def _share_out(splits: dict[bool, bytearray], ends: Sequence[int], share: float, *, to: bool) -> None:
    """Hold out the tail of each file, ``share`` of it. All files are in one split, with their ends at ``ends``; ``to``
    is the split without a sample."""
    given = splits[not to]
    splits[not to] = bytearray()
    for start, end in itertools.pairwise((0, *ends)):
        cut = end - round(share * (end - start))
        splits[False] += given[start:cut]
        splits[True] += given[cut:end]


def _read(file: Path, limit: int) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(limit)
    except OSError as error:
        raise CorpusError(f"{file} cannot be read ({error.strerror}): fix its permissions or move it away") from error


def cut_into_blocks(corpus: Corpus, context: int, batch: int, block: int) -> BlockSpec:
    """Divide an epoch into blocks of about ``block`` samples, whole batches each.

    Blocks are larger if there would be too many, and smaller if there would be too few to share. There are none if even
    blocks of one batch are too few.
    """
    samples = _samples(corpus, context)
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
