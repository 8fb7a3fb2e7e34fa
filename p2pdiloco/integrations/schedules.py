"""Learning-rate schedules of a trainer's, in a run: they follow the run's step. Who joins late, or comes back, would
else begin at the peak, while the others are at the end, and end there with the run."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau


def follow(scheduler: Any, step: int) -> None:
    """Bring ``scheduler`` (torch's, or what a library has around one) to ``step``, if it is behind. One that goes by a
    measurement, that counts its calls and takes no more (OneCycleLR), or is none of torch's, stays as it is."""
    inner = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(inner, LRScheduler) or isinstance(inner, ReduceLROnPlateau | OneCycleLR):
        return
    if isinstance(inner, LambdaLR) and step > inner.last_epoch:
        inner.last_epoch = step - 1  # its rate depends on nothing else
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps before the optimizer's first
        while inner.last_epoch < step:
            inner.step()
