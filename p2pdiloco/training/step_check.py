"""Step check: verifies that a script's optimizer changes the synchronized parameters and starts from their present
values.

An optimizer that keeps a copy of the parameters (float32 master weights, Lookahead's slow weights) and writes it back
undoes the updates of other peers. To detect that, a known change, the *probe*, is added to a sample of the parameters
just before an optimizer step and removed just after. Its signs are random and drawn after the gradients were computed,
so nothing that the optimizer computes depends on them. An ordinary optimizer keeps the whole probe, except for its
weight decay. Master weights keep nothing, and Lookahead keeps the share ``alpha`` at each k-th step. Updates of other
peers are not a reliable probe, because a large learning rate may legitimately pull them back.

Rules of this file:
1. The model never runs with a probe in it: gradients are computed without it, and the script sees parameters without
   it.
2. Nothing is concluded from a single step, or from a result that chance produces once in a million.
3. Outside of steps the optimizer's parameters should not change. Code that puts them back there (Lookahead around the
   optimizer) shows as a change along the way that they had come.
4. Only WINDOW steps of every PERIOD are checked. On a GPU the results are read every few steps only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from p2pdiloco.training.parameters import OnUpdate

log = logging.getLogger("p2pdiloco")

WINDOW = 64
PERIOD = 1024
SLICES = 32
# Elements of a slice. The sample has at most SLICES slices.
LENGTH = 128
# Minimum number of elements for a conclusion.
FEWEST = 12
# Size of the probe, in steps of the optimizer.
SIZE = 8.0
# Largest probe that every parameter type can represent.
LARGEST = 1e3
# Minimum share of the probe that an ordinary optimizer keeps, apart from its weight decay.
KEPT = 0.9
# A share counts as below that only if it is so by this many standard errors.
SIGMAS = 6.0
# Share of a change outside of steps (squared) that must lie along the way that the parameters had come.
ALONG = 0.98
# A change that takes back more than this is a bound (clipped weights): a parameter pushed against it returns at once.
WHOLE = 0.95
# Number of observations needed for a conclusion.
TIMES = 2
# Steps on a GPU whose results are read together, since each read waits for the device. A divisor of WINDOW.
UNREAD = 8
# Steps in a row without a change that are reported, for an optimizer that made a change before.
IDLE_STEPS = 32
# Number of steps within which each optimizer of the script should have stepped.
COVERED_STEPS = 32
MOST_NAMED = 3

REPLACED = (
    "parameter {name} is no longer the tensor that was given to p2pdiloco.DiLoCo (it was replaced in the model, or by "
    "p.data = ...): nothing that is trained here is merged. Replace parameters before DiLoCo is created, or close() it "
    "and create a new one afterwards"
)
OWN_COPY = (
    "the optimizer, or the loop around it, restores its own copy of the parameters, and so undoes the updates from "
    "other peers ({lost:.0%} of a change was lost): nothing that is trained here is merged. Float32 master weights and "
    "Lookahead do this. Use an optimizer without a copy, give DiLoCo the copy that is trained as its model, or give it "
    "on_update=, a function that changes the copies, too"
)
IDLE = (
    "{steps} optimizer steps changed no parameter of the model: nothing is merged until one does. Check that the loss "
    "is computed with the model that was given to DiLoCo, not with a copy of it"
)
ELSEWHERE = (
    "the optimizer that was given to DiLoCo has not stepped, but {other} has, {steps} times, with parameters of the "
    "same model: nothing is merged until the given one steps. Give DiLoCo the optimizer whose step() the loop calls"
)
UNTRAINED = (
    "no optimizer that stepped in the last {steps} steps holds {names} of the model's {number} trainable parameters: "
    "they are merged unchanged, which slows down their training on other peers. Give them to an optimizer, or freeze "
    "them (requires_grad_(False)) on all peers"
)


class StepCheck:
    """Checks the steps of one optimizer.

    Call ``before`` and ``after`` around each step, and ``rest`` when everything that changes parameters between two
    steps is done.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, nn.Parameter]],
        on_update: OnUpdate | None = None,
    ) -> None:
        """``named``: the synchronized parameters; empty: nothing is checked. ``on_update``: changes copies of the
        parameters, as of the probe."""
        self._model = model
        self._on_update = on_update
        self._optimizer = optimizer
        self._named = named
        self._places = [parameter.data_ptr() for _, parameter in named]
        self._ids = {id(parameter) for _, parameter in named}
        # Parameters of optimizers that have stepped, by ``id``.
        self._held: set[int] = set()
        # Steps that other optimizers made with the synchronized parameters.
        self._steps_elsewhere = 0
        self._any_hook: Any = None
        self._note_optimizer(optimizer)
        self._slices = _slices([p for _, p in named if id(p) in self._held])
        # Size of the probe, by slice; None: no step was seen yet.
        self._sizes: Tensor | None = None
        device = torch.device("cpu") if self._slices is None else self._slices.device
        self._is_on_cuda = device.type == "cuda"
        self._signs = torch.Generator(device).manual_seed(0)
        self._steps = 0
        # Versions of the parameters at rest; empty: this step is not checked.
        self._versions: list[int] = []
        self._has_changed = False
        self._idle_steps = 0
        self._at_rest: Tensor | None = None
        # The sample after the last change outside of steps, or in the beginning.
        self._from: Tensor | None = None
        # The change that was added at the last step's boundary.
        self._came: Tensor | None = None
        self._stepped: Tensor | None = None
        self._before: Tensor | None = None
        # The probe that is in the parameters and must be removed.
        self._probe: Tensor | None = None
        # True if the optimizer calls its closure several times per step. It may put parameters back in between (LBFGS).
        self._is_repeating = False
        self._shares: list[Tensor] = []
        # The share that should have been kept, for each entry of ``_shares``.
        self._fewest: list[float] = []
        self._gaps: list[Tensor] = []
        # For each step that was not read yet: True if it changed no parameter.
        self._idle: list[bool | Tensor] = []
        # Lost shares of a change, of the steps that showed a loss.
        self._lost: list[float] = []

    def begin(self) -> None:
        """Begin to check. The parameters are the run's, and training begins."""
        if self._named:
            self._any_hook = register_optimizer_step_post_hook(self._note_optimizer)
        self.rest()

    # -- around a step -------------------------------------------------------------------------------------------------

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Prepare a step of the optimizer with these arguments. Returns arguments to use instead, or None."""
        self._take_off()  # a failed step left its probe in the parameters
        self._look_at_gap()
        if self._at_rest is None:
            return None
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": self._within(closure)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._within(args[1]), *args[2:]), dict(kwargs)
        self._put_on()
        return None

    def after(self) -> None:
        """Check the step that the optimizer has made."""
        before, probe = self._before, self._probe
        now = self._take_off()
        self._steps += 1
        if self._steps == COVERED_STEPS:
            self._stop_noting_optimizers()
            self._tell_untrained()
        if before is not None and probe is not None and now is not None:
            self._judge_step(now + probe - before, probe)
        self._look_at_versions(now)
        self._stepped = now
        if not self._is_on_cuda or self._steps % UNREAD == 0:
            self._read()  # waits for the device

    def rest(self) -> None:
        """Record the parameters between two steps, after everything that changes them there."""
        if not self._named or self._slices is None:
            return
        if self._steps % PERIOD >= WINDOW and not self._idle_steps:
            self._versions, self._at_rest, self._from = [], None, None
            return
        self._versions = [parameter._version for _, parameter in self._named]
        self._at_rest = self._slices.read()
        if self._from is None:
            self._from = self._at_rest
        self._came = None if self._stepped is None else self._at_rest - self._stepped

    def on_parameters_set(self) -> None:
        """Accept that the parameters were set to other values on purpose."""
        self._from = self._stepped = None
        self.rest()

    def end(self) -> None:
        """Stop checking, and remove a probe that is left."""
        self._take_off()
        self._at_rest = None
        self._stop_noting_optimizers()

    def problem(self) -> str:
        """Return why the learner's updates must not be merged; empty: they may."""
        self._read()
        here = {id(p) for p in self._model.parameters()}
        for (name, parameter), place in zip(self._named, self._places, strict=True):
            if id(parameter) not in here or parameter.data_ptr() != place:
                return REPLACED.format(name=name)
        if len(self._lost) >= TIMES:
            return OWN_COPY.format(lost=sum(self._lost) / len(self._lost))
        if self._idle_steps >= (IDLE_STEPS if self._has_changed else 2):
            return IDLE.format(steps=self._idle_steps)
        return ""

    # -- the probe -----------------------------------------------------------------------------------------------------

    def _within(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``closure``, which computes the gradients, with the probe added after it.

        The first step has no probe. It shows whether the closure is called once per step.
        """
        calls = 0

        def called() -> Any:
            nonlocal calls
            calls += 1
            self._is_repeating = self._is_repeating or calls > 1
            self._take_off()
            result = closure()
            if not self._is_repeating:
                self._put_on()
            return result

        return called

    @torch.no_grad()
    def _put_on(self) -> None:
        assert self._slices is not None
        self._before = before = self._slices.read()
        self._probe = torch.zeros_like(before)
        is_told = len(self._lost) >= TIMES  # an optimizer that goes back would keep what removes the probe
        if self._sizes is not None and not is_told:
            signs = torch.randint(0, 2, before.shape, generator=self._signs, device=before.device).mul_(2).sub_(1)
            self._slices.write(before + signs.to(before) * self._sizes)
            self._probe = self._slices.read() - before  # as rounded to the parameters' type
            self._tell_copies(self._probe)

    @torch.no_grad()
    def _take_off(self) -> Tensor | None:
        """Remove the probe; return the sample without it, or None if this step is not checked."""
        before, probe, self._before, self._probe = self._before, self._probe, None, None
        if self._slices is None or before is None or probe is None:
            return None
        now = self._slices.read()
        if self._sizes is not None:
            now = torch.where(now == before + probe, before, now - probe)  # restores unchanged values exactly
            self._slices.write(now)
            self._tell_copies(-probe)
        return now

    def _tell_copies(self, change: Tensor) -> None:
        """Tell the user's function what was added to the sample."""
        if self._on_update is not None and self._slices is not None:
            for parameter, full in self._slices.spread(change):
                self._on_update(parameter, full)

    @torch.no_grad()
    def _judge_step(self, change: Tensor, probe: Tensor) -> None:
        """Judge one step. ``change`` is the sample's change since before the probe was added."""
        is_on = probe != 0
        kept = torch.where(is_on, change / torch.where(is_on, probe, 1.0), 0.0)
        number = is_on.sum()
        mean = kept.sum() / number.clamp(min=1)
        self._shares.append(torch.stack([number.to(mean), mean, kept.square().sum()]))
        self._fewest.append(KEPT - max(map(_decay, self._optimizer.param_groups)))
        sizes = SIZE * (change - mean * probe).square().mean(1, keepdim=True).sqrt()
        last = torch.zeros_like(sizes) if self._sizes is None else self._sizes
        self._sizes = torch.where((sizes > 0.0) & (sizes < LARGEST), sizes, last)  # NaN keeps the last size

    @torch.no_grad()
    def _look_at_gap(self) -> None:
        """Record how the sample has changed since the last step's boundary."""
        rest, origin = self._at_rest, self._from
        if self._slices is None or rest is None or origin is None:
            return
        now = self._slices.read()
        if not self._is_on_cuda and torch.equal(now, rest):
            return
        change = now - rest
        came = torch.zeros_like(rest) if self._came is None else self._came
        sums = [(change != 0).sum().to(change), change.square().sum()]
        for way in (rest - origin, came):
            sums += [(change * way).sum(), way.square().sum()]
        self._gaps.append(torch.stack(sums))
        self._from = torch.where((change != 0).any(), now, origin)

    def _read(self) -> None:
        shares, fewest, gaps = self._shares, self._fewest, self._gaps
        idle, self._idle = self._idle, []
        self._shares, self._fewest, self._gaps = [], [], []
        if shares:
            for (number, mean, squares), least in zip(torch.stack(shares).tolist(), fewest, strict=True):
                if number >= FEWEST:
                    error = math.sqrt(max(0.0, squares / number - mean * mean) / number)
                    if mean + SIGMAS * error < least:
                        self._lost.append(min(1.0, 1.0 - mean))
        if gaps and self._slices is not None:
            for number, size, *ways in torch.stack(gaps).tolist():
                lost, lost_of_shift = _lost_along(size, *ways[:2]), _lost_along(size, *ways[2:])
                lost = max(lost if lost < WHOLE else 0.0, lost_of_shift)
                if number >= max(FEWEST, self._slices.elements / 2) and lost > 1.0 - KEPT:
                    self._lost.append(min(1.0, lost))
        for is_idle in idle:
            self._has_changed = self._has_changed or not is_idle
            self._idle_steps = self._idle_steps + 1 if is_idle else 0

    # -- trained parameters --------------------------------------------------------------------------------------------

    def _look_at_versions(self, now: Tensor | None) -> None:
        if not self._versions:
            return
        is_written = any(p._version != old for (_, p), old in zip(self._named, self._versions, strict=True))
        if is_written or now is None or self._at_rest is None:
            self._idle.append(not is_written)
        else:  # fused optimizers, and those that write to p.data, do not change the version counter
            self._idle.append((now == self._at_rest).all())

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._held |= held
        if optimizer is not self._optimizer and not self._steps and not self._ids.isdisjoint(held):
            self._steps_elsewhere += 1
            if self._steps_elsewhere == COVERED_STEPS:
                log.warning(ELSEWHERE.format(other=type(optimizer).__name__, steps=COVERED_STEPS))

    def _stop_noting_optimizers(self) -> None:
        if self._any_hook is not None:
            self._any_hook.remove()
            self._any_hook = None

    def _tell_untrained(self) -> None:
        names = [name for name, parameter in self._named if id(parameter) not in self._held]
        if names:
            told = ", ".join(names[:MOST_NAMED])
            told += f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            log.warning(UNTRAINED.format(names=told, number=len(self._named), steps=COVERED_STEPS))


class _Slices:
    """Slices of parameters, all of the same length, read and written as one tensor [slices, length]."""

    def __init__(self, views: Sequence[Tensor], places: Sequence[tuple[Tensor, int]]) -> None:
        """``places``: of each view, the parameter and the index of the first element."""
        self._views = views
        self._places = places
        self.device = views[0].device
        self.elements = sum(view.numel() for view in views)

    def read(self) -> Tensor:
        """Return a copy in float32 (float64 for float64 parameters)."""
        values = torch.cat(list(self._views)).view(len(self._views), -1)
        return values if values.dtype == torch.float64 else values.float()

    def write(self, values: Tensor) -> None:
        """Write values back, in the parameters' own type."""
        for view, row in zip(self._views, values, strict=True):
            view.copy_(row)

    def spread(self, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter, and a float32 tensor of its shape with the values of its slices, 0 elsewhere."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for (p, start), row in zip(self._places, values, strict=True):
            _, full = found.setdefault(id(p), (p, torch.zeros_like(p, dtype=torch.float32)))
            full.view(-1)[start : start + len(row)] = row
        return list(found.values())


def _slices(parameters: Iterable[Tensor]) -> _Slices | None:
    """Select at most SLICES slices, spread evenly over the parameters; None if there is nothing to check."""
    able = [p for p in parameters if p.numel() and p.is_floating_point() and p.is_contiguous()]
    able = [p for p in able if p.device == able[0].device]
    length = min(LENGTH, max((p.numel() for p in able), default=0))
    able = [p for p in able if p.numel() >= length]
    able = able[:: -(-len(able) // SLICES)] if able else []
    views, places = [], []
    for p in able:
        number = min(SLICES // len(able), p.numel() // length)
        part = p.numel() // number
        for start in (index * part + (part - length) // 2 for index in range(number)):
            views.append(p.data.view(-1)[start : start + length])
            places.append((p, start))
    return _Slices(views, places) if views else None


def _decay(group: Mapping[str, Any]) -> float:
    """Return the share of each parameter that weight decay removes in a step. A rate on a GPU counts as 0, so as not to
    wait for it."""
    rate = group.get("lr", 0.0)
    return 0.0 if getattr(rate, "is_cuda", False) else float(rate) * float(group.get("weight_decay") or 0.0)


def _lost_along(size: float, product: float, length: float) -> float:
    """Return how much of a way a change takes back; 0 if it does not lie along the way.

    ``size`` and ``length`` are the squared norms of change and way, ``product`` their inner product.
    """
    if length > 0.0 and product < 0.0 and product * product >= ALONG * size * length:
        return -product / length
    return 0.0
