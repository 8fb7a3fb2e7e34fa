"""Text of the laboratory: the standard library's source, read and split as ``training.corpus`` does it.

Every step has one list of windows for all learners, drawn from the seed; learner m has its m-th part. So runs with 1,
2, 4 or 8 learners and data parallel see the same samples in the same steps. The held-out windows are the whole held-out
split, side by side, and the same for every run.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.byte_pairs import train as train_byte_pairs
from p2pdiloco.protocol.ids import digest_of
from p2pdiloco.protocol.manifest import DataConfig
from p2pdiloco.training.corpus import held_out_batches, load_corpus
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.models import loss


@functools.cache
def corpus() -> Corpus:
    """The standard library of the Python that runs this."""
    return load_corpus(DataConfig())


PACKAGES_BYTES = 64_000_000
"""Bytes of ``packages`` that are read: as many tokens as the largest model of the scaling law needs."""


@functools.cache
def packages() -> Corpus:
    """Return the Python source of the installed packages, in the order of their names: more text than the standard
    library has, and by other people. It changes with their versions."""
    folder = sysconfig.get_paths()["purelib"]
    return load_corpus(DataConfig(), folder, max_bytes=PACKAGES_BYTES)


BYTES = 256
LANGUAGE_BYTES = 1_200_000
PIECE = 16_384
"""Every twentieth of so many bytes is held out."""


def _sources() -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Folder and patterns of four languages, as they come with Python and the packages that the laboratory needs."""
    paths = sysconfig.get_paths()
    packages = Path(paths["purelib"])
    return {
        "python": (Path(paths["stdlib"]), ("*.py",)),
        "c++": (packages / "torch" / "include", ("*.h",)),
        "json": (packages, ("*.json",)),
        "english": (packages, ("METADATA", "LICENSE*", "*.md")),
    }


@functools.cache
def languages(*names: str) -> Corpus:
    """These languages (none: Python, C++, JSON, and English), of equal length, one after the other."""
    train, held_out = bytearray(), bytearray()
    sources = _sources()
    for root, patterns in (sources[name] for name in names or sources):
        pieces = _pieces(root, patterns)
        kept = [piece for index, piece in enumerate(pieces) if index % 20]
        train += b"".join(kept)[:LANGUAGE_BYTES]
        held_out += b"".join(pieces[::20])[: LANGUAGE_BYTES // 20]
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8), held_out=torch.frombuffer(held_out, dtype=torch.uint8)
    )


def _pieces(root: Path, patterns: Iterable[str]) -> list[bytes]:
    """Of files drawn at random, by their paths' hashes."""
    found = {path for pattern in patterns for path in root.rglob(pattern) if path.is_file()}
    by_hash = sorted(found, key=lambda path: digest_of(path.relative_to(root).as_posix().encode()))
    text = bytearray()
    for path in by_hash:
        if len(text) < LANGUAGE_BYTES * 20 // 19 + PIECE:
            text += path.read_bytes()[: 64 * PIECE]
    cuts = range(0, min(len(text), LANGUAGE_BYTES * 20 // 19 + PIECE), PIECE)
    return [bytes(text[at : at + PIECE]) for at in cuts]


@functools.cache
def byte_pairs(data: str, vocabulary: int) -> Corpus:
    """Return a text in tokens of at most ``vocabulary`` byte pairs, which are trained on its training split."""
    text = TEXTS.get(data, corpus)()
    train, held_out = (_cut(split.numpy().tobytes().decode(errors="replace")) for split in (text.train, text.held_out))
    tokenizer = train_byte_pairs(train, vocabulary)
    splits = (
        torch.tensor([token for piece in tokenizer.encode_batch_fast(pieces) for token in piece.ids], dtype=torch.int32)
        for pieces in (train, held_out)
    )
    return Corpus(train=next(splits), held_out=next(splits))


def _cut(text: str) -> list[str]:
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


def text_of(data: str, vocabulary: int) -> Corpus:
    """Return the text of ``Setting.data``, in bytes if the vocabulary has 256 symbols."""
    return TEXTS.get(data, corpus)() if vocabulary == BYTES else byte_pairs(data, vocabulary)


TEXTS: dict[str, Callable[[], Corpus]] = {
    "mixture": languages,
    "languages": languages,
    "packages": packages,
    "english": functools.partial(languages, "english"),
    "c++": functools.partial(languages, "c++"),
}
"""Text by ``Setting.data``; the standard library for all others."""


class Stream:
    """The batches of learners ``first`` to ``first + k - 1`` of ``learners``."""

    def __init__(
        self,
        text: Tensor,
        *,
        seed: int,
        batch: int,
        context: int,
        learners: int,
        first: int,
        k: int,
        is_parted: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        """``text``: uint8 [bytes] or int32 [tokens]; ``batch``: samples of all learners together, on ``device``."""
        self._text = text.to(device)
        self._batch = batch
        self._learners = learners
        self._mine = slice(first, first + k)
        self._window = torch.arange(context + 1, device=device)
        self._generator = torch.Generator().manual_seed(seed)
        parts = torch.arange(learners + 1) * text.numel() // learners
        self._low = parts[:-1] if is_parted else torch.zeros(learners, dtype=torch.int64)
        self._high = (parts[1:] if is_parted else torch.full((learners,), text.numel())) - context

    def next(self) -> Tensor:
        """int64 [k, samples, context + 1]"""
        drawn = torch.rand(
            (self._learners, self._batch // self._learners), generator=self._generator, dtype=torch.float64
        )
        low, high = self._low[self._mine, None], self._high[self._mine, None]
        starts = low + (drawn[self._mine] * (high - low)).long()
        return self._text[starts.to(self._text.device).unsqueeze(-1) + self._window].long()


@torch.no_grad()
def held_out_losses(model: nn.Module, text: Corpus, context: int, *, samples: int = 0) -> Tensor:
    """Mean loss of each batch of 64 held-out windows, float64: their mean is the model's loss, and two models' losses
    can be compared batch by batch. ``samples`` 0: all windows that lie side by side."""
    samples = samples or text.held_out.numel() // context
    device = next(model.parameters()).device
    batches = held_out_batches(text, context, samples, batch=64)
    return torch.tensor([float(loss(model, batch.to(device))) for batch in batches])
