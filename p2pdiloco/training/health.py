"""Whether what a learner trains may be merged: its losses and the copies of its fragments are finite, and its training
loop has no doubt of its steps (``step_check.py``)."""

from __future__ import annotations

import math

from torch import Tensor

from p2pdiloco.protocol.ids import FragmentId

ADVICE = (
    ": nothing that is trained here is merged until it is finite again. Stop this learner and start it again, with a "
    "lower learning rate: it then goes on from the swarm's parameters"
)


class Health:
    """Of one learner."""

    def __init__(self) -> None:
        self._spoilt: set[FragmentId | None] = set()
        """Fragments whose last snapshot was not finite; None: nor was the last loss that was told."""
        self._doubt = ""
        self.problem = ""
        """What was told last; empty: all is well."""

    def lost(self, loss: float, step: int) -> str | None:
        """The loss of a step is this. What is to be told, if that is news."""
        self._spoilt.discard(None)
        if math.isfinite(loss):
            return None  # whether the parameters are, a snapshot shows
        self._spoilt.add(None)
        return self._judge(f"the loss is {loss} at step {step}{ADVICE}")

    def copied(self, fragment: FragmentId, is_sound: bool, step: int) -> str | None:
        """A snapshot of ``fragment`` is finite, or not. What is to be told, if that is news; "": all is well again."""
        if not is_sound:
            self._spoilt.add(fragment)
            return self._judge(f"parameters are not finite at step {step}{ADVICE}")
        self._spoilt.discard(fragment)
        if not self._spoilt:
            return self._judge(self._doubt)
        return None

    def doubted(self, problem: str) -> str | None:
        """What is trained must not be merged for this reason, however finite it is; empty: it may. What is to be told,
        if that is news; "": all is well again."""
        self._doubt = problem
        return None if self._spoilt else self._judge(problem)

    @property
    def is_doubted(self) -> bool:
        """Whether it must not."""
        return bool(self._doubt)

    def _judge(self, problem: str) -> str | None:
        if bool(problem) == bool(self.problem):
            return None
        self.problem = problem
        return problem


def is_finite(vector: Tensor) -> bool:
    """Whether all of ``vector``, float32 [n], is finite. One pass over it: a sum shows what it is made of, unless it
    overflows."""
    return math.isfinite(float(vector.sum())) or bool(vector.isfinite().all())
