"""Learning-rate schedules of a trainer's, in a run: they follow the run's step. Who joins late, or comes back, would
else begin at the peak, while the others are at the end, and end there with the run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from p2pdiloco.diloco import DiLoCo

log = logging.getLogger("p2pdiloco")


class Schedules:
    """Of one part in a run: they follow if they are as long as the run is, whose rate they then give. Those of a
    trainer that makes fewer steps would be over before the run is, and rise again or stay at nothing."""

    def __init__(self, outer: DiLoCo, steps: float) -> None:
        """``steps``: the trainer's."""
        self._outer = outer
        self._is_as_long = steps == outer.total_steps
        if outer.total_steps and not self._is_as_long:
            log.warning(
                "the trainer makes %s steps and the run has %s: its learning rate goes by its own steps, wherever the "
                "others' is. Give all peers the run's number of steps",
                steps,
                outer.total_steps,
            )

    def follow(self, schedulers: Iterable[Any]) -> None:
        """Bring them to the run's step."""
        if self._is_as_long:
            for scheduler in schedulers:
                follow(scheduler, self._outer.global_step)


def follow(scheduler: Any, step: int) -> None:
    """Bring ``scheduler`` (torch's, or what a library has around one) to ``step``, if it is behind. One that goes by a
    measurement, that counts its calls and takes no more (OneCycleLR), or does not count (ChainedScheduler), or is none
    of torch's, stays as it is."""
    inner = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(inner, LRScheduler) or isinstance(inner, ReduceLROnPlateau | OneCycleLR):
        return
    at = getattr(inner, "last_epoch", step)
    if isinstance(inner, LambdaLR) and step > at:
        inner.last_epoch = step - 1  # its rate depends on nothing else
        at = step - 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps before the optimizer's first
        for _ in range(at, step):
            inner.step()
