"""Tokenized dataset: reads documents (text, JSON lines, Parquet) piece by piece and tokenizes them once into mapped
files.

Rules of this file:
1. Neither the documents nor their tokens have to fit into memory. They are encoded in batches and written to two int32
   files (training and held out) under ``~/.cache/p2pdiloco/tokens``, which later lives of the learner map.
2. A text file is one document; in the other kinds each row is one. Whole documents are held out, by a hash of the
   file's relative path and the row's number, so that peers with the same files agree.
3. The tokenizer is a tokenizer.json, which is data; no code comes with it. Its digest is in the manifest, since peers
   with different tokenizers would train on different symbols.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
import torch

from p2pdiloco.protocol.ids import digest_of
from p2pdiloco.protocol.manifest import DataConfig
from p2pdiloco.training.dataset_files import PATTERNS, Corpus, CorpusError, find_files, is_held_out
from p2pdiloco.training.huggingface import EXTRA
from p2pdiloco.util.files import home_folder

MAX_TOKENIZER_BYTES = 1 << 26
MAX_ROW_BYTES = 1 << 26
# Amount of a text file that is encoded at once. It is cut at a line end.
TEXT_BYTES = 1 << 20
_BATCH = 256
_FORMAT = 1
_FILES = ("train.i32", "held_out.i32")


class Document(NamedTuple):
    """A document, or a piece of one."""

    name: str
    text: str
    is_end: bool


def with_tokenizer(config: DataConfig, data: str | None, tokenizer: str | None) -> DataConfig:
    """Return ``config`` with the digest of the tokenizer on this machine.

    Raises:
        CorpusError: there is none.
    """
    if config.kind not in PATTERNS:
        return config
    find_files(config, data)  # so that missing data is reported before a missing tokenizer
    return msgspec.structs.replace(config, tokenizer_digest=digest_of(_tokenizer_bytes(data, tokenizer)))


def read_tokenizer(config: DataConfig, data: str | None, tokenizer: str | None) -> bytes:
    """Read the run's tokenizer.json from the folder ``tokenizer`` or from the folder of the data.

    Raises:
        CorpusError: there is none, or it is another one.
    """
    found = _tokenizer_bytes(data, tokenizer)
    digest = digest_of(found)
    if config.tokenizer_digest and digest != config.tokenizer_digest:
        raise CorpusError(
            f"the tokenizer.json here has the digest {digest}, but the run's has {config.tokenizer_digest}: "
            "copy the founder's file into the folder of your data"
        )
    return found


def load_tokens(
    config: DataConfig, data: str | None, tokenizer_place: str | None, max_bytes: int, context: int
) -> Corpus:
    """Tokenize the documents in ``data``, up to ``max_bytes`` of text, unless that was done before.

    ``tokenizer_place``: folder with tokenizer.json; None: it is among the documents.

    Raises:
        CorpusError: as in ``load_corpus``; also if the tokenizer is not the run's, or a row is broken.
    """
    root, files = find_files(config, data)
    tokenizer = read_tokenizer(config, data, tokenizer_place)
    digest = digest_of(tokenizer)
    stamps = [(file.relative_to(root).as_posix(), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    settings = (_FORMAT, digest, config.kind, config.column, config.separator, config.held_out_share, max_bytes)
    folder = _cache() / digest_of(json.dumps([str(root.resolve()), settings, stamps]).encode())
    if not folder.is_dir():
        _write(folder, read_documents(config, root, files), config, tokenizer, max_bytes)
    splits = []
    for name, label in zip(_FILES, ("training", "held-out"), strict=True):
        tokens = (folder / name).stat().st_size // 4
        if tokens <= context:
            raise CorpusError(
                f"the {label} split of {data or root} has {tokens} tokens, a sample needs {context + 1}: "
                "add documents (each goes to one split as a whole) or change data.held_out_share"
            )
        splits.append(torch.from_file(str(folder / name), shared=False, size=tokens, dtype=torch.int32))
    return Corpus(train=splits[0], held_out=splits[1])


def _tokenizer_bytes(data: str | None, tokenizer: str | None) -> bytes:
    places = [Path(place).expanduser() for place in (tokenizer, data) if place]
    for place in places:
        file = place if place.name == "tokenizer.json" else place / "tokenizer.json"
        try:
            with file.open("rb") as stream:
                return stream.read(MAX_TOKENIZER_BYTES)
        except OSError:
            continue
    told = " or ".join(map(str, places)) or "any folder that is named here"
    raise CorpusError(
        f"no tokenizer.json in {told}: put the founder's into the folder of your data, or name its folder with "
        "--tokenizer"
    )


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    return Path(root) / "p2pdiloco" / "tokens"


def _write(folder: Path, documents: Iterator[Document], config: DataConfig, tokenizer: bytes, max_bytes: int) -> None:
    """Write both files, completely or not at all. If two processes do this at once, one wins."""
    encoder = load_tokenizer(tokenizer)
    separator: list[int] = []
    if config.separator:
        token = encoder.token_to_id(config.separator)
        if token is None:
            raise CorpusError(
                f"data.separator = {config.separator!r} is not a token of the tokenizer: choose one of its tokens"
            )
        separator = [token]
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
    _sweep(folder.parent)
    try:
        temporary.mkdir(parents=True)
        with (temporary / _FILES[0]).open("wb") as train, (temporary / _FILES[1]).open("wb") as held_out:
            left = max_bytes
            while left > 0 and (batch := list(islice(documents, _BATCH))):
                for document, found in zip(
                    batch, encoder.encode_batch([d.text for d in batch], add_special_tokens=False), strict=True
                ):
                    if left <= 0:
                        break
                    target = held_out if is_held_out(document.name, config.held_out_share) else train
                    ids = found.ids + separator if document.is_end else found.ids
                    target.write(np.asarray(ids, dtype=np.int32).tobytes())
                    left -= len(document.text)
        with suppress(OSError):  # another process was faster
            temporary.rename(folder)
    except OSError as error:
        raise CorpusError(f"tokens cannot be written to {folder.parent}: {error.strerror}; free space there") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Remove files that killed processes left half-written, which are as large as their data."""
    for half in cache.glob("*.*"):
        number = half.suffix.removeprefix(".")
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            shutil.rmtree(half, ignore_errors=True)


