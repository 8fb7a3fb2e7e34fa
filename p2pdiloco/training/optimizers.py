"""Inner optimizers of the shipped script, by name, and its inner step.

torch's optimizers load its compiler, at their first step at the latest, to mark graph breaks. That takes a second and
40 MB at each learner's start. A learner compiles nothing, so this module calls the undecorated methods.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor, nn

from p2pdiloco.protocol.manifest import InnerConfig
from p2pdiloco.protocol.manifest_defaults import decay_share
from p2pdiloco.training.models import loss

# -- Muon --------------------------------------------------------------------------------------------------------------
# Muon: momentum, orthogonalized by five Newton-Schulz steps (Jordan et al., 2024), scaled to AdamW's update size (arXiv
# 2502.16982), so that AdamW's learning rate and weight decay can be used. As inner optimizer: MuLoCo (arXiv
# 2505.23725).
#
# ``torch.optim.Muon`` does the same for one matrix, but iterates in bfloat16 everywhere. On a CPU without bfloat16
# units, a step at width 256 took 27 s. This one uses the parameters' own type on the CPU, and takes stacks of matrices.


_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5
MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Muon for parameters [rows, columns] and [count, rows, columns]. The last two dimensions are one matrix each."""

    def __init__(
        self, parameters: Iterable[Tensor], *, lr: float = 0.0, weight_decay: float = 0.1, momentum: float = MOMENTUM
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step. ``closure`` is not used."""
        for group in self.param_groups:
            for stack in _stacks(p for p in group["params"] if p.grad is not None):
                self._step_together(stack, group["lr"], group["weight_decay"], group["momentum"])
        return None

    def _step_together(self, parameters: list[Tensor], lr: float, weight_decay: float, momentum: float) -> None:
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum"] for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_lerp_(buffers, gradients, 1.0 - momentum)
        updates = torch._foreach_lerp(gradients, buffers, momentum)
        if len(updates) > 1:
            matrices = orthogonalized(torch.cat([update.reshape(-1, *update.shape[-2:]) for update in updates]))
            found = [part.view_as(parameters[0]) for part in matrices.chunk(len(updates))]
        else:
            found = [orthogonalized(updates[0])]
        torch._foreach_mul_(parameters, 1.0 - lr * weight_decay)
        torch._foreach_add_(parameters, found, alpha=-0.2 * lr * float(max(parameters[0].shape[-2:])) ** 0.5)


_STACKED_ON_CPU, _STACKED_ON_GPU = 1 << 14, 1 << 24
"""Elements of the parameters that are computed together. Larger ones fill the caches of a CPU, or a GPU, alone."""


def _stacks(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters of one shape together, because small matrices take longer to start than to compute."""
    alike: dict[Any, list[Tensor]] = {}
    for p in parameters:
        alike.setdefault((p.shape, p.dtype, p.device), []).append(p)
    for group in alike.values():
        limit = _STACKED_ON_GPU if group[0].is_cuda else _STACKED_ON_CPU
        size = max(1, limit // max(1, group[0].numel()))
        yield from (group[at : at + size] for at in range(0, len(group), size))


def orthogonalized(x: Tensor) -> Tensor:
    """Return matrices [rows, columns] or [count, rows, columns] with their singular values moved close to 1.

    Where a matrix is at least twice as long as wide, its Gram matrix is iterated instead, with about half of the
    multiplications. That needs more digits than bfloat16 has.
    """
    dtype, is_tall = x.dtype, x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if x.is_cuda or 2 * x.shape[-2] > x.shape[-1]:
        x = x.bfloat16() if x.is_cuda else x
        for _ in range(_ROUNDS):
            x = _newton_schulz(x @ x.mT) @ x
    else:
        gram = x @ x.mT
        factor = product = _newton_schulz(gram)
        for _ in range(_ROUNDS - 1):
            gram = factor @ gram @ factor
            factor = _newton_schulz(gram)
            product = factor @ product
        x = product @ x
    return (x.mT if is_tall else x).to(dtype)


def _newton_schulz(gram: Tensor) -> Tensor:
    """Return the matrices that one step multiplies with, given the Gram matrices."""
    add_product = torch.addmm if gram.dim() == 2 else torch.baddbmm
    factor: Tensor = add_product(gram, gram, gram, beta=_B, alpha=_C)
    factor.diagonal(dim1=-2, dim2=-1).add_(_A)
    return factor


# -- Inner optimizers by name ------------------------------------------------------------------------------------------


# Ending of an output head's name: the built-in model's, and Hugging Face's ``lm_head``.
_HEAD = "head.weight"


def inner_optimizers(model: nn.Module, inner: InnerConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers that ``inner`` names, in the order in which they step. Matrices have weight decay, norms
    have none."""
    found: list[torch.optim.Optimizer] = []
    rest = [p for p in model.parameters() if p.requires_grad]
    if inner.optimizer == "muon":
        hidden = _hidden_matrices(model)
        taken = {id(p) for p in hidden}
        rest = [p for p in rest if id(p) not in taken]
        if hidden:
            found.append(Muon(hidden, lr=inner.learning_rate, weight_decay=inner.weight_decay))
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": inner.weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (inner.beta1, inner.beta2)
    return [*found, AdamW(groups, lr=inner.learning_rate, betas=betas, fused=True)]


_step = inspect.unwrap(torch.optim.AdamW.step)
for _method in vars(torch.optim.Optimizer).values():
    if (_beneath := getattr(_method, "__wrapped__", None)) is not None:
        _beneath.__dynamo_disable = _beneath  # torch's wrapper calls this attribute instead of making one


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with identical steps, but without its compiler."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make one step, as ``torch.optim.AdamW``."""
        return _step(self, closure)


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return all matrices except embeddings and the output head, whose rows are tokens."""
    tokens = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tokens |= {id(p) for name, p in model.named_parameters() if name.endswith(_HEAD)}
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in tokens]


# -- Learning-rate schedule --------------------------------------------------------------------------------------------
# Rules of this section:
# 1. Warm-up and decay follow the *global* step, so that learners of any speed decay together. The decay is linear.
# 2. With a token budget (warm-up, stable, decay), the rate falls with the tokens that the swarm has merged. Neither the
#    fastest learner nor the number of learners makes it fall sooner.
# 3. A learner that joins late has a fresh AdamW, whose first steps are the least reliable. It therefore also warms up
#    over its own first steps, but briefly.


# Longest warm-up over a learner's own steps. At a run's last learning rate it costs 0.2 % of the loss. A fresh AdamW
# without it costs 0.45 %, which is gone after 50 steps. The peak rate was not measured (benchmarks/notes.md).
_OWN_WARMUP = 20


def learning_rate(config: InnerConfig, global_step: int, own_steps: int, progress: float | None = None) -> float:
    """Return the learning rate of the step that follows ``global_step``.

    ``own_steps``: steps that this inner optimizer has made. ``progress``: part of the run that is over;
    None: by steps.
    """
    ramp = 1.0
    if config.warmup:
        own_warmup = min(config.warmup, _OWN_WARMUP)
        ramp = min(1.0, (global_step + 1) / config.warmup, (own_steps + 1) / own_warmup)
    left = (1.0 - (global_step / config.steps if progress is None else progress)) / decay_share(config)
    return config.learning_rate * ramp * max(config.final_share, min(1.0, left))


# -- Inner step --------------------------------------------------------------------------------------------------------
# One step of the inner optimizers. The shipped script makes it, and ``doctor`` measures it.


def inner_step(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    inner: InnerConfig,
    batch: Tensor,
    step: int,
    inner_steps: int,
    progress: float,
    report: Callable[[float], None] = lambda _: None,
) -> float:
    """Train on one batch, and return its loss in nats per token.

    Args:
        batch: int64 [samples, context + 1], on the model's device.
        step: the run's global step.
        inner_steps: steps that these optimizers have made.
        progress: part of the run that is over, 0 to 1.
        report: called with the loss before the optimizers step.

    Raises:
        RuntimeError: the loss is not finite, or the device has too little memory. The parameters are unchanged.
    """
    with torch.autocast("cuda", torch.bfloat16, enabled=batch.device.type == "cuda"):
        value = loss(model, batch)
    value.backward()  # type: ignore[no-untyped-call]
    if inner.clip:
        nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
    rate = learning_rate(inner, step, inner_steps, progress)
    for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        group["lr"] = rate
    measured = float(value.detach())
    if not math.isfinite(measured):
        raise RuntimeError(f"the loss is {measured} at step {step}: lower inner.learning_rate")
    report(measured)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return measured
