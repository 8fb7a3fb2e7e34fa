"""The text that the global model writes for people."""

from __future__ import annotations

import time

import torch

from p2pdiloco.protocol.manifest import ModelConfig
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.evaluation import GIVEN, PIECE, WRITTEN, excerpt
from p2pdiloco.training.models import build_model

MODEL = ModelConfig(width=16, depth=1, heads=2, context=8)


def corpus(dtype: torch.dtype) -> Corpus:
    text = torch.tensor(list(b"all work and no play makes jack a dull boy " * 9), dtype=dtype)
    return Corpus(train=text, held_out=text)


def test_it_goes_on_from_held_out_text_and_leaves_the_model_as_it_was() -> None:
    model = build_model(MODEL, 0)
    model.train()
    drawn = torch.get_rng_state()
    given, _, written = excerpt(model, corpus(torch.uint8), time.perf_counter() - 5.0).partition("│")
    assert given.encode() == bytes(corpus(torch.uint8).held_out[:GIVEN].tolist())
    assert PIECE <= len(written) <= WRITTEN
    assert model.training
    assert torch.equal(drawn, torch.get_rng_state()), "training draws what it would have drawn"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_takes_no_longer_than_it_may() -> None:
    written = excerpt(build_model(MODEL, 0), corpus(torch.uint8), time.perf_counter() + 1.0).partition("│")[2]
    assert 1 <= len(written) <= PIECE


def test_a_model_of_tokens_or_without_sense_writes_nothing() -> None:
    model = build_model(MODEL, 0)
    assert excerpt(model, corpus(torch.int32), 0.0) == ""
    with torch.no_grad():
        next(iter(model.parameters())).fill_(float("nan"))
    assert excerpt(model, corpus(torch.uint8), 0.0).endswith("│")
