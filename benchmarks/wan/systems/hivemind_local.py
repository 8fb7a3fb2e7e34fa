"""hivemind.Optimizer with local updates; runs in a virtual environment of its own.

Workers train on, and average their parameters in the background, compressed, once all together have trained
``sync_every`` steps each.
"""

from __future__ import annotations

import sys
from typing import Any

import hivemind
import numpy as np
from hivemind.compression import Float16Compression, Uniform8BitQuantization
from torch import Tensor, nn

from benchmarks.wan.task import Task, copies


class LocalUpdates:
    """See the module."""

    def __init__(self, config: dict[str, Any], task: Task) -> None:
        if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
            sys.exit("hivemind's 8-bit codecs average wrongly with numpy 2.4 and later")
        self._config = config
        self._task = task
        self.model: nn.Module = task.model
        self._dht = None
        self.address = ""
        if config["index"] == 0:
            self._dht = self._join([])
            self.address = str(self._dht.get_visible_maddrs()[0])

    def _join(self, peers: list[str]) -> Any:
        return hivemind.DHT(
            initial_peers=peers,
            host_maddrs=[f"/ip4/{self._config['host']}/tcp/0"],
            start=True,
            nat_port_map=False,
            auto_nat=False,
            use_relay=False,
        )

    def connect(self, message: dict[str, Any]) -> None:
        """Join the first one's DHT."""
        config = self._config
        dht = self._dht or self._join([message["address"]])
        self._optimizer = hivemind.Optimizer(
            dht=dht,
            run_id="wan",
            batch_size_per_step=self._task.batch,
            target_batch_size=self._task.batch * config["workers"] * config["sync_every"],
            optimizer=self._task.optimizer,
            use_local_updates=True,
            delay_state_averaging=True,
            matchmaking_time=config["matchmaking_s"],
            averaging_timeout=60.0,
            next_chunk_timeout=20.0,
            state_averaging_compression=(
                Uniform8BitQuantization() if config["codec"] == "uint8" else Float16Compression()
            ),
            tracker_opts={"default_refresh_period": 1.0, "max_refresh_period": 2.0},
            verbose=True,
        )
        self.step = self._optimizer.step

    def global_parameters(self) -> list[Tensor]:
        """There are none but the workers' own."""
        return copies(self.model)

    def close(self) -> None:
        """Processes end together."""
