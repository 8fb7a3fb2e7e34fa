"""Network namespaces of testbeds: made, opened, and removed with all that is in them.

Rules of this file:
1. Every name begins with ``PREFIX``, whatever made it, so that what a killed tool left is found without any record.
2. Whatever runs in a namespace of ours belongs to the testbed: removing a namespace kills it first. Nothing of a
   testbed runs anywhere else. A process that dies leaves its namespace long before it is dead (its sockets close in
   between), so it is waited for by a descriptor of its own.
3. Both making and removing may be repeated, and go on where a killed one stopped.
4. pyroute2 is imported here alone, and late: what has no root or no pyroute2 is told so in a sentence.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks.netbed.namespace_exec import NAMESPACES, Made, make, opened_in, unmake

PREFIX = "p2pbed-"
DEATH_S = 5.0
"""What killed processes have to be gone."""
STRANGERS_S = 2.0
"""What those have that were dying already, perhaps in a namespace that is none of ours."""
LOOPBACK = 1


class TestbedError(Exception):
    """The testbed cannot be made or used here; the message says what is missing and how to mend it."""

    __test__ = False  # not a class of tests


def need_root() -> None:
    """Complain early where namespaces cannot be made.

    Raises:
        TestbedError: not root, or pyroute2 is not installed.
    """
    if os.geteuid() != 0:
        raise TestbedError(
            "namespaces and tc need root: run with sudo, or shape in process: python -m benchmarks.netbed relay"
        )
    _pyroute2()


def listed(prefix: str = PREFIX) -> list[str]:
    """The namespaces whose names begin so."""
    if not NAMESPACES.is_dir():
        return []
    return sorted(path.name for path in NAMESPACES.iterdir() if path.name.startswith(prefix))


def create(names: Sequence[str]) -> None:
    """Make them, with their loopback interfaces up.

    Raises:
        TestbedError: the kernel has none, or one is there already.
    """
    for name in names:
        try:
            make(name)
        except OSError as error:
            raise TestbedError(f"namespace {name}: {error.strerror or error}") from error
        configure(name, lambda net: net.link("set", index=LOOPBACK, state="up"))


def configure(name: str, work: Callable[[Any], Made]) -> Made:
    """What ``work`` returns, given pyroute2's ``IPRoute`` of that namespace (not ``NetNS``, which forks).

    Raises:
        TestbedError: there is none of that name.
    """

    def within() -> Made:
        with _pyroute2().IPRoute() as net:
            return work(net)

    if not (NAMESPACES / name).exists():
        raise TestbedError(f"there is no namespace {name}")
    return opened_in(name, within)


def remove(names: Collection[str]) -> list[int]:
    """Kill what runs in them, then delete them, and with them their interfaces. Returns whom it killed.

    Raises:
        TestbedError: some process does not die, or some name stays; what can be removed is.
    """
    killed = kill_inside(names)
    failures = []
    for name in names:
        try:
            unmake(name)
        except OSError as error:
            failures.append(f"{name} ({error.strerror})")
    if failures:
        raise TestbedError(f"these namespaces cannot be removed: {', '.join(failures)}")
    return killed


def kill_inside(names: Collection[str]) -> list[int]:
    """SIGKILL to all that runs in them, until nothing does and all of it is dead. Returns whom it killed.

    Raises:
        TestbedError: some process does not die.
    """
    deadline = time.monotonic() + DEATH_S
    with contextlib.ExitStack() as stack:
        killed: dict[int, int] = {}
        """Descriptors by process: its number may be another's once it is dead."""
        while left := [pid for pid in processes_in(names) if pid not in killed]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    killed[pid] = _opened(pid, stack)
                    signal.pidfd_send_signal(killed[pid], signal.SIGKILL)
        others = []
        for pid in _dying():
            with contextlib.suppress(ProcessLookupError):
                others.append(_opened(pid, stack))
        _wait_for(others, min(deadline, time.monotonic() + STRANGERS_S))
        if alive := _wait_for(list(killed.values()), deadline):
            pids = sorted(pid for pid, descriptor in killed.items() if descriptor in alive)
            raise TestbedError(f"processes {', '.join(map(str, pids))} in {', '.join(sorted(names))} do not die")
        return sorted(killed)


def _wait_for(descriptors: Collection[int], deadline: float) -> set[int]:
    """Until all these processes are dead; those that are not at ``deadline``."""
    alive = set(descriptors)
    watch = select.poll()
    for descriptor in alive:
        watch.register(descriptor, select.POLLIN)
    while alive and (left_s := deadline - time.monotonic()) > 0:
        for descriptor, _ in watch.poll(left_s * 1000):
            watch.unregister(descriptor)
            alive.discard(descriptor)
    return alive


def _opened(pid: int, stack: contextlib.ExitStack) -> int:
    """A descriptor of the process, closed with ``stack``. Raises ProcessLookupError if it is gone."""
    descriptor = os.pidfd_open(pid)
    stack.callback(os.close, descriptor)
    return descriptor


def _dying() -> list[int]:
    """Processes that have left their namespaces, whichever those were, and are not dead yet: some may have been killed
    in ours just before."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            os.stat(f"/proc/{pid}/ns/net")
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                if not _is_dead(str(pid)):
                    found.append(pid)
        except OSError:
            continue
    return found


def processes_in(names: Collection[str]) -> list[int]:
    """Who runs in these namespaces; never this process."""
    inodes = set()
    for name in names:
        with contextlib.suppress(OSError):
            inodes.add((NAMESPACES / name).stat().st_ino)
    here = Path("/proc/self/ns/net").stat()
    inodes.discard(here.st_ino)
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):  # it has just ended, or is the kernel's
                if os.stat(f"/proc/{entry}/ns/net").st_ino in inodes and not _is_dead(entry):
                    found.append(int(entry))
    return found


def interface(net: Any, name: str) -> int:
    """Its index.

    Raises:
        TestbedError: it is not there.
    """
    found: Sequence[int] = net.link_lookup(ifname=name)
    if not found:
        raise TestbedError(f"the interface {name} is not there")
    return found[0]


def _is_dead(pid: str) -> bool:
    status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return status.rpartition(")")[2].split()[0] in "ZX"


def _pyroute2() -> Any:
    try:
        import pyroute2
    except ModuleNotFoundError as error:
        raise TestbedError("the testbed needs pyroute2: pip install 'p2pdiloco[bench]'") from error
    return pyroute2
