"""The built-in learner: a language model's inner steps; between them ``outer_link`` does what the node asks for.

Rules of this file:
1. A step that fails, or whose loss is not finite, ends the learner before it can spoil a snapshot: ``Failed``, and the
   supervisor starts a new life from the global parameters.
2. Training never waits for data (``supply``).

The inner optimizers are those that the manifest names (``optimizers``). A new life goes on with their state on the
peer's disk (``inner_state``); without one it warms up briefly.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

import torch
from torch import Tensor, nn

from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.manifest import InnerConfig, Layout, Manifest
from p2pdiloco.training.data_supply import DataSupply
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.evaluation import given_samples, held_out_loss
from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.models import build, generate, loss, vocabulary
from p2pdiloco.training.node_link import NodeLink
from p2pdiloco.training.node_reconnect import Reunion
from p2pdiloco.training.optimizer_state import InnerStateError, Keeper, put, take
from p2pdiloco.training.optimizers import inner_optimizers, learning_rate
from p2pdiloco.training.parameters import FlatParameters, trainable
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.training.thread_tuning import ThreadChoice
from p2pdiloco.wire.learner_ipc import Trouble, Written

# -- Inner step --------------------------------------------------------------------------------------------------------
# One step of the inner optimizer, as the built-in learner makes it and ``doctor`` measures it.


def inner_step(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    inner: InnerConfig,
    batch: Tensor,
    step: int,
    inner_steps: int,
    merged_tokens: int = 0,
) -> float:
    """Train ``batch`` (samples, context + 1), which is on the model's device; its loss in nats a token. ``step``: the
    run's, ``inner_steps``: this optimizer's, ``merged_tokens``: of the run's budget, if it has one.

    Raises:
        RuntimeError: the loss is not finite, or the device has too little memory. The parameters are as they were.
    """
    with torch.autocast("cuda", torch.bfloat16, enabled=batch.device.type == "cuda"):
        value = loss(model, batch)
    value.backward()  # type: ignore[no-untyped-call]
    if inner.clip:
        nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
    rate = learning_rate(inner, step, inner_steps, merged_tokens)
    for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        group["lr"] = rate
    measured = float(value.detach())
    if not math.isfinite(measured):
        raise RuntimeError(f"the loss is {measured} at step {step}: lower inner.learning_rate")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return measured


# -- Text samples ------------------------------------------------------------------------------------------------------
# A short text by the global model, for people who watch a run become better at it.


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


# -- Built-in learner --------------------------------------------------------------------------------------------------
# The built-in learner: a language model's inner steps; between them ``outer_link`` does what the node asks for.


class Learner:
    """One life of one peer's learner. ``incarnation`` names that life (the learner's whole id is best): it seeds the
    order of the data, so that no two learners of a run see the same batches."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        layout: Layout,
        device: str | torch.device,
        vectors: SharedVectors,
        connection: socket.socket,
        corpus: Corpus,
        incarnation: str,
        base: str | None = None,
        keeper: Keeper | None = None,
        reunion: Reunion | None = None,
        threads: ThreadChoice | None = None,
    ) -> None:
        """
        Raises:
            ValueError: the model is not the manifest's, or the corpus has symbols beyond its vocabulary.
            RuntimeError: the device does not exist or has too little memory.
        """
        config = manifest.config
        self._given = given_samples(manifest)
        largest = int(max(corpus.train.max(), corpus.held_out.max(), 0 if self._given is None else self._given.max()))
        if largest >= vocabulary(config.model):
            raise ValueError(
                f"the data has symbol {largest}, the model's vocabulary is {vocabulary(config.model)}: bytes need 256, "
                "tokens as many as the tokenizer has"
            )
        self._config = config
        self._device = torch.device(device)
        self._corpus = corpus
        self._supply = DataSupply(manifest, corpus, incarnation)
        self._model = build(config.model, config.seed, manifest.tensors, base).to(self._device)
        self._flat = FlatParameters(trainable(self._model), manifest.tensors, layout)
        self._link = NodeLink(
            self, self._flat, vectors, Channel(connection), last_step=config.inner.steps, reunion=reunion
        )
        self._optimizers = inner_optimizers(self._model, config.inner)
        self._keeper = keeper
        self._is_save_due = False
        """It was asked for while the last one was being written."""
        self._inner_steps = 0
        """Steps of the inner optimizer, earlier lives included."""
        self._merged_tokens = 0
        self._restore()
        self._threads = threads
        """None: torch's threads stay as they are."""

    def run(self) -> None:
        """Serve and train until ``Exit`` or the end of the socket.

        Raises:
            RuntimeError, ValueError: a step or a command failed; the node was told.
        """
        link = self._link
        link.greet(device=str(self._device), inner_steps=self._inner_steps, has_blocks=self._supply.has_blocks)
        try:
            while True:
                if not link.is_training or link.is_resting:
                    link.wait()
                if self._keeper is not None and self._keeper.trouble:
                    link.tell(Trouble(reason=self._keeper.trouble))
                    self._keeper.trouble = ""
                if not link.boundary():
                    return
                if link.is_training and not link.is_resting:
                    self._step()
        except (RuntimeError, ValueError) as error:
            link.fail(str(error) or type(error).__name__)
            raise

    # ------------------------------------------------------------------------------------------------- for the node

    def train(self, block: Block) -> None:
        """This block of data is next but those given before."""
        self._supply.assign(block)

    def merged(self, tokens: int) -> None:
        """The rate follows."""
        self._merged_tokens = max(self._merged_tokens, tokens)

    def begin_again(self) -> None:
        """The node is lost, and with it the claim to what it had given."""
        self._supply.clear()

    def _restore(self) -> None:
        """Go on with the inner optimizer's state on the disk, if there is one."""
        try:
            taken = None if self._keeper is None else self._keeper.read()
            if taken is not None:
                self._inner_steps = put(taken, self._optimizers, self._supply.windows)
        except InnerStateError as error:
            told = f"the inner optimizer starts fresh, its state on the disk is not used: {error}"
            self._link.tell(Trouble(reason=told))

    def save(self) -> None:
        """Have the inner optimizer's state written."""
        if self._keeper is not None:
            self._is_save_due = self._keeper.is_busy
            if not self._is_save_due:
                self._keeper.keep(take(self._optimizers, self._supply.windows, self._inner_steps))

    def end(self) -> None:
        """A save that was put off is done before the process ends."""
        if self._keeper is not None and self._is_save_due:
            self._keeper.join()
            self.save()

    def evaluate(self, theta: Tensor) -> float:
        """Held-out loss of the global parameters, which the model looks at for as long as that takes. The node may take
        versions meanwhile: then it is that of neighbouring ones."""
        config = self._config
        with self._flat.showing(theta):
            began = time.perf_counter()
            found = held_out_loss(
                self._model, self._corpus, config.model.context, config.evaluation.samples, self._device, self._given
            )
            if config.model.kind == "transformer" and (text := excerpt(self._model, self._corpus, began)):
                self._link.tell(Written(text=text))
            return found

    # ----------------------------------------------------------------------------------------------------- the step

    def _step(self) -> None:
        began = time.perf_counter()
        batch = self._supply.next().to(self._device)
        measured = inner_step(
            self._model,
            self._optimizers,
            self._config.inner,
            batch,
            self._link.counts.global_step,
            self._inner_steps,
            self._merged_tokens,
        )
        self._inner_steps += 1
        took_s = time.perf_counter() - began
        if self._threads is not None and (number := self._threads.stepped(took_s)) is not None:
            torch.set_num_threads(number)
        self._link.stepped(batch.shape[0] * (batch.shape[1] - 1), measured, took_s)
        if (block := self._supply.trained()) is not None:
            self._link.block_finished(block)
