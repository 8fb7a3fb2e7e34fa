"""torchft's Streaming DiLoCo with its own classes, manager and lighthouse; runs in a virtual environment of its own.

Its quantized all-reduce needs Triton and a GPU, so it sends float32 here. Its checkpoint transport is not used, because
it announces host names, which do not exist between namespaces; all workers start with equal parameters.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from benchmarks.wan.task import Task

PORT = 29510
STORE_PORT = 29511
TIMEOUT = timedelta(minutes=5)


class StreamingDiLoCo:
    """``fragments`` pieces take turns, one each ``sync_every / fragments`` steps, ``overlap`` steps late."""

    def __init__(self, config: dict[str, Any], task: Task) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = config["interface"]
        socket.gethostname = lambda: str(config["host"])  # it tells others its host's name
        self._config = config
        self._task = task
        self.model: nn.Module = task.model
        self.step = task.optimizer.step
        self.address = f"http://{config['host']}:{PORT}" if config["index"] == 0 else ""
        if config["index"] == 0:
            self._lighthouse = LighthouseServer(bind=f"0.0.0.0:{PORT}", min_replicas=config["workers"])

    def connect(self, message: dict[str, Any]) -> None:
        """Join the lighthouse's quorum."""
        config = self._config
        self._store = TCPStore(config["host"], STORE_PORT, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=self.model.load_state_dict,
            state_dict=self.model.state_dict,
            min_replica_size=config["workers"],
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            connect_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=config["host"],
            store_port=STORE_PORT,
            lighthouse_addr=message["address"],
            replica_id=f"site{config['index']}",
            hostname=config["host"],
            init_sync=False,
        )
        pieces = fragments(self.model, config["fragments"])
        outer = [
            torch.optim.SGD(p.parameters(), lr=config["outer_lr"], momentum=config["outer_momentum"], nesterov=True)
            for p in pieces
        ]
        self._diloco = DiLoCo(
            self._manager,
            pieces,
            self._task.optimizer,
            outer,
            config["sync_every"],
            use_bucketization=True,
            fragment_sync_delay=config["overlap"],
            fragment_update_alpha=config["alpha"],
        )
        self._diloco.__enter__()

    def global_parameters(self) -> list[Tensor]:
        """Those that the fragments keep."""
        found = {id(p): p.detach() for p in self.model.parameters()}
        for fragment in self._diloco._fragments:
            for name, p in fragment._model_fragment.named_parameters():
                found[id(p)] = fragment.original_parameters[name]
        return [found[id(p)].clone() for p in self.model.parameters()]

    def close(self) -> None:
        """Processes end together."""


def fragments(model: nn.Module, count: int) -> list[nn.Module]:
    """The model's layers in ``count`` runs of about equal size."""
    layers = [model.embedding, *model.blocks, model.norm, model.head]  # type: ignore[misc]
    total = sum(p.numel() for p in model.parameters())
    groups: list[list[nn.Module]] = [[] for _ in range(count)]
    before = 0
    for layer in layers:
        size = sum(p.numel() for p in layer.parameters())
        groups[min(count - 1, int((before + size / 2) / total * count))].append(layer)
        before += size
    return [nn.ModuleList(group) for group in groups]
