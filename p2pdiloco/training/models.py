"""The models that a run's TOML can name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from p2pdiloco.protocol.manifest import ModelConfig, TensorSpec
from p2pdiloco.training.huggingface import build_huggingface
from p2pdiloco.training.transformer import Transformer, build_model

NO_BASE = "--model is for runs that train adapters (LoRA); this run's model travels: leave it out"


def build(
    config: ModelConfig, seed: int, tensors: Sequence[TensorSpec] | None = None, base: str | None = None
) -> nn.Module:
    """A float32 model on the CPU, initialised from ``seed``; ``tensors``: what the manifest says it has; ``base``: the
    folder with the weights that adapters are for.

    Raises:
        ValueError: it cannot be built here; the message says what to do.
    """
    if base is not None and config.lora is None:
        raise ValueError(NO_BASE)
    if config.kind == "huggingface":
        return build_huggingface(config, seed, tensors, base)
    return build_model(config, seed, tensors)


def outline(config: ModelConfig) -> nn.Module:
    """The model's tensors without memory for them (on torch's "meta" device).

    Raises:
        ValueError: it cannot be built here; the message says what to do.
    """
    with torch.device("meta"):
        return build_huggingface(config, 0) if config.kind == "huggingface" else Transformer(config)


def vocabulary(config: ModelConfig) -> int:
    """Symbols that the model knows."""
    return int(config.config["vocab_size"]) if config.kind == "huggingface" else config.vocabulary
