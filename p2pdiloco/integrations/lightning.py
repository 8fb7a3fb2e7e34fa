"""Lightning's Trainer in a run.

Example::

    from p2pdiloco.integrations.lightning import DiLoCoCallback

    callback = DiLoCoCallback(run="story", initial_peers=INVITE, tokens=lambda batch: batch.numel())
    Trainer(callbacks=[callback]).fit(module, loader)

Needs the extra ``p2pdiloco[lightning]``. With several devices all ranks are one peer.

Rules of this file:
1. Each peer trains samples of its own: torch's sampler in the loader is replaced.
2. The figures of the run are logged as ``swarm/...``.
3. With several optimizers (manual optimization), a step of the run is one of each. Lightning counts each optimizer's
   step in ``max_steps``, so the run has that many divided by their number.
4. Schedules with ``interval="step"`` and ``frequency=1`` follow the run's step, if both have the same number of steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from p2pdiloco.diloco import DiLoCo, DiLoCoError
from p2pdiloco.integrations.lr_schedules import Schedules
from p2pdiloco.training.script_arguments import TRAINED_ALREADY, known_options

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as missing:
    raise ImportError(
        "p2pdiloco.integrations.lightning needs the extra lightning: pip install 'p2pdiloco[lightning]'"
    ) from missing


log = logging.getLogger("p2pdiloco")


class DiLoCoCallback(Callback):  # type: ignore[misc]  # lightning is not typed for mypy here
    """Joins or creates the run when training begins, stops training when the run is complete, and leaves.

    ``trainer.logged_metrics``, and so TensorBoard and W&B, get the figures of ``DiLoCo.swarm`` as ``swarm/...``. The
    loss that ``training_step`` returns is reported to the run. With several optimizers, a step of the run is complete
    when each of them has stepped. Each training needs a new callback and another run, also each fold of a
    cross-validation.
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
        """
        Args:
            run: Name of the run; None: train alone.
            tokens: Function from a batch to its number of tokens. Accumulated batches add up. None: give
                ``tokens_per_step``, and each optimizer step counts it.
            load_global: Whether the module holds the run's parameters after training. False: this peer's own.
            share_data: Whether to replace torch's sampler in the train loader, so that peers with the same dataset
                train different samples. Iterable datasets and samplers of your own are left as they are, with a
                warning.
            follow_schedule: Whether schedules with ``interval="step"`` follow the run's step, if the trainer makes as
                many steps as the run has. False: they follow the trainer's steps.
            options: Further arguments of ``p2pdiloco.DiLoCo``, except ``model`` and ``optimizer``. ``total_steps``
                defaults to the trainer's number of steps, if it is known (``max_steps`` divided by the number of
                optimizers); ``grad_scaler`` to the trainer's.

        Raises:
            DiLoCoError: ``DiLoCo`` has no such argument, or nothing says how many tokens a step has.
        """
        known_options(options, DiLoCo)
        if run is not None and tokens is None and options.get("tokens_per_step") is None:
            raise DiLoCoError(
                "nothing says how many tokens a step has: give tokens=, a function from a batch to its number of "
                "tokens (such as lambda batch: batch[0].numel()), or tokens_per_step="
            )
        self._run = run
        self._share_data = share_data
        self._follow_schedule = follow_schedule
        self._schedules: Schedules | None = None
        self._tokens = tokens
        self._load_global = load_global
        self._options = options
        self._has_trained = False
        self.outer: DiLoCo | None = None
        """The ``DiLoCo`` object while training; None before and after."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run.

        Raises:
            DiLoCoError: The run could not be joined, or this callback has trained already.
        """
        if self._has_trained:
            raise DiLoCoError(TRAINED_ALREADY)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options = {"grad_scaler": scaler, "tokens_per_step": 0, **self._options}
        optimizers = trainer.optimizers
        has_limit = trainer.max_steps > 0
        steps = trainer.max_steps // len(optimizers) if has_limit else trainer.estimated_stepping_batches
        if 0 < steps < math.inf:
            options.setdefault("total_steps", int(steps))
        self.outer = DiLoCo(pl_module, optimizers, run=self._run, **options).__enter__()
        if self._run is not None and self._follow_schedule:
            self._schedules = Schedules(self.outer, steps)
        self._follow(trainer)
        loader = trainer.train_dataloader
        if self._run is not None and self._share_data and not self.outer.share(loader):
            log.warning(
                "the training data's sampler cannot be replaced: make sure that each peer trains different data"
            )

    def _follow(self, trainer: Trainer) -> None:
        if self._schedules is not None:
            each_step = (one for one in trainer.lr_scheduler_configs if (one.interval, one.frequency) == ("step", 1))
            self._schedules.follow(one.scheduler for one in each_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the batch. Accumulated batches add up."""
        if self.outer is None:
            return
        self.outer.record_batch(batch)
        if self._tokens is not None:
            self.outer.count(self._tokens(batch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the loss, log the run's figures, and stop when the run is complete."""
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
        """Leave the run, and load its parameters."""
        outer, self.outer, self._schedules = self.outer, None, None
        self._has_trained = self._run is not None
        if outer is not None:
            if len(trainer.optimizers) > 1 and self._has_trained and not outer.is_complete:
                log.warning(
                    "training has ended at step %s of %s of the run: Lightning counts each optimizer's step in "
                    "max_steps. If one of them steps more often than another, use max_epochs, and give total_steps",
                    outer.global_step,
                    outer.total_steps,
                )
            outer.__exit__(None, None, None)
            if self._load_global:
                outer.load_global()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the run as a failing script does."""
        outer, self.outer, self._schedules = self.outer, None, None
        if outer is not None:
            outer.__exit__(type(exception), exception, exception.__traceback__)
