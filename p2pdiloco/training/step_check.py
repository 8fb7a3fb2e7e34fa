"""Step check: whether a script's first steps change the synchronized parameters, and keep what other peers add to them.

An optimizer or a loop that keeps a copy of the parameters (float32 master weights) and writes it back undoes the
progress of the other peers. Well-known ones are refused by their names (``script_arguments.COPIES``); this file looks
for others. It reads a sample of the parameters, and never writes to them.

Rules of this file:
1. When other peers' progress was added (a *shift*), the next step's change is compared with it. What the gradient or
   the previous change explains is left out, so that an optimizer may pull parameters back.
2. Elements that return to the value before the shift, or to zero, do not count: masks, clamps and the like do that.
3. A copy is reported when TIMES shifts in a row were lost. Once SHIFTS shifts are compared, the check is over.
4. Results are read when the node asks for a snapshot, since each read waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Number of slices in the sample, and elements of each.
SLICES, LENGTH = 32, 128
# Number of shifts that are compared, and lost ones in a row that are reported.
SHIFTS, TIMES = 12, 3
# A shift counts as lost if its lost share is 1 but for NEAR and a standard error of at most ERROR, and SIGMAS of them
# above a half. Copies lose exactly all of it, optimizers at most a quarter, and constraints anything in between.
NEAR, ERROR, SIGMAS = 0.1, 0.25, 2.0
# Minimum number of elements for a conclusion.
FEWEST = 12
# Smallest share of a slice's shift (squared) that the gradient and the previous change must leave unexplained.
LEFT = 0.05
TINY = 1e-30
# Steps in the beginning without a change that are reported.
IDLE_STEPS = 2
# Maximum number of results that are kept unread.
UNREAD = 32

REPLACED = (
    "{why}: nothing that is trained here is merged. Replace or move parameters before DiLoCo is created, or close() it "
    "and create a new one afterwards"
)
OWN_COPY = (
    "the optimizer, or the loop around it, restores its own copy of the parameters, and so undoes the updates from "
    "other peers (the last {times} were lost): nothing that is trained here is merged. Float32 master weights do this. "
    "Use an optimizer without a copy, give DiLoCo the copy that is trained as its model, or give it on_update=, a "
    "function that changes the copies, too"
)
IDLE = (
    "{steps} optimizer steps changed no parameter of the model: nothing is merged until one does. Check that the loss "
    "is computed with the model that was given to DiLoCo, not with a copy of it"
)


class StepCheck:
    """Checks the first steps of a script.

    Call ``before`` when a step begins, ``after`` when it is complete, and ``rest`` after the node's work behind it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        named: Sequence[tuple[str, nn.Parameter]],
    ) -> None:
        """``named``: the synchronized parameters; empty: nothing is checked."""
        self._model = model
        self._named = named
        self._kept = [(p.device, p.shape) for _, p in named]
        # LBFGS tries many points in a step, and may take back a shift in a single one.
        able = [one for one in optimizers if not isinstance(one, torch.optim.LBFGS)]
        held = {id(p) for one in able for group in one.param_groups for p in group["params"]}
        self._places = _places([p for _, p in named if id(p) in held])
        self._shifts = self._lost = 0
        # Steps without a change, until the first change.
        self._idle_steps = 0.0
        # The sample before the last two steps, after the last one, and after the node's work behind it.
        self._older: Tensor | None = None
        self._newer: Tensor | None = None
        self._stepped: Tensor | None = None
        self._rested: Tensor | None = None
        # The change that the last step made, and the shift after it.
        self._step: Tensor | None = None
        self._shift: Tensor | None = None
        self._versions: list[int] = []
        # Of each step that was not read yet: whether it changed parameters, compared elements, share lost, its error.
        self._results: list[Tensor] = []

    def before(self) -> None:
        """Read what a step starts from, after everything that the loop does between steps."""
        if self._is_looking:
            self._older, self._newer = self._newer, self._read()

    def after(self) -> None:
        """Check the step that was made."""
        if self._rested is None or not self._is_looking:
            return
        now, versions = self._read(), self._versions
        self._versions = [p._version for _, p in self._named]
        # Fused optimizers, and those that write to p.data, do not change the version counter.
        is_new = (now != self._rested).any() if versions == self._versions else torch.ones((), device=now.device)
        self._results.append(torch.stack([is_new.to(now), *self._compare(now, self._rested)]))
        self._step, self._stepped = now - self._rested, now
        if len(self._results) == UNREAD:
            self._look()

    def rest(self) -> None:
        """Read the parameters after the node's work. Training continues with them."""
        self._shift, versions = None, self._versions
        if not self._is_looking:
            return
        self._versions = [p._version for _, p in self._named]
        if self._stepped is None or versions != self._versions:
            self._rested = self._read()
            self._shift = None if self._stepped is None else self._rested - self._stepped
        else:
            self._rested = self._stepped

    def on_parameters_set(self) -> None:
        """Accept that the parameters were set to other values on purpose."""
        self._stepped = self._step = self._newer = None
        self.rest()

    def problem(self) -> str:
        """Return why the learner's updates must not be merged; empty: they may."""
        self._look()
        if why := self.replaced():
            return REPLACED.format(why=why)
        if self._lost >= TIMES:
            return OWN_COPY.format(times=TIMES)
        return IDLE.format(steps=int(self._idle_steps)) if self._idle_steps >= IDLE_STEPS else ""

    def replaced(self) -> str:
        """Return which parameter cannot be followed any more, and why; empty: none. Other memory of the same kind
        (``p.data = ...``) is followed."""
        here = {id(p) for p in self._model.parameters()}
        for (name, p), (device, shape) in zip(self._named, self._kept, strict=True):
            if id(p) not in here:
                return f"parameter {name} was replaced in the model after DiLoCo was created"
            if p.device != device or p.shape != shape or not p.is_contiguous():
                return f"parameter {name} has another device, shape or memory layout than when DiLoCo was created"
        return ""

    # -- shifts and steps ----------------------------------------------------------------------------------------------

    @property
    def _is_looking(self) -> bool:
        is_open = self._shifts < SHIFTS or self._lost or self._idle_steps > 0
        return bool(self._places and is_open and self._lost < TIMES)

    def _read(self, *, is_gradient: bool = False) -> Tensor:
        """Return a copy of the sample or its gradient, [slices, elements], in float32 (float64 for such a model)."""
        parts = [(_gradient(p) if is_gradient else p.detach()).reshape(-1)[part] for p, part in self._places]
        values = torch.cat(parts).view(len(parts), -1)
        return values if values.dtype == torch.float64 else values.float()

    @torch.no_grad()
    def _compare(self, now: Tensor, before: Tensor) -> Sequence[Tensor]:
        """Compare the step from ``before`` to ``now`` with the shift: compared elements, share lost, and its error."""
        older, newer, shift, came = self._older, self._newer, self._shift, self._step
        if older is None or newer is None or shift is None or came is None:
            return [now.new_zeros(())] * 3
        is_free = (newer != older) & (newer != 0) & (now != self._stepped) & (now != 0)
        change, shift, gradient, came = (
            torch.where(is_free, one, 0.0) for one in (now - before, shift, self._read(is_gradient=True), came)
        )
        alone = _without(_without(shift, gradient), _without(came, gradient))
        alone = torch.where(_squares(alone) > LEFT * _squares(shift), alone, 0.0)
        size = alone.square().sum().clamp(min=TINY)
        share = -(change * alone).sum() / size
        error = ((change + share * alone) * alone).square().sum().sqrt() / size
        return (alone != 0).sum().to(now), share, error

    def _look(self) -> None:
        """Read the results, which waits for the device."""
        results, self._results = self._results, []
        for is_new, elements, share, error in torch.stack(results).tolist() if results else ():
            self._idle_steps = -math.inf if is_new else self._idle_steps + 1
            if elements >= FEWEST and error < ERROR and self._lost < TIMES:
                self._shifts += 1
                is_lost = abs(share - 1.0) < NEAR + error and share - SIGMAS * error > 0.5
                self._lost = self._lost + 1 if is_lost else 0


def _places(parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, slice]]:
    """Select at most SLICES slices of one length, spread evenly over the parameters on the first one's device."""
    able = [p for p in parameters if p.device == parameters[0].device]
    length = min(LENGTH, max((p.numel() for p in able), default=0))
    able = [p for p in able if p.numel() >= length]
    able = able[:: -(-len(able) // SLICES)] if able else []
    places = []
    for p in able:
        part = p.numel() // min(SLICES // len(able), p.numel() // length)
        places += [(p, slice(at, at + length)) for at in range((part - length) // 2, p.numel() - length + 1, part)]
    return places


def _gradient(p: nn.Parameter) -> Tensor:
    """Return the gradient; 0 if there is none, or a sparse one."""
    is_dense = p.grad is not None and p.grad.layout is torch.strided
    return p.grad if is_dense and p.grad is not None else p.detach().new_zeros(1).expand(p.numel())


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(1, keepdim=True)


def _without(rows: Tensor, others: Tensor) -> Tensor:
    """Return ``rows`` without their parts along ``others``, row by row."""
    return rows - (rows * others).sum(1, keepdim=True) / _squares(others).clamp(min=TINY) * others
