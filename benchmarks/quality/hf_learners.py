"""Learners of a small Hugging Face model, whole or with adapters (LoRA); see ``fine_tuning``."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from benchmarks.quality.data import Stream, corpus
from benchmarks.quality.questions import LINE
from benchmarks.quality.settings import Setting, learning_rate
from p2pdiloco.protocol.manifest import Layout, TensorSpec
from p2pdiloco.training.models import loss
from p2pdiloco.training.parameters import FlatParameters

BASE = Path("out/quality/fine-tuning-base.pt")
BASE_STEPS, BASE_BATCH, BASE_RATE = 1500, 32, 3e-3
CONTEXT = 64


class Copies:
    """Learners of a model that cannot be stacked: they step one after the other, in one copy of the model."""

    def __init__(self, setting: Setting, model: nn.Module, k: int) -> None:
        self._setting = setting
        self.model = copy.deepcopy(model)
        """It shows the learner that stepped last."""
        self._shown = [p for p in self.model.parameters() if p.requires_grad]
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._own = [[nn.Parameter(p.detach().clone()) for p in self._shown] for _ in range(k)]
        self._optimizers = [adamw(setting, own) for own in self._own]
        self._steps = 0

    def flat(self, index: int, tensors: Sequence[TensorSpec], layout: Layout) -> FlatParameters:
        """Learner ``index``'s trainable parameters as the run's flat vector."""
        return FlatParameters(zip(self._names, self._own[index], strict=True), tensors, layout)

    def step(self, batch: Tensor, progress: int, global_step: int) -> Tensor:
        """See ``Stepping``. ``batch``: int64 [k, samples, context + 1]."""
        inner, losses = self._setting.inner_config, []
        rate = learning_rate(inner, global_step, self._steps, progress * self._setting.step_tokens)
        for own, optimizer, windows in zip(self._own, self._optimizers, batch, strict=True):
            for shown, p in zip(self._shown, own, strict=True):
                shown.data, shown.grad = p.data, None
            value = loss(self.model, windows)
            value.backward()  # type: ignore[no-untyped-call]
            for shown, p in zip(self._shown, own, strict=True):
                p.grad = shown.grad
            nn.utils.clip_grad_norm_(own, inner.clip)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            losses.append(value.detach())
        self._steps += 1
        return torch.stack(losses)

    def forget(self) -> None:
        """Begin with fresh inner optimizers."""
        self._optimizers, self._steps = [adamw(self._setting, own) for own in self._own], 0


def adamw(setting: Setting, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    inner = setting.inner_config
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=inner.learning_rate, betas=(inner.beta1, inner.beta2), fused=True)


def build(way: str, seed: int) -> nn.Module:
    """The base, with adapters drawn from ``seed`` if ``way`` is "lora"."""
    model = _base()
    if way == "whole":
        return model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        found: nn.Module = get_peft_model(model, adapters)
        return found


def _base() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = transformers.LlamaForCausalLM(config)
    if not BASE.exists():
        _train(model)
    model.load_state_dict(torch.load(BASE, weights_only=True))
    return model


def _train(model: nn.Module) -> None:
    """Train the base, and keep it."""
    setting = Setting(
        batch=BASE_BATCH, context=CONTEXT, learners=1, steps=BASE_STEPS, learning_rate=BASE_RATE, warmup=50, **LINE
    )
    learner = Copies(setting, model, 1)
    text = corpus().train
    stream = Stream(text, seed=0, batch=BASE_BATCH, context=CONTEXT, learners=1, first=0, k=1, is_parted=False)
    for step in range(BASE_STEPS):
        value = learner.step(stream.next(), step, step)
        if step % 100 == 0:
            print(f"base: step {step} of {BASE_STEPS}, loss {float(value):.3f}", flush=True)
    BASE.parent.mkdir(parents=True, exist_ok=True)
    part = BASE.with_suffix(f".{os.getpid()}")
    torch.save(learner.model.state_dict(), part)
    part.replace(BASE)
