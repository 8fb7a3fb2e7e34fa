"""Running averages of the global model, which cost no traffic: what each would be worth at the run's end.

Rules of this file:
1. Averages look at the global parameters once in H steps, when every fragment has had its turn.
2. EMA: the weight of a look falls by the same factor with each; LAWA (arXiv 2209.14981): the mean of the last looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

FACTORS = (0.6, 0.8, 0.9, 0.95)
LOOKS = (3, 6, 12)


class Averages:
    """Of one run."""

    def __init__(self) -> None:
        self._seen: deque[Tensor] = deque(maxlen=max(LOOKS))
        self._sums: dict[float, Tensor] = {}
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

    def found(self) -> Iterator[tuple[str, Tensor]]:
        """Each average with its name, as soon as there are looks enough; EMA's bias is corrected."""
        for factor, total in self._sums.items():
            yield f"ema {factor:g}", total / (1.0 - factor**self._looks)
        for looks in LOOKS:
            if len(self._seen) >= looks:
                yield f"lawa {looks}", sum(list(self._seen)[-looks:], start=0.0 * self._seen[0]) / looks
