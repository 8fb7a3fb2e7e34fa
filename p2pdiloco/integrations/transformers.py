"""The Hugging Face Trainer in a run::

    from p2pdiloco.integrations.transformers import DiLoCoCallback

    Trainer(model, args, train_dataset=data, callbacks=[DiLoCoCallback(run="story", initial_peers=[address])]).train()

Needs the extra ``p2pdiloco[hf]``. Under torchrun all ranks are one peer.

Rules of this file:
1. Each peer trains samples of its own: the Trainer's sampler, which would draw the same at all of them, is replaced
   (``share_data=False``: it is not; nor is one that is not torch's or accelerate's random or sequential one).
2. Tokens are those that the model sees while it trains: the size of its inputs, padding included, in this process.
3. What the Trainer logs has the swarm's figures, as ``swarm/...``. A founder's ``total_steps`` are the Trainer's.
4. The learning rate's schedule follows the run's step, where it is as long (``follow_schedule=False``: it does not).
5. At the end the model holds the swarm's parameters, so that ``save_model`` saves those. ``load_best_model_at_end``
   is switched off: the Trainer would put back an earlier model before this leaves, and the swarm merge that.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch import Tensor, nn

from p2pdiloco.diloco import DiLoCo
from p2pdiloco.integrations.lr_schedules import Schedules
from p2pdiloco.training.swarm_view import of

try:
    from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as missing:
    raise ImportError(
        "p2pdiloco.integrations.transformers needs the extra hf: pip install 'p2pdiloco[hf]'"
    ) from missing

log = logging.getLogger("p2pdiloco")

_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features")


class DiLoCoCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for mypy here
    """Founds or joins a run when training begins, ends training when the run is complete, and leaves.

    Takes what ``p2pdiloco.DiLoCo`` takes but the model and the optimizer. ``load_global``: whether the model holds the
    swarm's parameters at the end (else this peer's own). ``follow_schedule``: whether the schedule follows the run's
    step, where the Trainer's ``max_steps`` are the run's (else, and there, it goes by this peer's own).
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
        self._run = run
        self._share_data = share_data
        self._follow_schedule = follow_schedule
        self._schedules: Schedules | None = None
        self._options = options
        self._load_global = load_global
        self._handle: Any = None
        self.outer: DiLoCo | None = None
        """The run that this takes part in, while it trains."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Join. Raises DiLoCoError if that fails. The Trainer may begin anew without an end (``auto_find_batch_size``,
        an interrupted ``train()``): what took part until then leaves first."""
        self._leave()
        model, wrapped = kwargs["model"], kwargs["optimizer"]
        _go_first(self)
        optimizer = getattr(wrapped, "optimizer", wrapped)  # inside accelerate's
        options = {"grad_scaler": getattr(wrapped, "scaler", None), **self._options}
        if self._run is not None and args.load_best_model_at_end:
            log.warning(
                "load_best_model_at_end is switched off: it would put back this peer's model of an earlier step, which "
                "counts as progress of the run; the model holds the swarm's parameters at the end"
            )
            args.load_best_model_at_end = False
        if state is not None and state.max_steps > 0:
            options.setdefault("total_steps", state.max_steps)
        self.outer = DiLoCo(model, optimizer, run=self._run, **options).__enter__()
        loader = kwargs.get("train_dataloader")
        if self._run is not None and self._share_data and not self.outer.share(loader):
            log.warning("the Trainer's data are drawn by a sampler of its own: see that each peer has other ones")
        if self._run is not None and self._follow_schedule:
            self._schedules = Schedules(self.outer, state.max_steps)
            self._schedules.follow([kwargs.get("lr_scheduler")])
        if self._run is not None:
            self._handle = model.register_forward_pre_hook(of(model, self._count), with_kwargs=True)

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.outer is None or not module.training or not torch.is_grad_enabled():
            return
        inputs = next((kwargs[name] for name in _INPUTS if kwargs.get(name) is not None), args[0] if args else None)
        if isinstance(inputs, Tensor):
            self.outer.count(inputs.numel() if not inputs.is_floating_point() else inputs.shape[:2].numel())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The status shows the loss that the Trainer logs."""
        loss = (kwargs.get("logs") or {}).get("loss")
        if self.outer is not None and loss is not None:
            self.outer.report(float(loss))
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
        """Leave in order."""
        outer = self.outer
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
    """Put ``callback`` before those that report (TensorBoard, W&B), so that they see what it adds to the logs. The
    Trainer puts its users' callbacks last, and shows its list to none of them."""
    for callbacks in gc.get_referrers(callback):
        if isinstance(callbacks, list) and any(isinstance(one, DefaultFlowCallback) for one in callbacks):
            callbacks.remove(callback)
            callbacks.insert(0, callback)
