"""Tokenized dataset: tokenizes documents (``documents``) once, piece by piece, into mapped files.

Rules of this file:
1. Neither the documents nor their tokens have to fit into memory. They are encoded in batches and written to two int32
   files (training and held out) under ``~/.cache/p2pdiloco/tokens``, which later lives of the learner map.
2. A text file is one document; in the other kinds each row is one. Whole documents are held out, by a hash of the
   file's relative path and the row's number, so that peers with the same files agree.
3. The tokenizer is a tokenizer.json, which is data; no code comes with it. Its digest is in the manifest, since peers
   with different tokenizers would train on different symbols. A chat template lies beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from p2pdiloco.protocol.ids import digest_of
from p2pdiloco.protocol.manifest import DataConfig
from p2pdiloco.training.dataset_files import (
    PATTERNS,
    Corpus,
    CorpusError,
    amount,
    cached,
    find_files,
    is_held_out,
    log,
    mapped,
    stamp,
)
from p2pdiloco.training.documents import Documents, Messages
from p2pdiloco.training.huggingface import EXTRA, import_transformers

MAX_TOKENIZER_BYTES = 1 << 26
_BATCH = 256
_FORMAT = 3
_FILES = ("train.i32", "held_out.i32")
_COUNTS = "counts.json"
# Files beside tokenizer.json that may have the chat template.
_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")


def with_tokenizer(config: DataConfig, data: str | None, tokenizer: str | None) -> DataConfig:
    """Return ``config`` with the digest of the tokenizer on this machine.

    Raises:
        CorpusError: there is none.
    """
    if config.kind not in PATTERNS:
        return config
    find_files(config, data)  # so that missing data is reported before a missing tokenizer
    return msgspec.structs.replace(config, tokenizer_digest=digest_of(_tokenizer(data, tokenizer)[1]))


def read_tokenizer(config: DataConfig, data: str | None, tokenizer: str | None) -> bytes:
    """Read the run's tokenizer.json from the folder ``tokenizer`` or from the folder of the data.

    Raises:
        CorpusError: there is none, or it is another one.
    """
    found = _tokenizer(data, tokenizer)[1]
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
    digest, place = digest_of(tokenizer), _tokenizer(data, tokenizer_place)[0]
    templates = [stamp(place / name) for name in _TEMPLATES if (place / name).is_file()]
    stamps = [(file.relative_to(root).as_posix(), *stamp(file)) for file in files]
    settings = (_FORMAT, digest, config.kind, config.column, config.separator, config.held_out_share, max_bytes)

    def write(folder: Path) -> None:
        documents = Documents(config, root, files, render=_chat_template(place, config.separator))
        _write(folder, documents, config, tokenizer, max_bytes)

    folder = cached([str(root.resolve()), settings, templates, stamps], write)
    sizes = [(folder / name).stat().st_size // 4 for name in _FILES]
    counts = json.loads((folder / _COUNTS).read_bytes())
    read = amount(sum(size for *_, size, _ in stamps))
    log.info("data-read", place=root, files=len(files), read=read, **counts, tokens=sizes[0], held_out=sizes[1])
    splits = []
    for name, label, tokens in zip(_FILES, ("training", "held-out"), sizes, strict=True):
        if tokens <= context:
            raise CorpusError(
                f"the {label} split of {data or root} has {tokens} tokens, a sample needs {context + 1}: "
                "add documents (each goes to one split as a whole) or change data.held_out_share"
            )
        splits.append(mapped(folder / name, np.int32))
    return Corpus(train=splits[0], held_out=splits[1])


def _tokenizer(data: str | None, tokenizer: str | None) -> tuple[Path, bytes]:
    """Return the folder of the tokenizer.json, and its content."""
    places = [Path(place).expanduser() for place in (tokenizer, data) if place]
    for place in places:
        file = place if place.name == "tokenizer.json" else place / "tokenizer.json"
        try:
            with file.open("rb") as stream:
                return file.parent, stream.read(MAX_TOKENIZER_BYTES)
        except OSError:
            continue
    told = " or ".join(map(str, places)) or "any folder that is named here"
    raise CorpusError(
        f"no tokenizer.json in {told}: put the founder's into the folder of your data, or name its folder with "
        "--tokenizer"
    )


def _chat_template(place: Path, separator: str) -> Callable[[Messages], str]:
    """Return the chat template beside a tokenizer.json, loaded when it is needed. Its text is without ``separator``,
    which ends each document."""

    @cache
    def tokenizer() -> Any:
        transformers = import_transformers("the data are rows with messages")
        return transformers.PreTrainedTokenizerFast.from_pretrained(place, local_files_only=True)

    def render(messages: Messages) -> str:
        if not tokenizer().chat_template:
            raise CorpusError(f"{place} has no chat template: copy chat_template.jinja there, from a chat model")
        found: str = tokenizer().apply_chat_template(messages, tokenize=False)
        return found.rstrip().removesuffix(separator)

    return render


def _write(folder: Path, documents: Documents, config: DataConfig, tokenizer: bytes, max_bytes: int) -> None:
    """Write the tokens of both splits, and what was read, to ``folder``."""
    encoder = load_tokenizer(tokenizer)
    separator: list[int] = []
    if config.separator:
        token = encoder.token_to_id(config.separator)
        if token is None:
            raise CorpusError(
                f"data.separator = {config.separator!r} is not a token of the tokenizer: choose one of its tokens"
            )
        separator = [token]
    with (folder / _FILES[0]).open("wb") as train, (folder / _FILES[1]).open("wb") as held_out:
        left, rest = max_bytes, iter(documents)
        while left > 0 and (batch := list(islice(rest, _BATCH))):
            for document, found in zip(
                batch, encoder.encode_batch([d.text for d in batch], add_special_tokens=False), strict=True
            ):
                if left <= 0:
                    break
                target = held_out if is_held_out(document.name, config.held_out_share) else train
                ids = found.ids + separator if document.is_end else found.ids
                target.write(np.asarray(ids, dtype=np.int32).tobytes())
                left -= len(document.text)
    (folder / _COUNTS).write_text(json.dumps({"rows": documents.rows, "skipped": documents.skipped}))


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
