"""Counts steps and tokens of a script's optimizer.

Rules of this file:
1. Tokens add up until the optimizer steps: micro-batches of a gradient accumulation are one step.
2. A step that a ``torch.amp.GradScaler`` skips (gradients that are not finite) trains nothing: no step, and what was
   counted for it is dropped. Fused optimizers skip inside their kernel (``found_inf``), the others are not even called,
   which only whoever has the scaler can see.
3. A loss that is a tensor is read once a second at most: reading one makes the thread wait for its GPU.
4. A loss that is not finite is told once; a step that the scaler skipped tells none.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

log = logging.getLogger("p2pdiloco")

LOOK_S = 1.0
LOOK_STEPS = 32
OTHER_STEPS = 50
"""Of another optimizer, without one of ours in between: they are no part of one step, as a GAN's two are."""


class StepCounter:
    """Counts for the steps of ``optimizer``; each is ``tokens_per_step`` if nothing else is counted."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, tokens_per_step: int
    ) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._tokens_per_step = tokens_per_step
        self._counted: int | None = None
        self._given: float | Tensor | None = None
        self._loss: float | None = None
        self._looked_at = -math.inf
        self._took = False
        self._is_idle = True
        self._places: list[tuple[Tensor, int]] = []
        """Of the first and the last parameter, where its values lie."""
        self._other_steps = 0
        """Of other optimizers with parameters of ours, since its last one."""
        self._hook: Any = None
        self._steps = 0
        self._trained = 0
        """Parameters that the optimizer trained in the beginning."""

    def begin(self, parameters: Sequence[Tensor] = ()) -> None:
        """Watch the scaler, if there is one, and other optimizers from now on; and that ``parameters`` stay where they
        are."""
        self._places = [(p, p.data_ptr()) for p in (*parameters[:1], *parameters[-1:])]
        self._other_steps = 0
        self._steps, self._trained = 0, self._count_trained()
        self._hook = register_optimizer_step_post_hook(self._on_any_step)
        if self._scaler is None:
            return
        scaler, step = self._scaler, self._scaler.step

        def watched(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._took = False
            result = step(optimizer, *args, **kwargs)
            is_ours = getattr(optimizer, "optimizer", optimizer) is self._optimizer
            if is_ours and not self._took:
                self._counted = None
            return result

        scaler.step = watched  # type: ignore[method-assign]

    def end(self) -> None:
        """Leave the scaler as it was; say so if nothing was trained."""
        if self._is_idle:
            log.warning(
                "the optimizer that p2pdiloco.DiLoCo was given has made no step: unless the run was over, call its "
                "step() in the with block, and give DiLoCo the optimizer that steps"
            )
        if self._scaler is not None:
            del self._scaler.step
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _on_any_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is self._optimizer or self._other_steps > OTHER_STEPS:
            return
        ours = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            self._other_steps += 1
            if self._other_steps > OTHER_STEPS:
                log.warning(
                    "another optimizer than the one that p2pdiloco.DiLoCo was given steps the model's parameters, and "
                    "nothing of that is merged: close() it, and make it anew with that optimizer"
                )

    def count(self, tokens: int, loss: float | Tensor | None) -> None:
        """``tokens`` more for the step under way, at this ``loss`` (a scalar)."""
        self._counted = (self._counted or 0) + tokens
        if loss is not None:
            self.report(loss)

    def report(self, loss: float | Tensor) -> None:
        """The latest loss, a scalar."""
        self._given = loss.detach() if isinstance(loss, Tensor) else loss

    def take(self) -> tuple[int, float | None, bool]:
        """The optimizer has stepped: tokens, the latest loss that is known, and whether it was a step at all.

        Raises:
            RuntimeError: the parameters are not where they were: what is trained now reaches nobody.
        """
        self._took, self._is_idle, self._other_steps = True, False, 0
        if any(p.data_ptr() != place for p, place in self._places):
            raise RuntimeError(
                "the model's parameters have other memory than p2pdiloco.DiLoCo began with (model.to(), "
                "load_state_dict(assign=True), p.data = ...): do that before, or close() it and make it anew after"
            )
        self._steps += 1
        if self._steps % LOOK_STEPS == 0 and self._trained != (trained := self._count_trained()):
            self._trained = trained
            log.warning(
                "other parameters are trained than p2pdiloco.DiLoCo began with (requires_grad, add_param_group): what "
                "was not trained then does not travel: close() it and make it anew, at all peers alike"
            )
        tokens, self._counted = self._tokens_per_step if self._counted is None else self._counted, None
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            self._given = None
            return 0, self._loss, False
        return tokens, self._look(), True

    def _count_trained(self) -> int:
        return sum(p.requires_grad for group in self._optimizer.param_groups for p in group["params"])

    def _look(self) -> float | None:
        given, now = self._given, time.monotonic()
        if given is not None and (not isinstance(given, Tensor) or now - self._looked_at >= LOOK_S):
            self._looked_at, self._given = now, None
            value = float(given)
            if not math.isfinite(value):
                return value
            self._loss = value
        return self._loss
