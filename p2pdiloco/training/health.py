"""Whether what a learner trains is finite: its losses, and what was copied of each fragment."""

from __future__ import annotations

import math

from torch import Tensor

from p2pdiloco.protocol.identifiers import FragmentId

ADVICE = (
    ": nothing that is trained here is merged until it is finite again. Stop this learner and start it again, with a "
    "lower learning rate: it then goes on from the swarm's parameters"
)


class Health:
    """Of one learner."""

    def __init__(self) -> None:
        self._spoilt: set[FragmentId | None] = set()
        """Fragments whose last snapshot was not finite; None: nor was the last loss that was told."""
        self._is_unable = False

    def lost(self, loss: float, step: int) -> str | None:
        """The loss of a step is this. What is to be told, if that is news."""
        self._spoilt.discard(None)
        if math.isfinite(loss):
            return None  # whether the parameters are, a snapshot shows
        self._spoilt.add(None)
        return self._judge(f"the loss is {loss} at step {step}")

    def copied(self, fragment: FragmentId, is_sound: bool, step: int) -> str | None:
        """A snapshot of ``fragment`` is finite, or not. What is to be told, if that is news; "": all is well again."""
        if not is_sound:
            self._spoilt.add(fragment)
            return self._judge(f"parameters are not finite at step {step}")
        self._spoilt.discard(fragment)
        if not self._spoilt:
            return self._judge("")
        return None

    def _judge(self, problem: str) -> str | None:
        if bool(problem) == self._is_unable:
            return None
        self._is_unable = bool(problem)
        return problem and problem + ADVICE


def is_finite(vector: Tensor) -> bool:
    """Whether all of ``vector``, float32 [n], is finite. One pass over it: a sum shows what it is made of, unless it
    overflows."""
    return math.isfinite(float(vector.sum())) or bool(vector.isfinite().all())
