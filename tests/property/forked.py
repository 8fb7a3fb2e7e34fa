"""Learners and nodes as forks of one process that has loaded torch and their programs, which is most of a start.

Rules of this file:
1. What runs is the program's ``main`` in a process of its own; only ``exec`` and imports are saved. Tests start
   learners (``test_a_life``) and nodes (chaos, scripts) by their commands, too, as users do, each with its hash seed.
   Such a node's learner is nice: it would train for as long as what a test waits for takes to start, at its cost.
2. To a test it is a ``subprocess.Popen``, as far as tests need one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.reduction import DupFd
from typing import IO, Any

from p2pdiloco.util.status_pipe import OPTION
from tests.machine_sim import recorder

PROGRAM = "p2pdiloco.learner"
NICE = 10
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([PROGRAM, "p2pdiloco.cli.start", "p2pdiloco.node.launcher", "uvloop"])


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


def begin(arguments: Sequence[str], log: IO[bytes], environment: dict[str, str], status_fd: int) -> Process:
    """A node, in the place of ``Member.begin``."""
    assert environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH"), "other modules take a process of its own"
    told = _Descriptor(log.fileno())
    return Process(_command, list(arguments), told, told, environment, _Descriptor(status_fd))


def begin_in(
    namespace: str, arguments: Sequence[str], log: IO[bytes], status_fd: int, change: Callable[[], None]
) -> Process:
    """A node in a network namespace, in the place of ``Home.begin``; it calls ``change`` first. It needs root."""
    told, reports = _Descriptor(log.fileno()), _Descriptor(status_fd)
    return Process(_command_in, namespace, change, list(arguments), told, dict(os.environ), reports)


def run(*words: object, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """A command, to its end.

    Raises:
        subprocess.TimeoutExpired: it has none in time.
    """
    arguments = list(map(str, words))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told:
        process = Process(_command, arguments, _Descriptor(out.fileno()), _Descriptor(told.fileno()), dict(os.environ))
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
        out.seek(0)
        told.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read().decode(), told.read().decode())


class _Descriptor:
    """A file descriptor that goes along with a process that is started."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (DupFd(self._fd),)


def _taken(duplicate: Any) -> int:
    return int(duplicate.detach())


def _learn(arguments: list[str], descriptors: dict[str, int]) -> None:
    from p2pdiloco.learner import main

    given = [word for name, fd in descriptors.items() for word in (f"--{name.replace('_', '-')}", str(fd))]
    sys.exit(main([*given, *arguments]))


def _command_in(
    namespace: str,
    change: Callable[[], None],
    arguments: list[str],
    told: int,
    environment: dict[str, str],
    status_fd: int,
) -> None:
    from benchmarks.netbed import namespace_exec

    namespace_exec.enter(namespace)
    namespace_exec.own_sys()
    change()
    _command(arguments, told, told, environment, status_fd)


def _command(
    arguments: list[str], out: int, told: int, environment: dict[str, str], status_fd: int | None = None
) -> None:
    from p2pdiloco import learner
    from p2pdiloco.cli.main import main
    from p2pdiloco.node import learner_process
    from p2pdiloco.util.process import die_with_parent

    learner_process.COMMAND = ("nice", *learner_process.COMMAND)  # type: ignore[attr-defined]
    learn = learner.main
    learner.main = lambda words: (os.nice(NICE), learn(words))[1]  # its first learner is a fork of it
    die_with_parent(signal.SIGTERM)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    recorder.install()
    os.dup2(out, 1)
    os.dup2(told, 2)
    os.close(out)
    if told != out:
        os.close(told)
    reports = () if status_fd is None else (OPTION, str(status_fd))
    sys.argv = ["p2pdiloco", *arguments, *reports]
    sys.exit(main())
