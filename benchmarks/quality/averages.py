"""Running averages of the global model, and the loss of each at the run's end; they cost no traffic.

An average looks at the global parameters once in H steps, when every fragment has been exchanged.

- EMA: a look's weight falls by the same factor with each later look.
- LAWA (arXiv 2209.14981): the mean of the last looks.
- Polynomial decay (arXiv 1212.1824): look k has weight (p + 1) / (k + p), so about the last k / (p + 1) looks count,
  whatever the run's length; p = 0 is the mean of all looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

FACTORS = (0.6, 0.8)
LOOKS = (6,)
POWERS = (4, 8, 16)


class Averages:
    """Of one run."""

    def __init__(self) -> None:
        self._seen: deque[Tensor] = deque(maxlen=max(LOOKS))
        self._sums: dict[float, Tensor] = {}
        self._means = {power: torch.empty(0) for power in POWERS}
        self._looks = 0

    def look(self, theta: Tensor) -> None:
        """The global parameters as they are now, float32 [n]."""
        self._looks += 1
        self._seen.append(theta.clone())
        for factor in FACTORS:
            if factor in self._sums:
                self._sums[factor].mul_(factor).add_(theta, alpha=1.0 - factor)
            else:
                self._sums[factor] = theta * (1.0 - factor)
        for power, mean in self._means.items():
            if mean.numel():
                mean.lerp_(theta, (power + 1) / (self._looks + power))
            else:
                self._means[power] = theta.clone()

    def found(self) -> Iterator[tuple[str, Tensor]]:
        """Each average with its name, as soon as there are looks enough; EMA's bias is corrected."""
        for factor, total in self._sums.items():
            yield f"ema {factor:g}", total / (1.0 - factor**self._looks)
        for looks in LOOKS:
            if len(self._seen) >= looks:
                yield f"lawa {looks}", sum(list(self._seen)[-looks:], start=0.0 * self._seen[0]) / looks
        for power, mean in self._means.items():
            if mean.numel():
                yield f"poly {power}", mean
