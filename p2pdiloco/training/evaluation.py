"""Held-out loss: every peer with the same files measures the same number for the same parameters. Text samples."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

import torch
from msgspec import UNSET
from torch import Tensor, nn

from p2pdiloco.protocol.manifest import MAX_HELD_OUT, HeldOut, Manifest, RunConfig
from p2pdiloco.training.corpus import held_out_batches
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.models import generate, loss

BATCH = 16


def shared_samples(config: RunConfig, corpus: Corpus) -> HeldOut | None:
    """Return the founder's held-out samples for the manifest; None if the run's peers must not see them."""
    is_shared = config.data.kind == "stdlib" if config.evaluation.shared is UNSET else config.evaluation.shared
    symbol = corpus.held_out.element_size()
    samples = min(config.evaluation.samples, MAX_HELD_OUT // (symbol * (config.model.context + 1)))
    if not (is_shared and samples and config.evaluation.every) or symbol not in (1, 4):
        return None
    found = torch.cat(list(held_out_batches(corpus, config.model.context, samples))).to(corpus.held_out.dtype)
    return HeldOut(symbol=1 if symbol == 1 else 4, samples=found.numpy().tobytes())


def given_samples(manifest: Manifest) -> Tensor | None:
    """Return the run's own held-out samples, int64 [samples, context + 1]; None if it has none.

    Raises:
        ValueError: they are not tokens.
    """
    if manifest.held_out is UNSET:
        return None
    kind = torch.uint8 if manifest.held_out.symbol == 1 else torch.int32
    found = torch.frombuffer(bytearray(manifest.held_out.samples), dtype=kind)
    if found.min() < 0:
        raise ValueError("the held-out samples in the run's manifest are not tokens: its founder must start a new run")
    return found.view(-1, manifest.config.model.context + 1).long()


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    corpus: Corpus | None,
    context: int,
    samples: int,
    device: torch.device | str,
    given: Tensor | None = None,
) -> float:
    """Return the mean cross-entropy in nats per token over held-out windows.

    The windows are ``samples`` fixed ones of the corpus's held-out split, or ``given``, int64 [samples, context + 1].
    ``model`` must be on ``device``.

    Raises:
        CorpusError: the held-out split is shorter than one window.
    """
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    batches: Iterable[Tensor]
    if given is not None:
        batches = (given[at : at + BATCH] for at in range(0, len(given), BATCH))
    else:
        assert corpus is not None
        batches = held_out_batches(corpus, context, samples)
    for batch in batches:
        total += float(loss(model, batch.to(device))) * len(batch)
        count += len(batch)
    model.train(was_training)
    return total / count


# -- Text samples ------------------------------------------------------------------------------------------------------
# A short text by the global model, for people who watch a run.


# Bytes of held-out text in the prompt, and maximum bytes that the model adds.
GIVEN, WRITTEN = 48, 160
PIECE = 8
TEMPERATURE = 0.7
LONGEST_S = 1.0


def excerpt(model: nn.Module, corpus: Corpus, began: float) -> str:
    """Return the beginning of the held-out text and the model's continuation; empty if the model does not write bytes.

    ``began``: when the measurement of its loss began (``time.perf_counter``). The text takes no longer than that
    measurement, and about a second at most.
    """
    if corpus.held_out.dtype is not torch.uint8:
        return ""
    now = time.perf_counter()
    until = now + min(now - began, LONGEST_S)
    given = bytes(corpus.held_out[:GIVEN].tolist())
    text, was_training = given, model.training
    model.eval()
    with suppress(RuntimeError):  # NaN probabilities: the held-out loss reports them
        for piece in range(WRITTEN // PIECE):
            text = generate(model, text, PIECE, TEMPERATURE, seed=piece)
            if time.perf_counter() >= until:
                break
    model.train(was_training)
    return f"{given.decode('utf-8', 'replace')}│{text[len(given) :].decode('utf-8', 'replace')}"
