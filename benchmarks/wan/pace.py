"""Paced steps: each takes as long as on an accelerator, whatever processor this machine has.

1. The step is really computed, layer by layer. After each layer the loop waits until an accelerator with this step time
   would be done: a third of it for the forward pass, two thirds for the backward pass, equal shares for the layers. So
   gradients become ready as they would there, and torch DDP can overlap communication with the backward pass.
2. ``COMPUTE_SHARE`` of the step is for the two passes, the rest for clipping and the inner optimizer.
3. A step that this machine was too slow for is late; late steps are counted and reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import nn

COMPUTE_SHARE = 0.95
LATE_SHARE = 0.02
"""Of the step time, from which on a step counts as late."""


def forward_end(layer: int, layers: int) -> float:
    """When layer ``layer`` is done in the forward pass, as a share of the step."""
    return COMPUTE_SHARE / 3 * (layer + 1) / layers


def backward_end(layer: int, layers: int) -> float:
    """When layer ``layer``'s gradients are ready, as a share of the step; the last layer's come first."""
    return COMPUTE_SHARE * (1 / 3 + 2 / 3 * (layers - layer) / layers)


class Pace:
    """Makes steps of one model take ``step_s``."""

    def __init__(self, layers: Sequence[nn.Module], step_s: float) -> None:
        self.step_s = step_s
        self.steps = 0
        self.late_steps = 0
        self.late_s = 0.0
        self.waited_s = 0.0
        self._began = time.monotonic()
        count = len(layers)
        for i, layer in enumerate(layers):
            layer.register_forward_hook(self._waiter(forward_end(i, count)))
            layer.register_full_backward_pre_hook(self._waiter(backward_end(i, count)))

    def forget(self) -> None:
        """Count from here on."""
        self.steps = self.late_steps = 0
        self.late_s = self.waited_s = 0.0

    def begin(self) -> float:
        """The next step begins now."""
        self._began = time.monotonic()
        return self._began

    def end(self) -> float:
        """The inner optimizer is done: wait for the step's end, and say when that was."""
        late_s = time.monotonic() - self._began - self.step_s
        self.steps += 1
        if late_s > 0:
            self.late_s += late_s
        self.late_steps += late_s > LATE_SHARE * self.step_s
        self._until(1.0)
        return time.monotonic()

    def _waiter(self, share: float) -> Callable[..., None]:
        return lambda *_: self._until(share)

    def _until(self, share: float) -> None:
        left_s = self._began + share * self.step_s - time.monotonic()
        if left_s > 0:
            self.waited_s += left_s
            time.sleep(left_s)
