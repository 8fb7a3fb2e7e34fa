"""Systems whose workers wait for each other in all-reduces over gloo: torch DDP and DiLoCo (arXiv 2311.08105)."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from benchmarks.wan.task import Task, copies

PORT = 29500
TIMEOUT = timedelta(minutes=30)


def _join(config: dict[str, Any]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = config["interface"]
    address = f"tcp://{config['first']}:{PORT}"
    dist.init_process_group("gloo", address, TIMEOUT, world_size=config["workers"], rank=config["index"])


def in_bf16(_: Any, bucket: Any) -> Any:
    """What torch's own hook for bf16 does, which refuses gloo: each rank rounds its share of the mean, and these are
    added up. A ``dist.GradBucket``; a future of its buffer."""
    narrow = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    made = dist.all_reduce(narrow, async_op=True).get_future()
    return made.then(lambda done: bucket.buffer().copy_(done.value()[0]))


in_bf16.__annotations__.clear()  # DDP looks at them, and takes no texts


class DataParallel:
    """torch's DistributedDataParallel: gradients are averaged bucket by bucket while the backward pass goes on, in
    float32 or, by its hook for that, in bf16."""

    address = ""

    def __init__(self, config: dict[str, Any], task: Task) -> None:
        self._config = config
        self._task = task
        self.model: nn.Module = task.model
        self.step = task.optimizer.step

    def connect(self, message: dict[str, Any]) -> None:
        """Wrap the model."""
        _join(self._config)
        wrapped = nn.parallel.DistributedDataParallel(self._task.model, bucket_cap_mb=self._config["bucket_mb"])
        if self._config["gradients"] == "bf16":
            wrapped.register_comm_hook(None, in_bf16)
        self.model = wrapped

    def global_parameters(self) -> list[Tensor]:
        """The model's: all workers have the same."""
        return copies(self._task.model)

    def close(self) -> None:
        """Processes end together."""


class SynchronousDiLoCo:
    """Every ``sync_every`` steps the outer gradients are averaged in float32, and Nesterov's outer step is taken."""

    address = ""

    def __init__(self, config: dict[str, Any], task: Task) -> None:
        self._config = config
        self.model: nn.Module = task.model
        self._inner = task.optimizer
        self._every = int(config["sync_every"])
        self._base = nn.utils.parameters_to_vector(task.model.parameters()).detach().clone()
        self._outer = torch.optim.SGD(
            [self._base], lr=config["outer_lr"], momentum=config["outer_momentum"], nesterov=True
        )
        self._steps = 0

    def connect(self, message: dict[str, Any]) -> None:
        """Join the group."""
        _join(self._config)

    def step(self) -> None:
        """An inner step, and the outer one when it is due."""
        self._inner.step()
        self._steps += 1
        if self._steps % self._every == 0:
            gradient = self._base - nn.utils.parameters_to_vector(self.model.parameters()).detach()
            dist.all_reduce(gradient)
            self._base.grad = gradient / self._config["workers"]
            self._outer.step()
            nn.utils.vector_to_parameters(self._base.clone(), self.model.parameters())

    def global_parameters(self) -> list[Tensor]:
        """Those of the last outer step."""
        like, found, at = list(self.model.parameters()), [], 0
        for p in like:
            found.append(self._base[at : at + p.numel()].view_as(p).clone())
            at += p.numel()
        return found

    def close(self) -> None:
        """Processes end together."""
