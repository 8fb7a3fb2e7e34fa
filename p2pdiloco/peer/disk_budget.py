"""Disk write budget: bytes that a peer may write per day, and their division among its writers.

Rules of this file:
1. Logged commits come first, up to ``LOG_SHARE``. They take about half a byte per parameter and version of the model; a
   checkpoint takes six or eight. With logged commits, checkpoints can be rare.
   Without them, a checkpoint is all that a crash leaves, so it is written every hour whatever it costs.
2. The learner's own state is written on its own timer. Payloads that do not fit into memory get what is left.
3. If the user sets the checkpoint interval (``are_timed``), checkpoints and the learner's own state are outside the
   budget. It then covers commits and payloads only.
"""

from __future__ import annotations

DAY_S = 86400.0
HOUR_S = 3600.0
# Upper bound on the bytes per parameter of the learner's own state.
LEARNER_BYTES = 8
# Share of logged commits, including own commits, which are always written.
LOG_SHARE = 0.6
LEARNER_SHARE = 0.25
# Share of checkpoints while commits are logged.
LOGGED_SHARE = 0.125
# Share of checkpoints while commits are not logged.
UNLOGGED_SHARE = 0.5


class DiskBudget:
    """The write budget of one peer.

    Args:
        bytes_per_day: the limit; None: no limit.
        elements: parameters of the model.
        width: bytes per parameter of a checkpoint.
        are_timed: the user sets the checkpoint interval.
    """

    def __init__(self, bytes_per_day: float | None, elements: int, width: int, *, are_timed: bool = False) -> None:
        self._bytes_per_day = bytes_per_day
        self._are_timed = are_timed
        self._elements = elements
        self._width = width
        # Bytes of commits that are logged per day, at the present rate.
        self.log_bytes_per_day = 0.0
        # True if the log continues every shard from the last checkpoint.
        self.is_logged = False

    @property
    def most_log_bytes_per_day(self) -> float:
        """Maximum bytes of logged commits per day; infinite without a limit."""
        return float("inf") if self._bytes_per_day is None else LOG_SHARE * self._bytes_per_day

    def checkpoint_s(self) -> float:
        """Return the minimum seconds between two checkpoints; at most an hour while commits are not logged."""
        if self._bytes_per_day is None or self._are_timed:
            return 0.0
        share = LOGGED_SHARE if self.is_logged else UNLOGGED_SHARE
        between_s = self._width * self._elements * DAY_S / (share * self._bytes_per_day)
        return between_s if self.is_logged else min(HOUR_S, between_s)

    def learner_s(self) -> float:
        """Return the minimum seconds between two saves of the learner's own state."""
        if self._bytes_per_day is None or self._are_timed:
            return 0.0
        return LEARNER_BYTES * self._elements * DAY_S / (LEARNER_SHARE * self._bytes_per_day)

    def spare_bytes_per_s(self) -> float | None:
        """Return the bytes per second that checkpoints, commits and the learner leave for payloads; None: no limit."""
        if self._bytes_per_day is None:
            return None
        spare = (self._bytes_per_day - self.log_bytes_per_day) / DAY_S
        if not self._are_timed:
            spare -= self._width * self._elements / self.checkpoint_s()
            spare -= LEARNER_BYTES * self._elements / self.learner_s()
        return max(0.0, spare)
