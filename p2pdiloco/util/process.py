"""A process that asyncio did not start: waited for and killed through a descriptor that names it for good (Linux)."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys


class ProcessHandle:
    """Of a process that is there. ``is_own``: a child of this one, whose status is ours to collect."""

    def __init__(self, pid: int, *, is_own: bool = False) -> None:
        """Raises:
        ProcessLookupError: it has ended.
        """
        self.pid = pid
        self._status: int | None = None if is_own else 1
        self._fd = -1
        self._fd = os.pidfd_open(pid)

    async def wait(self) -> int:
        """Until it has ended; its status, as subprocess tells it. Another's child has told its parent: 1."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        with os.fdopen(os.dup(self._fd)) as watched:
            loop.add_reader(watched.fileno(), ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(watched.fileno())
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])  # noqa: ASYNC222 (it has ended)
        return self._status

    def kill(self) -> None:
        """SIGKILL. Raises ProcessLookupError if it has ended."""
        signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


# -- Dying with the parent ---------------------------------------------------------------------------------------------
# A process that dies with its parent, even if that is killed, and what it is called. Linux alone knows how.


_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask Linux for ``number`` when the parent of this process dies; elsewhere nothing is asked. For the new process
    itself, or for ``preexec_fn``."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(0)  # it died before we had asked


def be_called(name: str) -> None:
    """What the system's lists of processes call this one, 15 characters at most."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
