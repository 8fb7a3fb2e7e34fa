"""One step of the inner optimizer, as the built-in learner makes it and ``doctor`` measures it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from p2pdiloco.protocol.manifest import InnerConfig
from p2pdiloco.training.schedule import learning_rate
from p2pdiloco.training.transformer import loss


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
