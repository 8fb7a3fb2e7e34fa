"""A process that asyncio did not start: waited for and killed through a descriptor that names it for good (Linux)."""

from __future__ import annotations

import asyncio
import os
import signal


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
