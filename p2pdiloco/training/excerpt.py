"""A short text by the global model, for people who watch a run become better at it."""

from __future__ import annotations

import time
from contextlib import suppress

import torch
from torch import nn

from p2pdiloco.training.corpus_files import Corpus
from p2pdiloco.training.transformer import generate

GIVEN, WRITTEN = 48, 160
"""Bytes of held-out text, and at most so many of the model's."""
PIECE = 8
TEMPERATURE = 0.7
LONGEST_S = 1.0


def excerpt(model: nn.Module, corpus: Corpus, began: float) -> str:
    """What the model makes of the held-out text's beginning; empty for a model that does not write bytes. ``began``:
    when its loss was begun to be measured (``time.perf_counter``): this takes no longer than that did, and a second at
    most, but for the first few letters."""
    if corpus.held_out.dtype is not torch.uint8:
        return ""
    now = time.perf_counter()
    until = now + min(now - began, LONGEST_S)
    given = bytes(corpus.held_out[:GIVEN].tolist())
    text, was_training = given, model.training
    model.eval()
    with suppress(RuntimeError):  # chances that are no numbers: the loss tells of them
        for piece in range(WRITTEN // PIECE):
            text = generate(model, text, PIECE, TEMPERATURE, seed=piece)
            if time.perf_counter() >= until:
                break
    model.train(was_training)
    return f"{given.decode('utf-8', 'replace')}│{text[len(given) :].decode('utf-8', 'replace')}"
