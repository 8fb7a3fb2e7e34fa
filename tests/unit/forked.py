"""Learners as forks of one process that has loaded torch and the learner's program, which is most of a learner's start.

Rules of this file:
1. What runs is the program's ``main`` in a process of its own; only ``exec`` and imports are saved. One test starts it
   by its command, as a node does (``test_a_life``).
2. To a test it is a ``subprocess.Popen``, as far as tests need one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any

PROGRAM = "p2pdiloco.training.program"
CONTEXT = multiprocessing.get_context("forkserver")


class Learner:
    """One process."""

    def __init__(self, arguments: Sequence[str], **descriptors: int) -> None:
        """``descriptors``: options whose values are file descriptors of this process, like ``socket_fd=3``."""
        CONTEXT.set_forkserver_preload([PROGRAM])
        given = {name: _Descriptor(fd) for name, fd in descriptors.items()}
        self._process = CONTEXT.Process(target=_run, args=(list(arguments), given), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(PROGRAM, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """To the process."""
        os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


class _Descriptor:
    """A file descriptor that goes along with a process that is started."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (DupFd(self._fd),)


def _taken(duplicate: Any) -> int:
    return int(duplicate.detach())


def _run(arguments: list[str], descriptors: dict[str, int]) -> None:
    from p2pdiloco.training.program import main

    given = [word for name, fd in descriptors.items() for word in (f"--{name.replace('_', '-')}", str(fd))]
    sys.exit(main([*given, *arguments]))
