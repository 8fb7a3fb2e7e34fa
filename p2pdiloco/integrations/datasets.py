"""Texts for training scripts: files of this machine, or a data set on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from p2pdiloco.protocol.manifest import DataConfig
from p2pdiloco.training.dataset_files import CorpusError, find_files, kind_of, log
from p2pdiloco.training.documents import Documents, Messages, columns_of, text_of
from p2pdiloco.training.huggingface import EXTRA

_HUB = ("hf://datasets/", "hf://")


def load_texts(
    place: str,
    *,
    column: str = "text",
    split: str = "train",
    kind: Literal["text", "jsonl", "parquet"] | None = None,
    tokenizer: Any = None,
) -> Iterator[str]:
    """Yield the texts of ``place``, one after the other.

    Args:
        place: A file or folder of this machine: JSON lines or a JSON array, Parquet (``*.parquet``) or plain text
            (``*.txt``, one text a file); all but Parquet also compressed with gzip or zstandard. Or a data set on the
            Hugging Face hub, as ``OWNER/NAME``, ``OWNER/NAME:CONFIGURATION`` or ``hf://datasets/OWNER/NAME``; it is
            downloaded.
        column: Name of the column that holds the text, or chat messages. Rows where it is null or blank are skipped.
            Without a column ``text``, the columns ``messages``, ``conversations`` (ShareGPT), or ``instruction``,
            ``input`` and ``output`` (Alpaca), are read.
        split: For a data set on the hub: the split to read.
        kind: For a folder with files of several kinds: those to read.
        tokenizer: For chat messages: a tokenizer of transformers, whose chat template is used. The text has neither
            the special token at the beginning that this tokenizer adds itself, nor its end-of-text token.

    Raises:
        CorpusError: There is no such place, or it has no such texts. The message says what to do. A subclass of
            ``ValueError``.
    """
    path = Path(place).expanduser()
    render = None if tokenizer is None else _chat(tokenizer)
    if path.exists():
        config = DataConfig(kind=kind or kind_of(path, "kind="), column=column)
        text: list[str] = []
        for document in Documents(config, *find_files(config, str(path)), option="column=", render=render):
            text.append(document.text)
            if document.is_end:
                yield "".join(text)
                text.clear()
    else:
        yield from _hub(place, column, split, render)


def _chat(tokenizer: Any) -> Callable[[Messages], str]:
    added = tokenizer("")["input_ids"]
    first = tokenizer.bos_token if tokenizer.bos_token_id in added[:1] else ""

    def render(messages: Messages) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
        return text.removeprefix(first).rstrip().removesuffix(tokenizer.eos_token or "")

    return render


def _hub(place: str, column: str, split: str, render: Callable[[Messages], str] | None) -> Iterator[str]:
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
    try:
        columns = columns_of(found.column_names, column)
    except KeyError:
        raise CorpusError(
            f"{place} has no column {column!r}: set column= to one of {', '.join(found.column_names)}"
        ) from None
    skipped = 0
    for index, row in enumerate(found.select_columns(columns)):
        text = text_of(row, column, f"{place}, row {index + 1}", "column=", render)
        if text is None:
            skipped += 1
        else:
            yield text
    if skipped:
        log.warning(f"{skipped:,} rows of {place} have no text (null or blank) and are skipped")
