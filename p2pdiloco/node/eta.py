"""Estimates the remaining time of a run and this peer's share of the work, from its recent progress."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from p2pdiloco.observability.formatting import duration
from p2pdiloco.wire.control_messages import PeerStatus

# Number of observations that are kept, and that are needed for an estimate.
WINDOW = 12
FEWEST = 3
# Longer estimates are not shown: a training script without a step limit has an arbitrarily large one.
LONGEST_S = 3650 * 86400.0


class Prospect(NamedTuple):
    """Progress and outlook of a run. None: not known."""

    done: float | None = None
    """Completed share of the steps, 0 to 1."""
    left_s: float | None = None
    my_share: float | None = None
    """This peer's share of the tokens merged recently, 0 to 1."""


class EtaEstimator:
    """Estimates progress and remaining time from successive statuses of one peer."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, PeerStatus]] = deque(maxlen=WINDOW)

    def look(self, now: float, status: PeerStatus) -> dict[str, str]:
        """Add a status at time ``now`` (seconds), and return the known estimates as log fields.

        The fields are ``done``, ``left`` and ``my_share``."""
        self._looks.append((now, status))
        prospect, fields = self.prospect(), {}
        if prospect.done is not None:
            fields["done"] = f"{prospect.done:.1%}"
        if prospect.left_s is not None:
            fields["left"] = duration(prospect.left_s)
        if prospect.my_share is not None:
            fields["my_share"] = f"{prospect.my_share:.0%}"
        return fields

    def prospect(self) -> Prospect:
        """Return the current estimates as numbers."""
        if not self._looks:
            return Prospect()
        (began, first), (now, last) = self._looks[0], self._looks[-1]
        left_s: float | None = None
        if last.step > first.step and now > began:
            left_s = max(0, last.total_steps - last.step) * (now - began) / (last.step - first.step)
        has_end, has_looked = left_s is None or left_s <= LONGEST_S, len(self._looks) >= FEWEST
        merged, trained = last.tokens_merged - first.tokens_merged, last.tokens_trained - first.tokens_trained
        return Prospect(
            done=min(1.0, last.step / max(1, last.total_steps)) if has_end else None,
            left_s=left_s if has_end and has_looked else None,
            my_share=min(1.0, trained / merged) if has_looked and merged > 0 and trained >= 0 else None,
        )


def presented(status: PeerStatus) -> PeerStatus:
    """Return ``status`` as it is shown to people.

    The protocol runs one or two rounds beyond the last step, so steps are capped. The speed of a peer that is not
    training is an old value, so it becomes 0."""
    last = status.total_steps
    return msgspec.structs.replace(
        status,
        step=min(status.step, last),
        held_out_step=min(status.held_out_step, last),
        tokens_per_second=status.tokens_per_second if status.phase == "training" else 0.0,
    )
