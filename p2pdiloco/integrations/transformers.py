"""The Hugging Face Trainer in a run.

Example::

    from p2pdiloco.integrations.transformers import DiLoCoCallback

    Trainer(model, args, train_dataset=data, callbacks=[DiLoCoCallback(run="story", initial_peers=INVITE)]).train()

Needs the extra ``p2pdiloco[hf]``. Under torchrun all ranks are one peer.

Rules of this file:
1. Each peer trains samples of its own: the Trainer's sampler is replaced, because it would draw the same at all peers.
2. The tokens that count are those of the model's inputs in training, padding included, in this process.
3. The figures of the run are added to what the Trainer logs, as ``swarm/...``.
4. The learning-rate schedule follows the run's step, if both have the same number of steps.
5. ``load_best_model_at_end`` is switched off: the Trainer would load an earlier model before the callback leaves, and
   the run would merge that as progress.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch import Tensor, nn

from p2pdiloco.diloco import DiLoCo, DiLoCoError
from p2pdiloco.integrations.lr_schedules import Schedules
from p2pdiloco.training.script_arguments import TRAINED_ALREADY, known_options
from p2pdiloco.training.swarm_view import CallHook

try:
    from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as missing:
    raise ImportError(
        "p2pdiloco.integrations.transformers needs the extra hf: pip install 'p2pdiloco[hf]'"
    ) from missing

log = logging.getLogger("p2pdiloco")

_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")


class DiLoCoCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for mypy here
    """Joins or creates the run when training begins, stops training when the run is complete, and leaves.

    The Trainer's logs, and so TensorBoard and W&B, get the figures of ``DiLoCo.swarm`` as ``swarm/...``. The loss and
    the reward that the Trainer logs are reported to the run. Tokens are counted from the size of the model's inputs
    (padding included).
    ``load_best_model_at_end`` is switched off, because it would put an earlier model into the run. Each training needs
    a new callback and another run, also each fold of a cross-validation.
    """

    def __init__(
        self,
        *,
        run: str | None,
        load_global: bool = True,
        share_data: bool = True,
        follow_schedule: bool = True,
        **options: Any,
    ) -> None:
        """
        Args:
            run: Name of the run; None: train alone.
            load_global: Whether the model holds the run's parameters after training. False: this peer's own.
            share_data: Whether to replace torch's or accelerate's sampler, or divide an iterable dataset, so that
                peers with the same data train different samples. Samplers of your own are left as they are, with a
                warning.
            follow_schedule: Whether the learning-rate schedule follows the run's step, if the Trainer makes as many
                steps as the run has. False: it follows the Trainer's steps.
            options: Further arguments of ``p2pdiloco.DiLoCo``, except ``model`` and ``optimizer``. ``total_steps``
                defaults to the Trainer's number of steps, ``grad_scaler`` to the Trainer's. ``tokens_per_step`` is only
                needed for models whose inputs are not called ``input_ids``, ``inputs_embeds``, ``pixel_values``,
                ``input_features`` or ``input_values``.

        Raises:
            DiLoCoError: ``DiLoCo`` has no such argument.
        """
        known_options(options, DiLoCo)
        self._run = run
        self._share_data = share_data
        self._follow_schedule = follow_schedule
        self._schedules: Schedules | None = None
        self._options = options
        self._load_global = load_global
        self._handle: Any = None
        self._has_trained = False
        self.outer: DiLoCo | None = None
        """The ``DiLoCo`` object while training; None before and after."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Join the run. If the Trainer begins again without having ended (``auto_find_batch_size``, an interrupted
        ``train``), leave first.

        Raises:
            DiLoCoError: The run could not be joined, or this callback has trained already.
        """
        if self._has_trained:
            raise DiLoCoError(TRAINED_ALREADY)
        self._leave()
        model, wrapped = kwargs["model"], kwargs["optimizer"]
        _go_first(self)
        optimizer = getattr(wrapped, "optimizer", wrapped)  # accelerate wraps it
        options = {"grad_scaler": getattr(wrapped, "scaler", None), "tokens_per_step": 0, **self._options}
        if self._run is not None and args.load_best_model_at_end:
            log.warning(
                "load_best_model_at_end is switched off: it would load an earlier model, and the run would merge that "
                "as progress. After training the model holds the run's parameters"
            )
            args.load_best_model_at_end = False
        if state is not None and state.max_steps > 0:
            options.setdefault("total_steps", state.max_steps)
        self.outer = DiLoCo(model, optimizer, run=self._run, **options).__enter__()
        loader = kwargs.get("train_dataloader")
        if self._run is not None and self._share_data and not self.outer.share(loader):
            log.warning(
                "the training data's sampler cannot be replaced: make sure that each peer trains different data"
            )
        if self._run is not None and self._follow_schedule:
            self._schedules = Schedules(self.outer, state.max_steps)
            self._schedules.follow([kwargs.get("lr_scheduler")])
        if self._run is not None:
            self._handle = model.register_forward_pre_hook(CallHook(self._count), with_kwargs=True)

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.outer is None or not module.training or not torch.is_grad_enabled():
            return
        first = args[0] if args else None
        given = first if isinstance(first, dict) else kwargs  # sentence-transformers gives all inputs as one
        inputs = next((given[name] for name in _INPUTS if given.get(name) is not None), first)
        if isinstance(inputs, Tensor):
            self.outer.count(inputs.numel() if not inputs.is_floating_point() else inputs.shape[:2].numel())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the loss, and TRL's reward, and add the run's figures to the logs."""
        logs = kwargs.get("logs") or {}
        loss, reward = logs.get("loss"), logs.get("reward")
        if self.outer is not None and loss is not None:
            self.outer.report(float(loss), reward=None if reward is None else float(reward))
            figures = {f"swarm/{name}": value for name, value in self.outer.swarm.items()}
            kwargs["logs"].update(figures)
            state.log_history[-1].update(figures)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Stop when the run is complete."""
        if self._schedules is not None:
            self._schedules.follow([kwargs.get("lr_scheduler")])
        if self.outer is not None and self.outer.is_complete:
            control.should_training_stop = True
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the run, and load its parameters."""
        outer, self._has_trained = self.outer, self._run is not None
        self._leave()
        if outer is not None and self._load_global:
            outer.load_global()

    def _leave(self) -> None:
        outer, self.outer, self._schedules = self.outer, None, None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if outer is not None:
            outer.__exit__(None, None, None)


def _go_first(callback: TrainerCallback) -> None:
    """Move ``callback`` before the callbacks that report (TensorBoard, W&B), so that they see what it adds to the logs.
    The Trainer appends its users' callbacks, and does not pass its list to them."""
    for callbacks in gc.get_referrers(callback):
        if isinstance(callbacks, list) and any(isinstance(one, DefaultFlowCallback) for one in callbacks):
            callbacks.remove(callback)
            callbacks.insert(0, callback)
