"""Tokenizers (byte-level BPE) that are trained on the spot, for the laboratory and for tests of exports."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

END = "<|endoftext|>"


def train(texts: Iterable[str], size: int) -> Any:
    """Train a ``tokenizers.Tokenizer`` of at most ``size`` tokens on ``texts``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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


def write(texts: Iterable[str], size: int, folder: Path) -> None:
    """Train a tokenizer as ``train`` does, and write it to ``folder`` as transformers does."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=train(texts, size), eos_token=END).save_pretrained(folder)
