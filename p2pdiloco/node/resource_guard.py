"""Pauses the learner while the machine is needed otherwise, has it ended if it hangs, and ends the peer if it uses too
much memory.

Rules of this file:
1. A paused peer trains no steps, but takes part in everything else. Its unmerged progress is contributed at the next
   rounds, and other peers do not wait for it until its next step (rule N4a).
2. There may be several reasons for a pause; it lasts as long as there is one.
3. Other programs are busy if much CPU time of the last LOOK_S was neither idle nor ours. The learner pauses after
   BUSY_LOOKS busy intervals in a row, and continues after IDLE_LOOKS idle ones, so that short work does not stop it.
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

# File in the run's folder that exists while the user has paused the peer.
PAUSED = "paused"
LOOK_S = 2.0
# Share of all CPU time used by other programs from which the machine counts as busy.
BUSY_SHARE = 0.25
BUSY_LOOKS, IDLE_LOOKS = 2, 15


class Used(NamedTuple):
    """CPU time since an arbitrary start, in seconds."""

    all_s: float
    """CPU time of all cores together, used or idle."""
    idle_s: float
    ours_s: float


class CpuContention:
    """Detects whether other programs use the CPU, from successive measurements."""

    def __init__(self) -> None:
        self.are_busy = False
        self._last: Used | None = None
        # Number of consecutive measurements that contradict ``are_busy``.
        self._looks = 0

    def look(self, used: Used) -> bool:
        """Add a measurement, and return whether other programs are busy."""
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
    """Watches the machine for one peer. ``leave`` shuts the peer down gracefully, with the reason."""

    def __init__(
        self, folder: Path, options: MachineOptions, supervision: LearnerSupervisor, leave: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._options = options
        self._supervision = supervision
        self._leave = leave
        self._contention = CpuContention()

    async def keep(self) -> None:
        """Check the machine every LOOK_S until cancelled, or until the peer uses too much memory."""
        while True:
            reason, taken = await asyncio.to_thread(self._look)
            if reason != self._supervision.resting:
                log.info("learner paused" if reason else "learner continues", **({"reason": reason} if reason else {}))
                self._supervision.rest(reason)
            self._supervision.look_for_hang(LOOK_S)
            most = self._options.most_memory_bytes
            if most is not None and taken > most:
                self._leave(
                    f"node and learner use {taken / 1e9:.2f} GB of memory, --max-memory allows {most / 1e9:.2f}: "
                    "allow more, or follow without training (--follow)"
                )
                return
            await asyncio.sleep(LOOK_S)

    def _look(self) -> tuple[str, float]:
        """Return the reasons to pause ("": none), and the used memory in bytes (0: there is no limit)."""
        family = _family(self._supervision.pid)
        reasons = []
        if (self._folder / PAUSED).exists():
            reasons.append("paused by its user (p2pdiloco pause --end)")
        if not self._options.is_battery_used and _is_on_battery():
            reasons.append("on battery (--on-battery)")
        if self._options.only_when_idle and self._contention.look(_used(family)):
            reasons.append("other programs use the machine (--only-when-idle)")
        taken = 0.0 if self._options.most_memory_bytes is None else sum(map(_memory, family))
        return "; ".join(reasons), taken


def pause(folder: Path, *, is_paused: bool) -> None:
    """Pause the peer of this run's folder, also when it starts later, or end the pause."""
    if is_paused:
        (folder / PAUSED).touch(mode=0o600)
    else:
        (folder / PAUSED).unlink(missing_ok=True)


def toggle(folder: Path) -> None:
    """Pause the peer of this run's folder, or end the pause."""
    pause(folder, is_paused=not (folder / PAUSED).exists())


def _family(learner: int | None) -> list[psutil.Process]:
    """Return the processes of the node, its children, and its learner, which may be no child (a training script)."""
    node = psutil.Process()
    found = {process.pid: process for process in (node, *node.children(recursive=True))}
    if learner is not None and learner not in found and psutil.pid_exists(learner):
        found[learner] = psutil.Process(learner)
    return list(found.values())


def _is_on_battery() -> bool:
    """Return whether this machine runs on battery; False if it has none."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False


def _used(family: list[psutil.Process]) -> Used:
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # also contained in user and nice
    return Used(sum(times) - guests_s, idle_s, sum(map(_processor_s, family)))


def _processor_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _memory(process: psutil.Process) -> float:
    """Return the proportional set size: a process's own memory, and its share of shared memory; in bytes."""
    try:
        return float(process.memory_full_info().pss)
    except (psutil.Error, AttributeError):
        return 0.0
