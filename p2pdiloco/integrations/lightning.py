"""Lightning's Trainer in a run::

    from p2pdiloco.integrations.lightning import DiLoCoCallback

    callback = DiLoCoCallback(run="story", initial_peers=[address], tokens=lambda batch: batch.numel())
    Trainer(callbacks=[callback]).fit(module, loader)

Needs the extra ``p2pdiloco[lightning]``. With several devices all ranks are one peer.

Rules of this file:
1. Each peer trains samples of its own: the sampler of torch's that the loader has is replaced (``share_data=False``: it
   is not; nor is one of its user's own).
2. What is logged (``trainer.logged_metrics``, and so TensorBoard, W&B) has the swarm's figures, as ``swarm/...``. A
   founder's ``total_steps`` are the Trainer's, where it knows them.
3. One optimizer: with several (manual optimization), the last one's steps are the run's.
4. At the end the module holds the swarm's parameters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from p2pdiloco.diloco import DiLoCo
from p2pdiloco.integrations.lr_schedules import Schedules

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as missing:
    raise ImportError(
        "p2pdiloco.integrations.lightning needs the extra lightning: pip install 'p2pdiloco[lightning]'"
    ) from missing


log = logging.getLogger("p2pdiloco")


class DiLoCoCallback(Callback):  # type: ignore[misc]  # lightning is not typed for mypy here
    """Founds or joins a run when training begins, ends training when the run is complete, and leaves.

    Takes what ``p2pdiloco.DiLoCo`` takes but the model and the optimizer. ``tokens``: how many a batch has; without it
    each optimizer step counts ``tokens_per_step``. ``load_global``: whether the module holds the swarm's parameters at
    the end (else this peer's own). ``follow_schedule``: whether schedules that go by single steps follow the run's
    step, where the trainer makes as many as the run has (else, and there, they go by this peer's own).
    """

    def __init__(
        self,
        *,
        run: str | None,
        tokens: Callable[[Any], int] | None = None,
        load_global: bool = True,
        share_data: bool = True,
        follow_schedule: bool = True,
        **options: Any,
    ) -> None:
        self._run = run
        self._share_data = share_data
        self._follow_schedule = follow_schedule
        self._schedules: Schedules | None = None
        self._tokens = tokens
        self._load_global = load_global
        self._options = options
        self.outer: DiLoCo | None = None
        """The run that this takes part in, while it trains."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join. Raises DiLoCoError if that fails."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options = {"grad_scaler": scaler, **self._options}
        steps = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
        if 0 < steps < math.inf:
            options.setdefault("total_steps", int(steps))
        self.outer = DiLoCo(pl_module, trainer.optimizers[-1], run=self._run, **options).__enter__()
        if self._run is not None and self._follow_schedule:
            self._schedules = Schedules(self.outer, steps)
        self._follow(trainer)
        loader = trainer.train_dataloader
        if self._run is not None and self._share_data and not self.outer.share(loader):
            log.warning("the Trainer's data are drawn by a sampler of its own: see that each peer has other ones")

    def _follow(self, trainer: Trainer) -> None:
        if self._schedules is not None:
            each_step = (one for one in trainer.lr_scheduler_configs if (one.interval, one.frequency) == ("step", 1))
            self._schedules.follow(one.scheduler for one in each_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the batch; accumulated ones add up."""
        if self.outer is None:
            return
        self.outer.record_batch(batch)
        if self._tokens is not None:
            self.outer.count(self._tokens(batch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The status shows the loss; stop when the run is complete."""
        if self.outer is None:
            return
        self._follow(trainer)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self.outer.report(loss)
        if figures := self.outer.swarm:
            pl_module.log_dict({f"swarm/{name}": value for name, value in figures.items()})
        if self.outer.is_complete:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave in order."""
        outer, self.outer, self._schedules = self.outer, None, None
        if outer is not None:
            outer.__exit__(None, None, None)
            if self._load_global:
                outer.load_global()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave as a failing script leaves."""
        outer, self.outer, self._schedules = self.outer, None, None
        if outer is not None:
            outer.__exit__(type(exception), exception, exception.__traceback__)
