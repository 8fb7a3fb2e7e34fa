"""Texts for training scripts: files of this machine, or a data set on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from p2pdiloco.protocol.manifest import DataConfig
from p2pdiloco.training.dataset_files import CorpusError, find_files, kind_of
from p2pdiloco.training.huggingface import EXTRA
from p2pdiloco.training.tokenized_dataset import read_documents

_HUB = ("hf://datasets/", "hf://")


def load_texts(place: str, *, column: str = "text", split: str = "train") -> Iterator[str]:
    """Yield the texts of ``place``, one after the other.

    Args:
        place: A file or folder of this machine: JSON lines, Parquet (``*.parquet``) or plain text (``*.txt``, one text
            a file). Or a data set on the Hugging Face hub, as ``OWNER/NAME``, ``OWNER/NAME:CONFIGURATION`` or
            ``hf://datasets/OWNER/NAME``; it is downloaded.
        column: Name of the column that holds the text.
        split: For a data set on the hub: the split to read.

    Raises:
        CorpusError: There is no such place, or it has no such texts. The message says what to do. A subclass of
            ``ValueError``.
    """
    path = Path(place).expanduser()
    if path.exists():
        config = DataConfig(kind=kind_of(path), column=column)
        text: list[str] = []
        for document in read_documents(config, *find_files(config, str(path))):
            text.append(document.text)
            if document.is_end:
                yield "".join(text)
                text.clear()
    else:
        yield from _hub(place, column, split)


def _hub(place: str, column: str, split: str) -> Iterator[str]:
    name = place
    for prefix in _HUB:
        name = name.removeprefix(prefix)
    name, _, configuration = name.partition(":")
    try:
        import datasets
    except ImportError as error:
        raise CorpusError(f"{place} is not a file of this machine; to read data sets of the hub, {EXTRA}") from error
    try:
        found = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the library raises many types of errors
        raise CorpusError(
            f"{place} is not a file or folder here, and cannot be read as a data set of the Hugging Face hub ({error})"
        ) from error
    if column not in found.column_names:
        raise CorpusError(f"{place} has no column {column!r}: name one of {', '.join(found.column_names)}")
    for text in found[column]:
        if not isinstance(text, str):
            raise CorpusError(f"{place}: {column!r} holds no texts: name another column")
        yield text
