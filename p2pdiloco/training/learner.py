"""The learner: inner steps, and at each step's boundary whatever the node asked for meanwhile.

Rules of this file:
1. Training never waits for the node. Commands are read without waiting, at step boundaries only, and executed in order;
   answers that the socket does not take stay queued (``channel.py``).
2. The global step grows by 1 with each inner step and by ``AdoptStep``; at ``inner.steps`` training ends by itself.
   A learner that does not train (before the first ``Load``, paused, done) sleeps on the socket and answers commands.
3. ``steps`` and ``tokens`` only grow: a ``Load`` replaces parameters, not history.
4. A step that fails, or whose loss is not finite, ends the learner before it can spoil a snapshot: ``Failed``, and the
   supervisor starts a new life from the global parameters.
5. When the socket ends, the node is dead. The learner goes on training for a while: the node's next life finds it
   (``reunion``) and gets all progress since then, on top of the parameters that the swarm has by now. To the swarm that
   is a new learner, whose counters begin at the loss. Whoever is not found ends.

The inner optimizer is AdamW (DiLoCo, arXiv 2311.08105); matrices decay, norms do not. A new life goes on with the state
on the peer's disk (``inner_state``); without one it warms up briefly.
"""

from __future__ import annotations

import copy
import math
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import assert_never

import torch
from torch import Tensor, nn

from p2pdiloco.protocol.blocks import Block
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.training.channel import Channel
from p2pdiloco.training.corpus import Batches, Blocks, Corpus, data_digest
from p2pdiloco.training.evaluation import held_out_loss
from p2pdiloco.training.inner_state import InnerStateError, Keeper, put, take
from p2pdiloco.training.parameters import FlatParameters
from p2pdiloco.training.reunion import Reunion
from p2pdiloco.training.schedule import learning_rate
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.training.transformer import build_model, loss
from p2pdiloco.wire.link import (
    AdoptStep,
    BlockFinished,
    Evaluate,
    Evaluated,
    Exit,
    Failed,
    FromNode,
    Load,
    Pause,
    Paused,
    Progress,
    Ready,
    Save,
    Shift,
    Shifted,
    Snapshot,
    Snapshotted,
    Train,
    Trouble,
)

