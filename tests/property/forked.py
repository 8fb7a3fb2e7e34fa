"""Learners and nodes as forks of one process that has loaded torch and their programs, which is most of a start.

Rules of this file:
1. What runs is the program's ``main`` in a process of its own; only ``exec`` and imports are saved. Tests start
   learners (``test_a_life``) and nodes (chaos, scripts) by their commands, too, as users do, each with its hash seed.
2. To a test it is a ``subprocess.Popen``, as far as tests need one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.reduction import DupFd
from typing import IO, Any

PROGRAM = "p2pdiloco.training.program"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([PROGRAM, "p2pdiloco.cli.start", "p2pdiloco.node.session", "uvloop"])


class Process:
    """One process, in which ``work`` is called with ``arguments``."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        self._process = CONTEXT.Process(target=work, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        return self._process.exitcode

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
        """To the process, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Learner(Process):
    """One life."""

    def __init__(self, arguments: Sequence[str], **descriptors: int) -> None:
        """``descriptors``: options whose values are file descriptors of this process, like ``socket_fd=3``."""
        given = {name: _Descriptor(fd) for name, fd in descriptors.items()}
        super().__init__(_learn, list(arguments), given)


def begin(arguments: Sequence[str], log: IO[bytes], environment: dict[str, str]) -> Process:
    """A node, in the place of ``Member.begin``."""
    assert environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH"), "other modules take a process of its own"
    return Process(_take_part, list(arguments), _Descriptor(log.fileno()), environment)


class _Descriptor:
    """A file descriptor that goes along with a process that is started."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (DupFd(self._fd),)


def _taken(duplicate: Any) -> int:
    return int(duplicate.detach())


def _learn(arguments: list[str], descriptors: dict[str, int]) -> None:
    from p2pdiloco.training.program import main

    given = [word for name, fd in descriptors.items() for word in (f"--{name.replace('_', '-')}", str(fd))]
    sys.exit(main([*given, *arguments]))


def _take_part(arguments: list[str], log: int, environment: dict[str, str]) -> None:
    from p2pdiloco.cli.main import main
    from p2pdiloco.runtime.parent import die_with_parent

    die_with_parent(signal.SIGTERM)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    sys.argv = ["p2pdiloco", *arguments]
    sys.exit(main(arguments))
