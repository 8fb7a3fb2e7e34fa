"""Training task of every system: the same small transformer, data, inner optimizer and step time.

1. Worker i of any system sees the same batches in the same order and starts with the same parameters.
2. A system is everything else: ``System``. It is asked for the parameters that it would publish as its global model.
   These and the worker's own are evaluated after the end, and the better of the two counts.
3. Imports only what the baselines' environments have (torch, msgspec, psutil).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.wan.pace import Pace
from p2pdiloco.protocol.manifest import DataConfig, ModelConfig
from p2pdiloco.training.corpus import Batches, load_corpus
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.evaluation import held_out_loss
from p2pdiloco.training.models import build_model, loss

MODEL = ModelConfig(width=256, depth=4, heads=4, context=64)
PARAMETERS = 3_344_640
BATCH = 4
"""Windows of a worker's step, unless it is told another number."""
LEARNING_RATE = 2e-3
WARMUP = 24
CORPUS_BYTES = 8 << 20
DATA_PARALLEL = ("ddp", "ddp-bf16")
"""Systems whose workers wait for each other in each backward pass."""
SAMPLES = 64
"""Held-out windows of an evaluation."""
Snapshot = tuple[float, int, list[Tensor]]
"""Seconds since the start, steps of this worker, parameters."""


class System(Protocol):
    """How workers train together. Made with the model and its inner optimizer; then, in this order:"""

    def connect(self, message: dict[str, Any]) -> None:
        """Join the others; ``message`` has what worker 0 said of itself."""

    def global_parameters(self) -> list[Tensor]:
        """Copies of what it would publish now."""

    def close(self) -> None:
        """No more steps."""


class Task:
    """One worker's training, before any system has touched it."""

    def __init__(self, index: int, step_s: float, batch: int = BATCH) -> None:
        torch.set_num_threads(1)
        self.batch = batch
        self.tokens = step_tokens(batch)
        self.corpus = load_corpus(DataConfig(), max_bytes=CORPUS_BYTES, context=MODEL.context)
        self.model = build_model(MODEL, seed=0)
        self.batches = batches(self.corpus, index, batch)
        self.optimizer = inner_optimizer(self.model)
        self.pace = Pace([self.model.embedding, *self.model.blocks, self.model.head], step_s)  # type: ignore[list-item, misc]
        self.compute_end = 0.0
        self.optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.compute_end = self.pace.end()

    def step(self, model: nn.Module, number: int, step: Callable[[], Any]) -> tuple[float, float, float]:
        """One step with ``model`` (this one, perhaps wrapped) and ``step`` (the inner optimizer's, perhaps wrapped):
        when it began, when its compute ended, and the loss."""
        began = self.pace.begin()
        set_rate(self.optimizer, number)
        value = loss(model, next(self.batches))
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        step()
        self.optimizer.zero_grad()
        return began, self.compute_end, float(value.detach())


def step_tokens(batch: int = BATCH) -> int:
    """A worker's in one step."""
    return batch * MODEL.context


def batches(corpus: Corpus, index: int, batch: int) -> Batches:
    """Worker ``index``'s."""
    return Batches(corpus, MODEL.context, batch, f"wan/{index}")


def inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, number: int) -> None:
    """Linear warm-up, then constant: a run's loss at a step does not depend on its planned length."""
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * min(1.0, (number + 1) / WARMUP)


def copies(model: nn.Module) -> list[Tensor]:
    """Of the parameters, in order."""
    return [p.detach().clone() for p in model.parameters()]


def put(model: nn.Module, parameters: list[Tensor]) -> None:
    """Set the parameters."""
    with torch.no_grad():
        for mine, given in zip(model.parameters(), parameters, strict=True):
            mine.copy_(given)


class Judge:
    """Held-out loss of snapshots, on a model of its own: nobody's pace."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._model = build_model(MODEL, seed=0)

    def loss(self, parameters: list[Tensor]) -> float:
        """In nats a token."""
        put(self._model, parameters)
        return held_out_loss(self._model, self._corpus, MODEL.context, SAMPLES, "cpu")


def reference(steps: int, workers: int, batch: int, every: int, told: Callable[[int, float], None]) -> None:
    """Data parallel without a network: the loss of each ``every``-th step. Each batch is that of all workers together,
    which is what averaging their gradients amounts to."""
    torch.set_num_threads(2)
    corpus = load_corpus(DataConfig(), max_bytes=CORPUS_BYTES, context=MODEL.context)
    model, judge = build_model(MODEL, seed=0), Judge(corpus)
    optimizer = inner_optimizer(model)
    streams = [batches(corpus, i, batch) for i in range(workers)]
    for number in range(steps):
        set_rate(optimizer, number)
        loss(model, torch.cat([next(stream) for stream in streams])).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (number + 1) % every == 0:
            told(number + 1, judge.loss(copies(model)))


def now() -> float:
    """One clock for all processes of the machine."""
    return time.monotonic()
