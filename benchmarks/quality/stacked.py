"""Transformers of several learners as one batched computation, because one small model leaves a core half idle.

The arithmetic is that of ``training.transformer`` and ``training.learner`` with one more leading dimension; a test
compares losses and parameters. Learner k's loss depends on its own parameters alone, so the gradient of the losses' sum
is each learner's own. Each learner clips its own gradient. AdamW works element by element and needs no change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from benchmarks.quality.settings import Setting, learning_rate
from p2pdiloco.protocol.manifest import Layout, ModelConfig, TensorSpec
from p2pdiloco.training.models import Transformer
from p2pdiloco.training.optimizers import MOMENTUM, Muon
from p2pdiloco.training.parameters import FlatParameters

MOMENTUM_OF = "momentum of "
"""Before a parameter's name: its momentum, as a tensor of the flat vector."""

Losses = Callable[[Mapping[str, Tensor], Tensor], Tensor]


def losses(config: ModelConfig, cosine: Tensor, sine: Tensor, p: Mapping[str, Tensor], batch: Tensor) -> Tensor:
    """Mean cross-entropy of each learner, float32 [k]; ``p`` are parameters [k, ...], ``batch`` int64
    [k, samples, context + 1]."""
    k, samples, time = batch.shape[0], batch.shape[1], batch.shape[2] - 1
    width, heads = config.width, config.heads
    embedding = p["embedding.weight"]
    rows = torch.arange(k, device=batch.device).view(k, 1, 1) * embedding.shape[1] + batch[:, :, :-1]
    x = F.embedding(rows, embedding.reshape(-1, width)).reshape(k, samples * time, width)
    for index in range(config.depth):
        block = f"blocks.{index}."
        qkv = _linear(_normed(x, p[block + "attention_norm.weight"]), p[block + "attention.qkv.weight"])
        q, key, v = qkv.view(k * samples, time, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        q, key = _rotate(q, cosine, sine), _rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(q, key, v, is_causal=True).transpose(1, 2)
        x = x + _linear(mixed.reshape(k, samples * time, width), p[block + "attention.out.weight"])
        fed = _linear(_normed(x, p[block + "feed_norm.weight"]), p[block + "feed.gate_up.weight"])
        gate, up = fed.chunk(2, dim=-1)
        x = x + _linear(F.silu(gate) * up, p[block + "feed.down.weight"])
    logits = _linear(_normed(x, p["norm.weight"]), p["head.weight"])
    each = F.cross_entropy(logits.flatten(0, 1), batch[:, :, 1:].flatten(), reduction="none")
    return each.view(k, -1).mean(1)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6) * weight[:, None]


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)


@functools.cache
def of_shape(
    width: int, depth: int, heads: int, context: int, k: int, samples: int, device: torch.device, is_compiled: bool
) -> Losses:
    """``losses`` for one shape (``k`` learners, ``samples`` each). Compiled it takes half to two thirds of the time,
    after half a minute once."""
    config = ModelConfig(width=width, depth=depth, heads=heads, context=context)
    tables = Transformer(config).to(device)
    of = functools.partial(losses, config, tables.get_buffer("cosine"), tables.get_buffer("sine"))
    return torch.compile(of, dynamic=False) if is_compiled else of


class Stepping(Protocol):
    """Learners that step together."""

    def flat(self, index: int, tensors: Sequence[TensorSpec], layout: Layout) -> FlatParameters:
        """Learner ``index``'s parameters as the run's flat vector."""

    def step(self, batch: Tensor, progress: int, global_step: int) -> Tensor:
        """One inner step; returns the losses, float32 [k]. ``progress``: the budget that is trained, in whole steps of
        all learners, by which the rate falls; ``global_step``: that of the warm-up."""

    def forget(self) -> None:
        """Begin with fresh inner optimizers."""


