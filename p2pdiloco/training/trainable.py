"""Which of a script's parameters travel, and under which names.

Rules of this file:
1. Those that require a gradient, in the model's own order; tied ones once.
2. Names are the bare model's. DDP, ``torch.compile`` and activation checkpointing put words into them, which would tell
   peers apart that train the same model, one on a laptop and one on eight GPUs.
"""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters.

    Raises:
        ValueError: the model is wrapped in FSDP's first version, whose parameters are not its own.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "FullyShardedDataParallel hides the model's parameters: use torch.distributed.fsdp.fully_shard"
        )
    return [(_bare(name), p) for name, p in _unwrapped(model).named_parameters() if p.requires_grad]


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All of them, by the bare model's names; tied ones once."""
    return {_bare(name): p for name, p in _unwrapped(model).named_parameters()}


def embedding_names(model: nn.Module) -> set[str]:
    """Names of the weights of all ``nn.Embedding``: they are merged by the direct mean (arXiv 2604.21428)."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return {name for name, p in trainable(model) if any(p is e for e in embeddings)}


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers that are modules of their own."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel | DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _bare(name: str) -> str:
    for word in _WRAPPERS:
        name = name.replace(word, "")
    return name
