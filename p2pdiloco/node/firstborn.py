"""The process that becomes a node's first learner: a fork of the node, made when it had loaded torch and begun nothing,
so that torch is loaded once for both (a second of processor time, and memory that they share).

Rules of this file:
1. It is made before there are threads, an event loop, sockets, or a key: what it shares with its node is code.
2. Until it is told to be a learner it waits for that, in a session of its own. A node that ends, or has no use for it,
   closes its socket, and it ends.
3. Later lives are processes of their own from the start (``learner_process.py``): a fork of a node that runs would have
   threads' locks without the threads. So is the first where the system has no descriptors of processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence

from p2pdiloco.util.process import ProcessHandle

IS_POSSIBLE = sys.platform == "linux"
LONGEST = 1 << 16
"""Bytes of the arguments."""
FDS = ("--socket-fd", "--memory-fd")
"""Of the learner; the third is where it writes."""


class Firstborn:
    """As its node sees it."""

    def __init__(self, pid: int, ours: socket.socket) -> None:
        self._pid = pid
        self._ours = ours

    def become(self, arguments: Sequence[str], link_fd: int, memory_fd: int, output_fd: int) -> ProcessHandle:
        """Be the learner of these arguments.

        Raises:
            OSError: it has ended.
        """
        with self._ours as ours:
            process = ProcessHandle(self._pid, is_own=True)
            socket.send_fds(ours, [json.dumps(list(arguments)).encode()], [link_fd, memory_fd, output_fd])
        return process

    def dismiss(self) -> None:
        """There is a learner already."""
        self._ours.close()


_waiting: Firstborn | None = None
"""This process's."""


def bear() -> None:
    """Make it; see the module's rules for when."""
    global _waiting
    if not IS_POSSIBLE:
        return
    from p2pdiloco.training import learner_main  # now, in the node, that it is there

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those of OpenBLAS, which knows of forks
        pid = os.fork()
    if pid:
        theirs.close()
        _waiting = Firstborn(pid, ours)
        return
    ours.close()
    status = 1
    try:
        os.setsid()  # Ctrl+C is for the node
        arguments = _told(theirs)
        status = 0 if arguments is None else learner_main.main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 (it must not become a second node)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def take() -> Firstborn | None:
    """It, once."""
    global _waiting
    found, _waiting = _waiting, None
    return found


def _told(theirs: socket.socket) -> list[str] | None:
    """In the new process: the learner's arguments, once there are any, with its output where it belongs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with theirs:
        told, fds, _, _ = socket.recv_fds(theirs, LONGEST, len(FDS) + 1)
    if len(fds) != len(FDS) + 1:
        return None
    *given, output = fds
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(fd, standard)
    os.close(nothing)
    os.close(output)
    arguments: list[str] = json.loads(told)
    return [word for name, fd in zip(FDS, given, strict=True) for word in (name, str(fd))] + arguments
