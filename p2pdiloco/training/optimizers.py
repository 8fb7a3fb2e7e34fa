"""The inner optimizers of the built-in learner, by name."""

from __future__ import annotations

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
    return [*found, torch.optim.AdamW(groups, lr=inner.learning_rate, betas=betas, fused=True)]


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """All matrices but those whose rows are tokens: embeddings and the output head."""
    tokens = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tokens |= {id(p) for name, p in model.named_parameters() if name.endswith(_HEAD)}
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in tokens]
