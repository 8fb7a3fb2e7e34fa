"""A run joined from the user's own training script::

    with p2pdiloco.DiLoCo(model, optimizer, run="story", initial_peers=[address], tokens_per_step=8192) as outer:
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()          # all that is needed: the wrapper hooks it
            optimizer.zero_grad()
            if outer.is_complete:
                break

The script is the learner; a node runs beside it as a process of its own (``p2pdiloco join`` or ``start``), so that the
loop never waits for the network. Without ``run`` nothing happens, and the script trains alone.

Rules of this file:
1. Only trainable parameters travel, in the model's own order; frozen ones, buffers, the inner optimizer's state stay.
2. Whatever becomes of the node, the script's loop goes on: it then trains alone, and says so once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch import Tensor, nn

from p2pdiloco.node.checkpoint import save
from p2pdiloco.node.founding import make_manifest, version_zero
from p2pdiloco.protocol.blocks import Block
from p2pdiloco.protocol.identifiers import PeerId
from p2pdiloco.protocol.manifest import (
    CodecConfig,
    EvaluationConfig,
    InnerConfig,
    Layout,
    Manifest,
    ModelConfig,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
    config_problems,
)
from p2pdiloco.training.outer_link import OuterLink
from p2pdiloco.training.parameters import FlatParameters
from p2pdiloco.training.reunion import Reunion
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.wire.link import receive_welcome

log = logging.getLogger("p2pdiloco")

JOIN_S = 600.0
"""How long joining may take before the script gives up."""
WELCOME_S = 30.0
LEAVE_S = 90.0
"""How long leaving may take: the node's own deadlines are 20 s, and 60 s at the end of a run."""
_LOOK_S = 0.05


class DiLoCoError(Exception):
    """The run cannot be founded or joined; the message says why and what to do."""


