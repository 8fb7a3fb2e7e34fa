"""Budget of bytes that a peer may write to its disk in a day, and its division among the peer's parts.

Rules of this file:
1. Commits since the last checkpoint come first, as long as they fit into ``LOG_SHARE``: of a version of the model they
   are half a byte a parameter, of a checkpoint six or eight. With them a checkpoint is wanted seldom; without them it
   is all that a crash leaves, and comes every hour whatever it writes.
2. The learner's own state is written by a clock of its own. Payloads that memory has no room for get what is left.
3. Where the user says how often (``are_timed``), checkpoints and the learner's own state are outside the budget, which
   is for commits and payloads then.
"""

from __future__ import annotations

DAY_S = 86400.0
HOUR_S = 3600.0
LEARNER_BYTES = 8
"""A parameter's, that the learner writes of its own, or less."""
LOG_SHARE = 0.6
"""With own commits, which are written in any case."""
LEARNER_SHARE = 0.25
LOGGED_SHARE = 0.125
"""Of checkpoints, while commits are kept."""
UNLOGGED_SHARE = 0.5
"""And while they are not."""


class DiskBudget:
    """The budget of a peer whose checkpoints have ``elements`` parameters of ``width`` bytes each. ``bytes_per_day``
    None: no limit."""

    def __init__(self, bytes_per_day: float | None, elements: int, width: int, *, are_timed: bool = False) -> None:
        self._bytes_per_day = bytes_per_day
        self._are_timed = are_timed
        self._elements = elements
        self._width = width
        self.log_bytes_per_day = 0.0
        """Bytes of commits that are written in a day, at the present rate."""
        self.is_logged = False
        """Whether commits lead on from the last checkpoint."""

    @property
    def most_log_bytes_per_day(self) -> float:
        """The most bytes of commits in a day; inf: no limit."""
        return float("inf") if self._bytes_per_day is None else LOG_SHARE * self._bytes_per_day

    def checkpoint_s(self) -> float:
        """The least seconds between two checkpoints; at most an hour, where commits do not lead on from the last."""
        if self._bytes_per_day is None or self._are_timed:
            return 0.0
        share = LOGGED_SHARE if self.is_logged else UNLOGGED_SHARE
        between_s = self._width * self._elements * DAY_S / (share * self._bytes_per_day)
        return between_s if self.is_logged else min(HOUR_S, between_s)

    def learner_s(self) -> float:
        """The least seconds between two savings of the learner's own state."""
        if self._bytes_per_day is None or self._are_timed:
            return 0.0
        return LEARNER_BYTES * self._elements * DAY_S / (LEARNER_SHARE * self._bytes_per_day)

    def spare_bytes_per_s(self) -> float | None:
        """Bytes a second that checkpoints, commits and the learner leave for payloads; None: no limit."""
        if self._bytes_per_day is None:
            return None
        spare = (self._bytes_per_day - self.log_bytes_per_day) / DAY_S
        if not self._are_timed:
            spare -= self._width * self._elements / self.checkpoint_s()
            spare -= LEARNER_BYTES * self._elements / self.learner_s()
        return max(0.0, spare)
