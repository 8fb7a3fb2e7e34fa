"""Being in a network namespace: for one thread's sockets, or for a whole command.

Rules of this file:
1. A socket belongs to the namespace that it was made in, whoever uses it. So ``opened_in`` makes sockets on a thread
   that enters the namespace and ends; nobody else moves.
2. ``python -m benchmarks.netbed.namespace_exec NAMESPACE -- COMMAND`` becomes the command, in that namespace, with a
   /sys that shows it. It is killed when its parent dies, so that a killed tool leaves no command running.
3. Needs no package but the standard library: a router starts in 50 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

NAMESPACES = Path("/run/netns")
CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
MS_BIND, MS_REC, MS_SLAVE, MS_SHARED = 0x1000, 0x4000, 0x80000, 0x100000
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
USAGE = 2

Made = TypeVar("Made")


def enter(namespace: str) -> None:
    """Move the calling thread into a network namespace.

    Raises:
        OSError: there is no such namespace, or not root.
    """
    fd = os.open(NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc().setns(fd, CLONE_NEWNET))
    finally:
        os.close(fd)


def opened_in(namespace: str, make: Callable[[], Made]) -> Made:
    """What ``make`` returns, called on a thread that is in ``namespace``.

    Raises:
        OSError: as ``enter``, or what ``make`` raises.
    """
    made: list[Made] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            enter(namespace)
            made.append(make())
        except Exception as error:  # noqa: BLE001  (it goes on in the caller)
            failed.append(error)

    _run_on_thread(work, f"in {namespace}")
    if failed:
        raise failed[0]
    return made[0]


def make(namespace: str) -> None:
    """A new network namespace of that name, as ``ip netns add`` makes it.

    Raises:
        OSError: there is one already, or the kernel refuses.
    """
    path, failed = NAMESPACES / namespace, list[OSError]()
    NAMESPACES.mkdir(parents=True, exist_ok=True)
    libc, folder = _libc(), os.fsencode(NAMESPACES)
    if libc.mount(b"", folder, b"none", MS_SHARED | MS_REC, None) < 0:  # not a mount of its own yet
        _checked(libc.mount(folder, folder, b"none", MS_BIND | MS_REC, None))
        _checked(libc.mount(b"", folder, b"none", MS_SHARED | MS_REC, None))
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0))

    def work() -> None:
        try:
            _checked(libc.unshare(CLONE_NEWNET))
            _checked(libc.mount(b"/proc/thread-self/ns/net", os.fsencode(path), b"none", MS_BIND, None))
        except OSError as error:
            failed.append(error)

    _run_on_thread(work, f"making {namespace}")
    if failed:
        raise failed[0]


def unmake(namespace: str) -> None:
    """Remove the name, and with it, if nobody is in it, the namespace; also what a killed ``make`` left."""
    path = NAMESPACES / namespace
    _libc().umount2(os.fsencode(path), MNT_DETACH)
    path.unlink(missing_ok=True)


def command(namespace: str, argv: Sequence[str]) -> list[str]:
    """``argv``, run there."""
    return [sys.executable, "-m", "benchmarks.netbed.namespace_exec", namespace, "--", *argv]


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def own_sys() -> None:
    """Show the namespace's interfaces in /sys, for this process alone."""
    libc = _libc()
    _checked(libc.unshare(CLONE_NEWNS))
    _checked(libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None))
    libc.umount2(b"/sys", MNT_DETACH)
    _checked(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))


def _run_on_thread(work: Callable[[], None], name: str) -> None:
    """And not return before it has ended, even when interrupted."""
    thread = threading.Thread(target=work, name=name)
    thread.start()
    try:
        thread.join()
    except BaseException:
        thread.join()
        raise


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
    return libc


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main() -> int:
    """Become the command."""
    namespace, dashes, *argv = sys.argv[1:] if len(sys.argv) > 3 else ("", "", "")
    if dashes != "--" or not argv:
        sys.stderr.write("python -m benchmarks.netbed.namespace_exec NAMESPACE -- COMMAND ...\n")
        return USAGE
    try:
        die_with_parent()
        enter(namespace)
        own_sys()
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]} in {namespace}: {error.strerror}\n")
        return 127


if __name__ == "__main__":
    sys.exit(main())
