"""Step counter: counts the steps and tokens of a script's optimizers.

Rules of this file:
1. A step is complete when each of the given optimizers has stepped since the last one, in any order. Tokens add up
   until then: micro-batches of a gradient accumulation are one step.
2. A step that a ``torch.amp.GradScaler`` skips (gradients that are not finite) trains nothing. It does not count, and
   its tokens are dropped. Fused optimizers skip inside their kernel (``found_inf``). Others are not called at all,
   which only the scaler shows.
3. A loss that is a tensor is read at most once a second, because reading it makes the thread wait for its GPU.
4. A loss that is not finite is reported once. A step that the scaler skipped reports none.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

log = logging.getLogger("p2pdiloco")

LOOK_S = 1.0
LOOK_STEPS = 32
# Steps of optimizers that are too many to be parts of one step, as those of a GAN are.
OTHER_STEPS = 50
# Number of steps within which each optimizer of the script should have stepped.
COVERED_STEPS = 32
MOST_NAMED = 3
OTHERS = (
    "the {missing} that p2pdiloco.DiLoCo was given has made no step, but other optimizers of the model have made "
    "{steps}: nothing is merged until it steps. close() DiLoCo, and create it again with the optimizers whose step() "
    "the loop calls"
)
UNTRAINED = (
    "no optimizer that stepped in the last {steps} steps holds {names} of the model's {number} trainable parameters: "
    "they are merged unchanged, which slows down their training on other peers. Give them to an optimizer, or freeze "
    "them (requires_grad_(False)) on all peers"
)
# Steps in a row without tokens that are more than a batch without labels.
UNCOUNTED_STEPS = 2
UNCOUNTED = (
    "the tokens of this script's steps are not known: nothing that is trained here is merged until they are. Give "
    "tokens_per_step, or call outer.count(tokens) before each optimizer.step()"
)


class StepCounter:
    """Counts the steps of ``optimizers``. A step has ``tokens_per_step`` tokens if nothing else is counted."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None,
        tokens_per_step: int,
        named: Sequence[tuple[str, nn.Parameter]] = (),
    ) -> None:
        """``named``: the synchronized parameters."""
        self._optimizers = optimizers
        self._scaler = scaler
        self._tokens_per_step = tokens_per_step
        self._named = named
        self._counted: int | None = None
        self._given: float | Tensor | None = None
        self._loss: float | None = None
        self._looked_at = -math.inf
        self._took = False
        self._is_idle = True
        # Optimizers that have stepped since the last complete step, by ``id``, and whether one skipped its step.
        self._stepped: set[int] = set()
        self._is_skipped = False
        # Steps in a row of which nobody counted the tokens.
        self._uncounted_steps = 0
        # Steps of optimizers of the model since the last complete step.
        self._other_steps = 0
        self._hook: Any = None
        self._steps = 0
        # Number of parameters that the optimizers trained in the beginning.
        self._trained = 0
        # Parameters of optimizers that have stepped, by ``id``.
        self._held: set[int] = set()

    def begin(self) -> None:
        """Begin to watch the scaler (if any) and other optimizers."""
        self._other_steps = self._uncounted_steps = 0
        self._steps, self._trained = 0, self._count_trained()
        self._stepped.clear()
        self._held = set().union(*map(_held_by, self._optimizers))
        self._hook = register_optimizer_step_post_hook(self._on_any_step)
        if self._scaler is None:
            return
        scaler, step = self._scaler, self._scaler.step

        def watched(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._took = False
            result = step(optimizer, *args, **kwargs)
            if self._is_ours(getattr(optimizer, "optimizer", optimizer)) and not self._took:
                self._counted = None
            return result

        scaler.step = watched  # type: ignore[method-assign]

    def end(self) -> None:
        """Restore the scaler. Warn if the optimizer made no step."""
        if self._is_idle:
            log.warning(
                "the optimizer that p2pdiloco.DiLoCo was given has made no step. Unless the run was over, call its "
                "step() inside the with block, and give DiLoCo the optimizer that steps"
            )
        if self._scaler is not None:
            del self._scaler.step
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(one is optimizer for one in self._optimizers)

    def _on_any_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._other_steps > OTHER_STEPS or self._is_ours(optimizer):
            return
        held = _held_by(optimizer)
        if not self._held.isdisjoint(held) or not held.isdisjoint(id(p) for _, p in self._named):
            self._held |= held
            self._note_incomplete()

    def _note_incomplete(self) -> None:
        self._other_steps += 1
        if self._other_steps == OTHER_STEPS + 1:
            missing = next(one for one in self._optimizers if id(one) not in self._stepped)
            log.warning(OTHERS.format(missing=type(missing).__name__, steps=OTHER_STEPS))

    @property
    def is_between(self) -> bool:
        """True if no optimizer has stepped since the last complete step."""
        return not self._stepped

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note that one of the optimizers has stepped. Returns whether the step is complete; then ``take`` it."""
        self._took, self._is_idle = True, False
        found_inf = getattr(optimizer, "found_inf", None)
        self._is_skipped = self._is_skipped or (found_inf is not None and bool(found_inf))
        self._stepped.add(id(optimizer))
        if len(self._stepped) < len(self._optimizers):
            self._note_incomplete()
            return False
        self._stepped.clear()
        return True

    def count(self, tokens: int, loss: float | Tensor | None) -> None:
        """Add ``tokens`` to the present step, with its ``loss`` (a scalar)."""
        self._counted = (self._counted or 0) + tokens
        if loss is not None:
            self.report(loss)

    def report(self, loss: float | Tensor) -> None:
        """Set the latest loss, a scalar."""
        self._given = loss.detach() if isinstance(loss, Tensor) else loss

    def take(self) -> tuple[int, float | None, bool]:
        """Complete a step; return its tokens, the latest known loss, and whether it counts as a step."""
        self._other_steps = 0
        self._steps += 1
        if self._steps == COVERED_STEPS:
            self._tell_untrained()
        if self._steps % LOOK_STEPS == 0 and self._trained != (trained := self._count_trained()):
            self._trained = trained
            log.warning(
                "other parameters are trained than when p2pdiloco.DiLoCo began (requires_grad, add_param_group), and "
                "the new ones are not synchronized: close() it and create it again, at all peers"
            )
        tokens, self._counted = self._tokens_per_step if self._counted is None else self._counted, None
        is_skipped, self._is_skipped = self._is_skipped, False
        if is_skipped:
            self._given = None
            return 0, self._loss, False
        return tokens, self._look(), True

    def settle(self, tokens: int) -> None:
        """Note the tokens of a complete step, of all ranks together."""
        self._uncounted_steps = 0 if tokens else self._uncounted_steps + 1

    def problem(self) -> str:
        """Return why the updates must not be merged: their weight is not known. Empty: it is."""
        return UNCOUNTED if self._uncounted_steps >= UNCOUNTED_STEPS else ""

    def _count_trained(self) -> int:
        return sum(p.requires_grad for one in self._optimizers for group in one.param_groups for p in group["params"])

    def _tell_untrained(self) -> None:
        names = [name for name, parameter in self._named if id(parameter) not in self._held]
        if names:
            told = ", ".join(names[:MOST_NAMED])
            told += f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            log.warning(UNTRAINED.format(names=told, number=len(self._named), steps=COVERED_STEPS))

    def _look(self) -> float | None:
        given, now = self._given, time.monotonic()
        if given is not None and (not isinstance(given, Tensor) or now - self._looked_at >= LOOK_S):
            self._looked_at, self._given = now, None
            value = float(given)
            if not math.isfinite(value):
                return value
            self._loss = value
        return self._loss


def _held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
