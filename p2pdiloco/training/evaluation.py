"""Held-out loss: one number that every peer with the same files would measure for the same parameters."""

from __future__ import annotations

import torch
from torch import nn

from p2pdiloco.training.corpus import held_out_batches
from p2pdiloco.training.corpus_files import Corpus
from p2pdiloco.training.transformer import loss


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, context: int, samples: int, device: torch.device | str) -> float:
    """Mean cross-entropy in nats a token over ``samples`` fixed held-out windows; ``model`` must be on ``device``.

    Raises:
        CorpusError: the held-out split is shorter than one window.
    """
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for batch in held_out_batches(corpus, context, samples):
        total += float(loss(model, batch.to(device))) * len(batch)
        count += len(batch)
    model.train(was_training)
    return total / count