_LOOK_S = 0.05
_FAREWELL_S = 2.0
"""How long a failing learner tries to say why."""


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
        keeper: Keeper | None = None,
        reunion: Reunion | None = None,
    ) -> None:
        """
        Raises:
            ValueError: the model is not the manifest's, or the corpus has symbols beyond its vocabulary.
            RuntimeError: the device does not exist or has too little memory.
        """
        config = manifest.config
        largest = int(max(corpus.train.max(), corpus.held_out.max()))
        if largest >= config.model.vocabulary:
            raise ValueError(
                f"the data has byte {largest}, model.vocabulary is {config.model.vocabulary}: bytes need 256"
            )
        self._config = config
        self._manifest = manifest
        self._layout = layout
        self._device = torch.device(device)
        self._vectors = vectors
        self._channel = Channel(connection)
        self._corpus = corpus
        self._batches = Batches(corpus, config.model.context, config.inner.batch, f"{manifest.run}/{incarnation}")
        """Random samples, when there is no block."""
        self._data: Blocks | None = None
        if manifest.blocks.number and data_digest(corpus) == manifest.blocks.data:
            context, batch = config.model.context, config.inner.batch
            self._data = Blocks(corpus, context, batch, manifest.blocks, manifest.run)
        self._assigned: deque[Block] = deque()
        self._block: Block | None = None
        """In training; of it the batches that are left, and how many."""
        self._in_block: Iterator[Tensor] = iter(())
        self._left = 0
        self._model = build_model(config.model, config.seed).to(self._device)
        self._flat = FlatParameters(self._model, manifest.tensors, layout)
        self._optimizer = _adamw(self._model, manifest)
        self._reunion = reunion
        self._anchor: Tensor | None = None
        """Parameters at the loss of the node, until another has given those of the swarm."""
        self._keeper = keeper
        self._is_save_due = False
        """It was asked for while the last one was being written."""
        self._inner_steps = 0
        """Steps of the inner optimizer, earlier lives included."""
        self._restore()
        self._judge: tuple[nn.Module, FlatParameters] | None = None
        self._is_training = False
        self._global_step = 0
        self._steps = 0
        self._tokens = 0
        self._exchange_s = 0.0

    def run(self) -> None:
        """Serve and train until ``Exit`` or the end of the socket.

        Raises:
            RuntimeError, ValueError: a step or a command failed; the node was told.
        """
        self._greet()
        try:
            while self._serve():
                if self._is_training and self._global_step >= self._config.inner.steps:
                    self._stop()
                if self._is_training:
                    self._step()
        except (RuntimeError, ValueError) as error:
            self._channel.post(Failed(reason=str(error)[:2000] or type(error).__name__))
            self._channel.flush(_FAREWELL_S)
            raise

    def _greet(self) -> None:
        self._channel.post(
            Ready(
                device=str(self._device),
                parameters=self._layout.elements,
                inner_steps=self._inner_steps,
                has_blocks=self._data is not None,
            )
        )

    # ------------------------------------------------------------------------------------------------- the boundary

    def _serve(self) -> bool:
        """Execute what the node asked for; wait for it only when not training. False when the learner is to end."""
        if self._reunion is not None and self._reunion.is_open:
            return self._look_out(self._reunion)
        if not self._is_training:
            self._channel.wait()
        if self._keeper is not None and self._keeper.trouble:
            self._channel.post(Trouble(reason=self._keeper.trouble))
            self._keeper.trouble = ""
        commands = self._channel.exchange()
        if not self._is_training:
            self._channel.blocked_s = 0.0
        if self._channel.is_closed:
            return self._lost_node()
        for command in commands:
            if isinstance(command, Exit):
                self._channel.flush(_FAREWELL_S)
                if self._keeper is not None and self._is_save_due:
                    self._keeper.join()
                    self._save()
                return False
            self._execute(command)
        return True

    def _lost_node(self) -> bool:
        """Begin another life by itself; False if there is nothing to wait for."""
        if self._reunion is None or not self._is_training or not self._reunion.open():
            return False
        if self._anchor is None:
            self._anchor = torch.empty(self._layout.elements)
            self._flat.copy_to(self._anchor, self._flat.everything)
            self._steps = self._tokens = 0
        self._assigned.clear()
        self._block = None
        return True

    def _look_out(self, reunion: Reunion) -> bool:
        """Is the node's next life there? False when it is too late for that."""
        found = reunion.poll()
        if found is not None:
            vectors, self._vectors = self._vectors, SharedVectors.attach(found.memory_fd, self._layout.elements)
            vectors.close()
            self._channel = Channel(found.connection)
            self._greet()
            if not self._is_training:
                self._channel.post(Paused(steps=self._steps, tokens=self._tokens))
        elif not self._is_training:
            time.sleep(_LOOK_S)
        return not reunion.is_open or not reunion.is_over

    def _execute(self, command: FromNode) -> None:
        match command:
            case Load() | Shift() | Snapshot():
                began = time.perf_counter()
                self._copy(command)
                self._exchange_s += time.perf_counter() - began
            case AdoptStep(step=step):
                self._global_step = max(self._global_step, step)
            case Evaluate(version=version):
                self._channel.post(Evaluated(version=version, loss=self._judge_theta()))
            case Pause():
                self._stop()
            case Train(block=block):
                self._assigned.append(block)
            case Save():
                self._save()
            case Exit():
                pass
            case _:
                assert_never(command)

    def _copy(self, command: Load | Shift | Snapshot) -> None:
        match command:
            case Load(step=step):
                if self._anchor is None:
                    self._flat.copy_from(self._vectors.shift, self._flat.everything)
                else:
                    self._flat.add_from(self._anchor.neg_().add_(self._vectors.shift), self._flat.everything)
                    self._anchor = None
                self._global_step = step
                self._is_training = True
                self._channel.post(Shifted(shards=self._flat.everything))
            case Shift(shards=shards, replace=replace):
                if replace:
                    self._flat.copy_from(self._vectors.shift, shards)
                else:
                    self._flat.add_from(self._vectors.shift, shards)
                self._channel.post(Shifted(shards=shards))
            case Snapshot(fragment=fragment, step=step):
                self._flat.copy_to(self._vectors.snapshot, self._flat.of_fragment(fragment))
                self._channel.post(
                    Snapshotted(fragment=fragment, step=step, steps=self._steps, tokens=self._tokens),
                )
            case _:
                assert_never(command)

    def _stop(self) -> None:
        if self._is_training:
            self._save()
        self._is_training = False
        self._channel.post(Paused(steps=self._steps, tokens=self._tokens))

    def _restore(self) -> None:
        """Go on with the inner optimizer's state on the disk, if there is one."""
        try:
            taken = None if self._keeper is None else self._keeper.read()
            if taken is not None:
                self._inner_steps = put(taken, self._optimizer, self._batches)
        except InnerStateError as error:
            reason = f"the inner optimizer starts fresh, its state on the disk is not used: {error}"
            self._channel.post(Trouble(reason=reason))

    def _save(self) -> None:
        """Copy the inner optimizer's state, and have it written."""
        if self._keeper is None:
            return
        self._is_save_due = self._keeper.is_busy
        if not self._is_save_due:
            began = time.perf_counter()
            self._keeper.keep(take(self._optimizer, self._batches, self._inner_steps))
            self._exchange_s += time.perf_counter() - began

    def _judge_theta(self) -> float:
        """Held-out loss of the global parameters, with a second model that is made at the first call."""
        if self._judge is None:
            model = copy.deepcopy(self._model).requires_grad_(False)
            self._judge = model, FlatParameters(model, self._manifest.tensors, self._layout)
        model, flat = self._judge
        flat.copy_from(self._vectors.theta, flat.everything)
        config = self._config
        return held_out_loss(model, self._corpus, config.model.context, config.evaluation.samples, self._device)

    # ----------------------------------------------------------------------------------------------------- the step

    def _step(self) -> None:
        began = time.perf_counter()
        inner = self._config.inner
        batch = self._next_batch().to(self._device)
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda"):
            value = loss(self._model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        if inner.clip:
            nn.utils.clip_grad_norm_(self._model.parameters(), inner.clip)
        rate = learning_rate(inner, self._global_step, self._inner_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        measured = float(value.detach())
        if not math.isfinite(measured):
            raise RuntimeError(f"the loss is {measured} at step {self._global_step}: lower inner.learning_rate")
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        self._inner_steps += 1
        self._tokens += batch.shape[0] * (batch.shape[1] - 1)
        self._global_step += 1
        self._trained_batch()
        self._report(measured, time.perf_counter() - began)

    def _next_batch(self) -> Tensor:
        """Of the block in hand, of the next one, or random windows: training never waits for data."""
        if self._block is None and self._assigned and self._data is not None:
            self._block = self._assigned.popleft()
            self._in_block = self._data.batches(self._block)
            self._left = self._manifest.blocks.samples // self._config.inner.batch
        return next(self._batches if self._block is None else self._in_block)

    def _trained_batch(self) -> None:
        """One batch less of the block in training."""
        self._left -= 1
        if self._block is not None and self._left == 0:
            self._channel.post(BlockFinished(block=self._block, tokens=self._tokens))
            self._block = None

    def _report(self, measured: float, step_time_s: float) -> None:
        progress = Progress(
            steps=self._steps,
            tokens=self._tokens,
            loss=measured,
            step_time_s=step_time_s,
            blocked_s=self._channel.blocked_s,
            exchange_s=self._exchange_s,
        )
        if self._channel.post(progress):
            self._channel.blocked_s = self._exchange_s = 0.0


def _adamw(model: nn.Module, manifest: Manifest) -> torch.optim.AdamW:
    inner = manifest.config.inner
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": inner.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=inner.learning_rate, betas=(inner.beta1, inner.beta2), fused=True)