def load_tokenizer(data: bytes) -> Any:
    """Return the tokenizer of a tokenizer.json.

    Raises:
        CorpusError: it is none, or the library is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CorpusError(f"the run's data are tokens: {EXTRA}") from error
    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:  # tokenizers raises no more specific type
        raise CorpusError(f"tokenizer.json is not a tokenizer: {error}") from error


def read_documents(config: DataConfig, root: Path, files: Iterable[Path]) -> Iterator[Document]:
    """Yield the documents of ``files``, each in one piece or several.

    Raises:
        CorpusError: a file cannot be read, or a row is broken.
    """
    for file in files:
        name = file.relative_to(root).as_posix()
        try:
            if config.kind == "text":
                yield from _text(file, name)
            elif config.kind == "jsonl":
                yield from _json_lines(file, name, config.column)
            else:
                yield from _parquet(file, name, config.column)
        except OSError as error:
            raise CorpusError(f"{file} cannot be read ({error}): repair it or move it away") from error


def _text(file: Path, name: str) -> Iterator[Document]:
    with file.open(encoding="utf-8", errors="replace") as stream:
        piece = "".join(stream.readlines(TEXT_BYTES))
        while piece:
            following = "".join(stream.readlines(TEXT_BYTES))
            yield Document(name, piece, not following)
            piece = following


def _json_lines(file: Path, name: str, column: str) -> Iterator[Document]:
    with file.open("rb") as stream:
        for index in range(1 << 62):
            line = stream.readline(MAX_ROW_BYTES)
            if not line:
                return
            if not line.strip():
                continue
            try:
                text = json.loads(line)[column]
            except UnicodeDecodeError as error:
                raise CorpusError(
                    f"{file}, line {index + 1}, is not UTF-8: convert it (for example iconv -f latin1 -t utf8)"
                ) from error
            except (ValueError, KeyError, TypeError) as error:
                raise CorpusError(
                    f"{file}, line {index + 1}, is not a JSON object with key {column!r}: repair it, or set data.column"
                ) from error
            yield _row(file, name, index, column, text)


def _parquet(file: Path, name: str, column: str) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise CorpusError(f"the run's data are Parquet: {EXTRA}") from error
    index = 0
    try:
        with parquet.ParquetFile(file) as table:
            if column not in table.schema_arrow.names:
                raise CorpusError(
                    f"{file} has no column {column!r}: set data.column to one of {table.schema_arrow.names}"
                )
            for batch in table.iter_batches(batch_size=_BATCH, columns=[column]):
                for value in batch.column(0):
                    yield _row(file, name, index, column, value.as_py())
                    index += 1
    except pyarrow.ArrowInvalid as error:
        raise CorpusError(f"{file} is not a Parquet file: {error}") from error


def _row(file: Path, name: str, index: int, column: str, text: object) -> Document:
    if not isinstance(text, str):
        raise CorpusError(f"{file}, row {index + 1}: {column!r} is not a text: repair it, or set data.column")
    return Document(f"{name}#{index}", text, True)
