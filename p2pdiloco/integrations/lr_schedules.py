"""Lets learning-rate schedules follow the run's step. A script that joins late or restarts would otherwise begin at the
peak rate while the other peers have almost finished."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from p2pdiloco.diloco import DiLoCo

log = logging.getLogger("p2pdiloco")


class Schedules:
    """The schedules of one trainer in one run.

    They follow the run only if the trainer makes as many steps as the run has. A shorter schedule would be over before
    the run is; a warning says that the schedule then follows the trainer's own steps.
    """

    def __init__(self, outer: DiLoCo, steps: float) -> None:
        """
        Args:
            outer: The run, joined.
            steps: Number of steps that the trainer makes.
        """
        self._outer = outer
        self._is_as_long = steps == outer.total_steps
        if outer.total_steps and not self._is_as_long:
            log.warning(
                "the trainer makes %s steps and the run has %s: its learning rate follows its own steps. Give all "
                "peers the run's number of steps",
                steps,
                outer.total_steps,
            )

    def follow(self, schedulers: Iterable[Any]) -> None:
        """Advance schedules to the run's step. Call it after each optimizer step.

        Args:
            schedulers: As for the function ``follow``.
        """
        if self._is_as_long:
            for scheduler in schedulers:
                follow(scheduler, self._outer.global_step)


def follow(scheduler: Any, step: int) -> None:
    """Advance one schedule to ``step``, if it is behind. It is never set back.

    These schedules are left as they are: ``ReduceLROnPlateau``, ``OneCycleLR``, ``ChainedScheduler``, and anything that
    is not a schedule of torch.

    Args:
        scheduler: A schedule of ``torch.optim.lr_scheduler``, or an object that holds one as ``.scheduler``.
        step: The step to advance to, such as ``outer.global_step``.
    """
    inner = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(inner, LRScheduler) or isinstance(inner, ReduceLROnPlateau | OneCycleLR):
        return
    at = getattr(inner, "last_epoch", step)
    if isinstance(inner, LambdaLR) and step > at:
        inner.last_epoch = step - 1  # its rate depends on nothing but the step
        at = step - 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "lr_scheduler.step() before optimizer.step()"
        for _ in range(at, step):
            inner.step()