class DiLoCo:
    """Decoupled DiLoCo around an inner training loop.

    ``run`` names the run; None does nothing at all. ``initial_peers`` are directory addresses, as ``p2pdiloco
    bootstrap`` and ``p2pdiloco start`` print them; with none, or with ``found``, the run is founded here, from the
    model's parameters. The schedule and the outer optimizer are the founder's choice; who joins takes the run's.

    ``tokens_per_step`` is what an optimizer step counts for, unless ``count`` says otherwise.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        run: str | None = None,
        initial_peers: Sequence[str] = (),
        found: bool | None = None,
        tokens_per_step: int = 1,
        total_steps: int = 10**9,
        sync_every: int = 24,
        n_fragments: int = 1,
        fragment_sync_delay: int = 2,
        min_quorum: int = 1,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        codec: str = "int4",
        state: str | os.PathLike[str] | None = None,
        node_options: Sequence[str] = (),
    ) -> None:
        """
        Raises:
            DiLoCoError: the settings are impossible together.
        """
        self._optimizer = optimizer
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._model = model
        self._run = run
        self._peers = tuple(initial_peers)
        self._is_founder = not self._peers if found is None else found
        self._tokens_per_step = tokens_per_step
        self._state = Path(state) if state is not None else Path.home() / ".local" / "state" / "p2pdiloco" / (run or "")
        self._node_options = tuple(node_options)
        self._config = RunConfig(
            name=run or "unnamed",
            model=ModelConfig(kind="external"),
            inner=InnerConfig(steps=total_steps, warmup=0),
            schedule=ScheduleConfig(
                fragments=n_fragments, sync_every=sync_every, overlap=fragment_sync_delay, min_quorum=min_quorum
            ),
            outer=OuterConfig(learning_rate=outer_lr, momentum=outer_momentum),
            codec=msgspec.convert({"up": codec, "down": codec}, CodecConfig),
            evaluation=EvaluationConfig(every=0),
        )
        problems = config_problems(self._config, tensors=len(self._named))
        if run is not None and problems:
            raise DiLoCoError("; ".join(problems))
        self._counted = 0
        self._loss = 0.0
        self._link: OuterLink | None = None
        self._vectors: SharedVectors | None = None
        self._flat: FlatParameters | None = None
        self._node: subprocess.Popen[bytes] | None = None
        self._hook: Any = None
        self._stepped_at = 0.0

    # -- the run -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Found or join the run; the model's parameters are then the run's.

        Raises:
            DiLoCoError: that failed.
        """
        if self._run is None:
            return self
        name = f"p2pdiloco-script-{os.getpid()}-{id(self):x}"
        reunion = Reunion(name, JOIN_S)
        if not reunion.open():
            raise DiLoCoError("training scripts need Linux (abstract Unix sockets)")
        try:
            self._start_node(name)
            self._attach(reunion)
        except BaseException:
            self._end_node(signal.SIGKILL)
            raise
        finally:
            reunion.close()
        self._stepped_at = time.perf_counter()
        self._hook = self._optimizer.register_step_post_hook(self._on_step)
        return self

    def _start_node(self, name: str) -> None:
        self._state.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "p2pdiloco"]
        if self._is_founder:
            command += ["resume", str(self._write_version_zero()), "--bootstrap", *self._peers]
        else:
            command += ["join", *self._peers, "--run", self._config.name]
        command += ["--state", str(self._state), "--learner", name, *self._node_options]
        with open(self._state / "node.log", "ab") as output:
            self._node = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def _write_version_zero(self) -> Path:
        """A checkpoint of version 0, unless the folder has one of this run already: then the run goes on from that."""
        folder = self._state / "founded" / "checkpoint"
        if not list(folder.glob("state-*.json")):
            named = [(name, p.shape, False) for name, p in self._named]
            manifest, theta, momentum = make_manifest(self._config, PeerId("script"), named, self._named)
            initial = version_zero(manifest, theta, momentum)
            save(folder, manifest, initial.shards, theta, momentum, keep=1)
        return self._state

    def _attach(self, reunion: Reunion) -> None:
        """Wait for the node, take the run's manifest, and then for the global parameters."""
        found = None
        while found is None:
            self._check_node()
            if reunion.is_over:
                raise DiLoCoError(f"the node did not come up within {JOIN_S:.0f} s; its log is {self._state}/node.log")
            found = reunion.poll()
            if found is None:
                time.sleep(_LOOK_S)
        found.connection.settimeout(WELCOME_S)
        try:
            manifest = msgspec.msgpack.decode(receive_welcome(found.connection), type=Manifest)
        except (OSError, ValueError) as error:
            raise DiLoCoError(f"the node did not say which run it is ({error}); see {self._state}/node.log") from error
        if manifest.config.model.kind != "external":
            raise DiLoCoError(
                f"run {manifest.config.name} is no run of training scripts: p2pdiloco join takes part in it"
            )
        layout = Layout.of(manifest)
        self._vectors = SharedVectors.attach(found.memory_fd, layout.elements)
        try:
            self._flat = FlatParameters(self._named, manifest.tensors, layout)
        except ValueError as error:
            raise DiLoCoError(f"this model is not run {manifest.config.name}'s: {error}") from error
        steps = manifest.config.inner.steps
        self._link = OuterLink(self, self._flat, layout, self._vectors, found.connection, last_step=steps)
        self._link.greet(device=str(self._named[0][1].device))
        while not self._link.is_training:
            if not self._link.boundary():
                self._check_node()
                raise DiLoCoError(f"the node left before the run was joined; its log is {self._state}/node.log")
            time.sleep(_LOOK_S)

    def _check_node(self) -> None:
        assert self._node is not None
        status = self._node.poll()
        if status is not None:
            lines = (self._state / "node.log").read_text(errors="replace").splitlines()
            raise DiLoCoError(f"the node ended with status {status}: {lines[-1] if lines else 'it said nothing'}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Contribute what is unmerged, and leave: of a run that is complete when the others are, too."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._link is not None and self._node is not None:
            if not self.is_complete:
                with contextlib.suppress(ProcessLookupError):
                    self._node.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + LEAVE_S
            while self._link.boundary():
                if time.monotonic() > deadline:
                    log.warning("the node does not end; it is killed (see %s/node.log)", self._state)
                    self._node.kill()
                    break
                time.sleep(_LOOK_S)
        self._end_node(None)

    def _end_node(self, number: signal.Signals | None) -> None:
        if self._node is None:
            return
        if number is not None:
            self._node.send_signal(number)
        try:
            status = self._node.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._node.kill()
            status = self._node.wait()
        if status and number is None:
            log.warning("the node ended with status %s: see %s/node.log", status, self._state)
        self._node = None

    # -- the loop ------------------------------------------------------------------------------------------------------

    def count(self, tokens: int, loss: float | None = None) -> None:
        """The step under way trains ``tokens`` tokens (several calls add up), at this ``loss``, for the status."""
        self._counted += tokens
        if loss is not None:
            self._loss = loss

    @property
    def is_complete(self) -> bool:
        """Whether the run needs no more steps: it is complete, or this peer is asked to leave."""
        return self._link is not None and not self._link.is_training

    @property
    def global_step(self) -> int:
        """The swarm's; 0 without a run."""
        return 0 if self._link is None else self._link.global_step

    def load_global(self) -> None:
        """Set the model's parameters to the global ones of now, or of the end: without this learner's own progress
        since its last contribution."""
        if self._flat is not None and self._vectors is not None:
            self._flat.copy_from(self._vectors.theta, self._flat.everything)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        link = self._link
        if link is None:
            return
        now = time.perf_counter()
        tokens, self._counted = self._counted or self._tokens_per_step, 0
        if link.is_training:
            link.stepped(tokens, self._loss, now - self._stepped_at)
        if not link.boundary():
            self._link = None
            log.warning("the node is gone: training goes on alone (see %s/node.log)", self._state)
        self._stepped_at = time.perf_counter()

    # -- for the link --------------------------------------------------------------------------------------------------

    def evaluate(self, theta: Tensor) -> float:
        """Runs of scripts (``evaluation.every`` is 0) are evaluated by the scripts."""
        raise AssertionError("no node asks for this")

    def train(self, block: Block) -> None:
        """The script has data of its own."""

    def save(self) -> None:
        """The script saves its own optimizer."""

    def begin_again(self) -> None:
        """Nothing was given."""

    def end(self) -> None:
        """Nothing to finish."""
