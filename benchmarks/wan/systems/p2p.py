"""p2pdiloco as a user runs it: a bootstrap node, and ``p2pdiloco.DiLoCo`` around each worker's loop.

Each worker's node is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import p2pdiloco
from benchmarks.wan.task import Task, copies, put
from p2pdiloco.util import status_pipe
from p2pdiloco.util.status_pipe import Listening

RUN = "wan"
START_S = 60.0


class Peer:
    """Worker 0 runs the bootstrap node and founds the run; the others join."""

    def __init__(self, config: dict[str, Any], task: Task) -> None:
        self._config = config
        self._task = task
        self.model: nn.Module = task.model
        self.step = task.optimizer.step
        self._folder = Path(config["folder"] or tempfile.mkdtemp(prefix="p2pdiloco-wan-")) / str(config["index"])
        self.address = ""
        self._outer: p2pdiloco.DiLoCo | None = None
        if config["index"] == 0:
            self.address = config.get("bootstrap") or self._start_bootstrap()
            self._enter(self.address, is_founder=True)

    def _start_bootstrap(self) -> str:
        command = [sys.executable, "-m", "p2pdiloco", "bootstrap", "--listen", self._listen()]
        command += ["--state", str(self._folder / "bootstrap")]
        with status_pipe.opened() as (reports, fd):
            argv = [*command, status_pipe.OPTION, str(fd)]
            self._bootstrap = subprocess.Popen(argv, stdout=subprocess.DEVNULL, pass_fds=(fd,))
        return reports.wait_for(Listening, START_S).addresses[0]

    def _listen(self) -> str:
        return f"/ip4/{self._config['host']}/tcp/0"

    def _enter(self, address: str, *, is_founder: bool) -> None:
        config, listen = self._config, self._listen()
        budget = ["--up", str(config["up"])] if config.get("up") else []
        self._outer = p2pdiloco.DiLoCo(
            self.model,
            self._task.optimizer,
            run=RUN,
            initial_peers=[address],
            found=is_founder,
            access="open",
            tokens_per_step=self._task.tokens,
            sync_every=config["sync_every"],
            n_fragments=config["fragments"],
            fragment_sync_delay=config["overlap"],
            min_quorum=config.get("min_quorum", 1),
            codec=config["codec"],
            state=self._folder,
            node_options=("--listen", listen, "--directory-listen", listen, *budget),
        )
        self._outer.__enter__()

    def connect(self, message: dict[str, Any]) -> None:
        """Join the run, unless it was founded here."""
        if self._outer is None:
            self._enter(message["address"], is_founder=False)

    def global_parameters(self) -> list[Tensor]:
        """The swarm's, of now."""
        assert self._outer is not None
        own = copies(self.model)
        self._outer.load_global()
        found = copies(self.model)
        put(self.model, own)
        return found

    def close(self) -> None:
        """The node dies with the site."""
