"""How often what came from a machine came to nothing lately, and whose connections are therefore not heard for a while.

Rules of this file:
1. Pure: time is a number. What is remembered is bounded, whatever comes.
2. A machine is shut out for what it did, not for what others do, and not for ever: when its time is over it has some of
   its failures left, so that one that goes on is out again sooner, and one that has stopped is forgotten.
"""

from __future__ import annotations

import math

FORGOTTEN_S = 60.0
"""In which a machine's failures halve."""
MACHINES = 1024
"""Whose failures are remembered."""
SHUT_OUT = 256
"""Machines at once; one more, and the one that has been out longest is heard again."""


class Failures:
    """Of machines (``net.admission.machine_of``)."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}
        """Of a machine, and when it was that many; the one that failed longest ago first."""

    def of(self, machine: str, now: float) -> float:
        """Those that are not forgotten."""
        failures, at = self._counts.get(machine, (0.0, now))
        return failures * math.exp2((at - now) / FORGOTTEN_S)

    def add(self, machine: str, now: float) -> float:
        """One more; how many that makes."""
        failures = self.of(machine, now) + 1.0
        self._counts.pop(machine, None)
        self._counts[machine] = (failures, now)
        if len(self._counts) > MACHINES:
            del self._counts[next(iter(self._counts))]
        return failures


class Exclusion:
    """See the module's rules. ``failures``: that shut a machine out; ``time_s``: for how long."""

    def __init__(self, *, failures: int, time_s: float) -> None:
        self._most = failures
        self._time_s = time_s
        self._failures = Failures()
        self._until: dict[str, float] = {}
        """The one that is heard first again first."""

    def failed(self, machine: str, now: float) -> bool:
        """Once more; whether the machine is out from now on, and was not before."""
        if self._failures.add(machine, now) < self._most or self.has(machine, now):
            return False
        self._until.pop(machine, None)
        self._until[machine] = now + self._time_s
        if len(self._until) > SHUT_OUT:
            del self._until[next(iter(self._until))]
        return True

    def has(self, machine: str, now: float) -> bool:
        """Is it out?"""
        return self._until.get(machine, now) > now

    def machines(self, now: float) -> list[str]:
        """All that are out; the others are forgotten."""
        self._until = {machine: until for machine, until in self._until.items() if until > now}
        return list(self._until)

    def ends(self) -> float | None:
        """When the next is heard again."""
        return next(iter(self._until.values()), None)
