"""A peer is a guest on its machine: it rests while the machine is wanted otherwise, and goes before it takes too much.

Rules of this file:
1. Who rests makes no steps and takes part in everything else. What had been made is given at the next turns, and
   nobody counts on it until its next step (rule N4a).
2. There may be several reasons; it rests as long as there is one.
3. Whether others use the processors is told by processor time that is neither idle nor ours, over LOOK_S. It rests
   after BUSY_LOOKS such looks, and goes on after IDLE_LOOKS without, so that short work does not stop it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from p2pdiloco.peer.options import MachineOptions
from p2pdiloco.util import logs

if TYPE_CHECKING:
    from p2pdiloco.peer.learner_supervisor import LearnerSupervisor

log = logs.get("node")

PAUSED = "paused"
"""A file in the run's folder, as long as its user wants the peer to rest."""
LOOK_S = 2.0
BUSY_SHARE = 0.25
"""Of all processors, taken by others: the machine is in use."""
BUSY_LOOKS, IDLE_LOOKS = 2, 15


class Used(NamedTuple):
    """Processor time since some moment, in seconds."""

    all_s: float
    """That all processors had together."""
    idle_s: float
    ours_s: float


class Others:
    """Whether others use the processors, by looks at what has been used."""

    def __init__(self) -> None:
        self.are_busy = False
        self._last: Used | None = None
        self._looks = 0
        """In a row that say otherwise than ``are_busy``."""

    def look(self, used: Used) -> bool:
        """Whether they do, with what has been used until now."""
        last, self._last = self._last, used
        if last is None or used.all_s <= last.all_s:
            return self.are_busy
        theirs_s = (used.all_s - last.all_s) - (used.idle_s - last.idle_s) - max(0.0, used.ours_s - last.ours_s)
        is_busy = theirs_s / (used.all_s - last.all_s) > BUSY_SHARE
        self._looks = self._looks + 1 if is_busy != self.are_busy else 0
        if self._looks >= (BUSY_LOOKS if is_busy else IDLE_LOOKS):
            self.are_busy, self._looks = is_busy, 0
        return self.are_busy


class ResourceGuard:
    """One peer's. ``leave`` ends it in order, with a sentence."""

    def __init__(
        self, folder: Path, options: MachineOptions, supervision: LearnerSupervisor, leave: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._options = options
        self._supervision = supervision
        self._leave = leave
        self._others = Others()

    async def keep(self) -> None:
        """Look at the machine until cancelled."""
        while True:
            reason, taken = await asyncio.to_thread(self._look)
            if reason != self._supervision.resting:
                log.info(
                    "the learner rests" if reason else "the learner goes on", **({"reason": reason} if reason else {})
                )
                self._supervision.rest(reason)
            most = self._options.most_memory_bytes
            if most is not None and taken > most:
                self._leave(
                    f"node and learner have {taken / 1e9:.2f} GB of memory, --max-memory allows {most / 1e9:.2f}: "
                    "allow more, or follow without training (--follow)"
                )
                return
            await asyncio.sleep(LOOK_S)

    def _look(self) -> tuple[str, float]:
        """Why to rest, and the memory that is taken, in bytes (0: nobody asks)."""
        family = _family(self._supervision.pid)
        reasons = []
        if (self._folder / PAUSED).exists():
            reasons.append("paused by its user (p2pdiloco pause --end)")
        if not self._options.is_battery_used and _is_on_battery():
            reasons.append("on battery (--on-battery)")
        if self._options.only_when_idle and self._others.look(_used(family)):
            reasons.append("others use the machine (--only-when-idle)")
        taken = 0.0 if self._options.most_memory_bytes is None else sum(map(_memory, family))
        return "; ".join(reasons), taken


def pause(folder: Path, *, is_paused: bool) -> None:
    """Let the peer of this run's folder rest, whenever it runs, or not any more."""
    if is_paused:
        (folder / PAUSED).touch()
    else:
        (folder / PAUSED).unlink(missing_ok=True)


def toggle(folder: Path) -> None:
    """Pause it, or end that."""
    pause(folder, is_paused=not (folder / PAUSED).exists())


def _family(learner: int | None) -> list[psutil.Process]:
    """The node, its children, and its learner, which need not be one."""
    node = psutil.Process()
    found = {process.pid: process for process in (node, *node.children(recursive=True))}
    if learner is not None and learner not in found and psutil.pid_exists(learner):
        found[learner] = psutil.Process(learner)
    return list(found.values())


def _is_on_battery() -> bool:
    """A machine without one is not."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False


def _used(family: list[psutil.Process]) -> Used:
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # they are counted twice
    return Used(sum(times) - guests_s, idle_s, sum(map(_processor_s, family)))


def _processor_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _memory(process: psutil.Process) -> float:
    """Its own, and its share of what it shares."""
    try:
        return float(process.memory_full_info().pss)
    except (psutil.Error, AttributeError):
        return 0.0
