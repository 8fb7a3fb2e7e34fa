"""The inner optimizers of the built-in learner, by name.

Rules of this file:
1. torch's optimizers load its compiler, at their first step at the latest, to tell it where graphs break: a second and
   40 MB of each learner's start. A learner compiles nothing, so here the methods beneath are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from p2pdiloco.protocol.manifest import InnerConfig
from p2pdiloco.training.muon import Muon

_HEAD = "head.weight"
"""How the name of an output head ends: ours, and the ``lm_head`` of Hugging Face."""


def inner_optimizers(model: nn.Module, inner: InnerConfig) -> list[torch.optim.Optimizer]:
    """What ``inner`` names, in the order in which they step. Matrices decay, norms do not."""
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
        _beneath.__dynamo_disable = _beneath  # where torch's wrapper looks for what it calls


class AdamW(torch.optim.AdamW):
    """torch's, step for step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """See ``torch.optim.AdamW``."""
        return _step(self, closure)


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """All matrices but those whose rows are tokens: embeddings and the output head."""
    tokens = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tokens |= {id(p) for name, p in model.named_parameters() if name.endswith(_HEAD)}
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in tokens]
