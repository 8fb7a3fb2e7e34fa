"""Processes that asyncio did not start, handled through a pidfd that identifies them reliably; what the kernel is asked
about processes (Linux); and the heap of this one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

SAME_S = 1.0
"""Seconds after a signal to end in which further ones are the same request. A terminal and a wrapper (``timeout``, a
shell's trap) may both send it."""


class ProcessHandle:
    """Handle of a running process. ``is_own`` says that it is a child of this process, which collects its status."""

    def __init__(self, pid: int, *, is_own: bool = False) -> None:
        """Open a handle.

        Raises:
            ProcessLookupError: the process has ended.
        """
        self.pid = pid
        self._status: int | None = None if is_own else 1
        # Done when the process has ended. All waiters share it, since a new descriptor may not be available.
        self._ended: asyncio.Future[None] | None = None
        self._fd = -1
        self._fd = os.pidfd_open(pid)

    async def wait(self) -> int:
        """Wait until the process has ended. Return its exit code as ``subprocess`` does; 1 if it is not a child."""
        if self._ended is None:
            loop = asyncio.get_running_loop()
            self._ended = loop.create_future()
            loop.add_reader(self._fd, self._on_end, loop, self._ended)
        await asyncio.shield(self._ended)
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])  # noqa: ASYNC222 (it has ended)
        return self._status

    def _on_end(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        loop.remove_reader(self._fd)
        ended.set_result(None)

    def send_signal(self, number: int) -> None:
        """Send a signal. Raises ProcessLookupError if the process has ended."""
        signal.pidfd_send_signal(self._fd, number)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


# -- Dying with the parent ---------------------------------------------------------------------------------------------
# Linux only.


_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have Linux send ``number`` to this process when its parent dies; on other systems, do nothing.

    Call it in the new process itself, or as ``preexec_fn``.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(0)  # the parent died before the request


def main() -> None:
    """Run the command in the arguments as a session's first process. When the parent dies, end the whole session."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    die_with_parent()
    try:
        sys.exit(subprocess.call(sys.argv[1:]))
    except OSError as error:
        sys.exit(f"{sys.argv[1]} cannot be started: {error.strerror}")


def be_called(name: str) -> None:
    """Set the name of this process in process lists, at most 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


# -- Lack of memory ----------------------------------------------------------------------------------------------------
# Linux only.


_VMSTAT = Path("/proc/vmstat")
# Of -1000 to 1000, which stands for all of the memory.
_FIRST_SCORE = 900


def let_be_killed_first(pid: int) -> None:
    """Have the kernel kill this process of this user before others if memory runs out."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(_FIRST_SCORE))


def memory_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since it started; 0 if it does not tell."""
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


# -- Heap --------------------------------------------------------------------------------------------------------------
# glibc only.


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# Larger blocks go back to the system when they are freed. A coded shard of the default size is smaller, because fresh
# pages cost more than coding into them.
_LARGE_BLOCK = 4 << 20
_ARENAS = 2


def bound_heap() -> None:
    """Have this process give back memory that it no longer needs. Call it before threads allocate.

    By default each thread has a heap of its own, which keeps whatever it once needed, and after the first large block
    that is freed so do blocks of up to 32 MiB. A node then needs more memory the more peers there are.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option, value in (
            (_M_ARENA_MAX, _ARENAS),
            (_M_MMAP_THRESHOLD, _LARGE_BLOCK),
            (_M_TRIM_THRESHOLD, _LARGE_BLOCK),
        ):
            set_option(option, value)


if __name__ == "__main__":
    main()