class Stack:
    """``k`` learners that step together, all from the same parameters."""

    def __init__(
        self, setting: Setting, model: nn.Module, k: int, samples: int, *, is_compiled: bool, is_narrow: bool = True
    ) -> None:
        """``is_narrow``: on a GPU the model computes in bfloat16, as the built-in learner does."""
        self.k = k
        self._is_narrow = is_narrow
        self.steps = 0
        """Of the inner optimizer."""
        self._setting = setting
        shape = (setting.width, setting.depth, setting.heads, setting.context, k, samples)
        self._losses = of_shape(*shape, next(model.parameters()).device, is_compiled)
        self._parameters = {
            name: p.detach().expand(k, *p.shape).clone().requires_grad_() for name, p in model.named_parameters()
        }
        self._optimizers = _optimizers(setting, self._parameters)
        self._sent_momentum: dict[str, Tensor] = {}
        """By the tensors' names in the flat vector, [k, ...]."""
        if setting.sends_momentum:
            state = next(o.state for o in self._optimizers if isinstance(o, Muon))
            for name, p in self._parameters.items():
                if is_by_muon(name, p[0]):
                    self._sent_momentum[MOMENTUM_OF + name] = state[p]["momentum"] = torch.zeros_like(p)

    def flat(self, index: int, tensors: Sequence[TensorSpec], layout: Layout) -> FlatParameters:
        """Learner ``index``'s parameters, and the momentum that it sends, as the run's flat vector."""
        every = {**self._parameters, **self._sent_momentum}
        named = [(name, nn.Parameter(p.detach()[index])) for name, p in every.items()]
        return FlatParameters(named, tensors, layout)

    def step(self, batch: Tensor, progress: int, global_step: int) -> Tensor:
        """One inner step; returns the losses, float32 [k]. ``progress``: the budget that is trained, in whole steps of
        all learners, by which the rate falls; ``global_step``: that of the warm-up."""
        inner = self._setting.inner_config
        with torch.autocast("cuda", torch.bfloat16, enabled=batch.is_cuda and self._is_narrow):
            value = self._losses(self._parameters, batch)
        value.sum().backward()  # type: ignore[no-untyped-call]
        if self._setting.pools_from <= progress / self._setting.steps < self._setting.pools_until:
            self._pool()
        self._clip(inner.clip)
        rate = learning_rate(inner, global_step, self.steps, progress * self._setting.step_tokens)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate if isinstance(optimizer, Muon) else rate * self._setting.rest_rate
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        return value.detach()

    def forget(self) -> None:
        """Begin with fresh inner optimizers."""
        self.steps = 0
        for optimizer in self._optimizers:
            optimizer.state.clear()

    @torch.no_grad()
    def _pool(self) -> None:
        """Average over learners what the setting says (``Setting.pools``)."""
        what = self._setting.pools
        matrices = {name for name, p in self._parameters.items() if is_by_muon(name, p[0])}
        pooled: list[Tensor] = []
        for name, p in self._parameters.items():
            state: dict[str, Tensor] = next((o.state[p] for o in self._optimizers if p in o.state), {})
            match what:
                case "gradients" | "matrices" | "rest" if what == "gradients" or (name in matrices) == (what != "rest"):
                    pooled += [p.grad] if p.grad is not None else []
                case "momentum":
                    pooled += [state[key] for key in ("momentum", "exp_avg") if key in state]
                case "moments":
                    pooled += [state[key] for key in ("exp_avg_sq",) if key in state]
                case _:
                    pass
        for one in pooled:
            one.copy_(one.mean(0, keepdim=True).expand_as(one))

    @torch.no_grad()
    def _clip(self, largest: float) -> None:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
        factors = (largest / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))


def is_by_muon(name: str, one: Tensor) -> bool:
    """Whether Muon, where it is the inner optimizer, moves a parameter."""
    return "blocks" in name and one.dim() == 2


def _optimizers(setting: Setting, parameters: Mapping[str, Tensor]) -> list[torch.optim.Optimizer]:
    """AdamW as in ``training.learner``; with ``muon`` the blocks' matrices have that instead."""
    inner = setting.inner_config
    by_muon = {name: p for name, p in parameters.items() if setting.inner == "muon" and is_by_muon(name, p[0])}
    rest = [p for name, p in parameters.items() if name not in by_muon]
    groups = [
        {"params": [p for p in rest if p.dim() > 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in rest if p.dim() <= 2], "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=inner.learning_rate, betas=(inner.beta1, inner.beta2), fused=True)
    ]
    if by_muon:
        found.append(
            Muon(list(by_muon.values()), weight_decay=inner.weight_decay, momentum=setting.inner_momentum or MOMENTUM)
        )
    return found
