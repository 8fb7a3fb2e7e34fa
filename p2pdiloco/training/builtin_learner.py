"""Built-in learner: the inner steps of a language model. Between steps, ``node_link`` does what the node asks for.

Rules of this file:
1. A step that fails, or whose loss is not finite, ends the learner before it can corrupt a snapshot. The learner sends
   ``Failed``, and the supervisor starts a new process from the global parameters.
2. Training never waits for data (``data_supply``).

The manifest names the inner optimizers (``optimizers``). A new process continues with their saved state on the peer's
disk (``optimizer_state``). Without one it warms up briefly.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

import msgspec
import torch
from msgspec import UNSET
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
# One step of the inner optimizer. The built-in learner makes it, and ``doctor`` measures it.


def inner_step(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    inner: InnerConfig,
    batch: Tensor,
    step: int,
    inner_steps: int,
    merged_tokens: int = 0,
) -> float:
    """Train on one batch, and return its loss in nats per token.

    Args:
        batch: int64 [samples, context + 1], on the model's device.
        step: the run's global step.
        inner_steps: steps that these optimizers have made.
        merged_tokens: tokens merged of the run's budget, if it has one.

    Raises:
        RuntimeError: the loss is not finite, or the device has too little memory. The parameters are unchanged.
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


# -- Built-in learner --------------------------------------------------------------------------------------------------


class Learner:
    """One life of a peer's learner.

    ``incarnation`` names that life and seeds the order of its data. Use the learner's whole ID, so that no two learners
    of a run see the same batches.
    """

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
                f"the data has symbol {largest}, but the model's vocabulary is {vocabulary(config.model)}: bytes need "
                "256, tokens as many as the tokenizer has"
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
        # A save was requested while the previous one was being written.
        self._is_save_due = False
        # Steps of the inner optimizer, including earlier lives.
        self._inner_steps = 0
        self._merged_tokens = 0
        # With the run's present end, which the learning rate follows.
        self._inner = config.inner
        self._restore()
        # None: torch's number of threads is not changed.
        self._threads = threads

    def run(self) -> None:
        """Serve the node and train, until ``Exit`` or the end of the connection.

        Raises:
            RuntimeError, ValueError: a step or a command failed. The node has been told.
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
        """Queue a block of data, after the blocks that were assigned before."""
        self._supply.assign(block)

    def merged(self, tokens: int) -> None:
        """Note the tokens merged of the run's budget, which the learning rate follows."""
        self._merged_tokens = max(self._merged_tokens, tokens)

    def move_end(self, last_step: int, tokens: int) -> None:
        """Note the run's end, which the learning rate follows."""
        self._inner = msgspec.structs.replace(self._config.inner, steps=last_step, tokens=tokens or UNSET)

    def begin_again(self) -> None:
        """Drop the assigned blocks, because the node that assigned them is lost."""
        self._supply.clear()

    def _restore(self) -> None:
        """Continue with the saved state of the inner optimizer, if there is one."""
        try:
            taken = None if self._keeper is None else self._keeper.read()
            if taken is not None:
                self._inner_steps = put(taken, self._optimizers, self._supply.windows)
        except InnerStateError as error:
            reason = f"the inner optimizer starts fresh, because its saved state cannot be used: {error}"
            self._link.tell(Trouble(reason=reason))

    def save(self) -> None:
        """Save the inner optimizer's state in the background."""
        if self._keeper is not None:
            self._is_save_due = self._keeper.is_busy
            if not self._is_save_due:
                self._keeper.keep(take(self._optimizers, self._supply.windows, self._inner_steps))

    def end(self) -> None:
        """Finish a save that was postponed, before the process ends."""
        if self._keeper is not None and self._is_save_due:
            self._keeper.join()
            self.save()

    def evaluate(self, theta: Tensor) -> float:
        """Return the held-out loss of the global parameters.

        The model shows them in place while it is measured. If the node applies new versions meanwhile, the loss is that
        of a mixture of neighbouring versions.
        """
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
            self._inner,
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
