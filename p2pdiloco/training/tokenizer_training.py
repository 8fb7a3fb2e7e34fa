"""Tokenizer training: learns byte-pair encoding (BPE) from a user's own texts, for built-in models.

The tokenizer is byte-level, so that it encodes any text, and has an end-of-text token. Other programs read the files
that it is written to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from p2pdiloco.protocol.manifest import DataConfig
from p2pdiloco.training.dataset_files import CorpusError, find_files
from p2pdiloco.training.documents import Documents
from p2pdiloco.training.huggingface import EXTRA

END = "<|endoftext|>"


def train_tokenizer(config: DataConfig, data: str, size: int) -> tuple[str, int]:
    """Train a tokenizer of at most ``size`` tokens on the documents in ``data``; return its tokenizer.json and size.

    Raises:
        CorpusError: tokenizers is not installed, or there are no documents.
    """
    root, files = find_files(config, data)
    # Only the words of a chat are learned: its template belongs to a model, which has a tokenizer.
    documents = Documents(
        config, root, files, option="--column", render=lambda chat: "\n".join(str(m.get("content")) for m in chat)
    )
    tokenizer = byte_pairs((document.text for document in documents), size)
    return tokenizer.to_str(pretty=True), tokenizer.get_vocab_size()


def byte_pairs(texts: Iterable[str], size: int) -> Any:
    """Train a ``tokenizers.Tokenizer`` of at most ``size`` tokens, and return it.

    Raises:
        CorpusError: tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise CorpusError(f"a tokenizer is trained by tokenizers: {EXTRA}") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(trained: str, folder: Path) -> None:
    """Write a tokenizer of ``train_tokenizer``, as transformers reads it.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(trained, encoding="utf-8")
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=2), encoding="utf-8")
