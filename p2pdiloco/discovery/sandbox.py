"""Sandbox: run a program with few rights, ``python -I -S sandbox.py PROGRAM ARGUMENT ...``.

p2pd, libp2p's daemon, is a third-party Go binary that faces the internet in every peer. It needs only memory, sockets
and threads. It cannot undo these restrictions:
1. No new privileges: a program that it starts gains none by set-user-id files or file capabilities.
2. Memory, open files and threads are limited, so that a flood kills p2pd and not the machine. It is then restarted.
3. It cannot write to regular files, and dumps no core, which would contain this peer's key.

This is a separate program that imports no other module of the project: the child process runs it, then becomes PROGRAM
by exec.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys

PR_SET_NO_NEW_PRIVS = 38
# Limit of virtual memory. Go reserves far more than it uses: an idle p2pd reserves 0.7 GB.
ADDRESS_BYTES = 8 << 30
# Heap size above which Go's garbage collector works harder (GOMEMLIMIT).
HEAP_BYTES = 1 << 30
# Limit of open files, which are mostly sockets.
FILES = 4096
# Number of threads to allow beyond those of the user at the start. The kernel counts all processes of a user together.
MORE_TASKS = 1024


def main() -> None:
    """Restrict this process, then exec the program."""
    with contextlib.suppress(OSError, AttributeError):  # prctl exists only on Linux; elsewhere the limits must suffice
        ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    limits = {
        resource.RLIMIT_AS: ADDRESS_BYTES,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: _tasks_of_user() + MORE_TASKS,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(kind, (bound, bound))
        except (OSError, ValueError):
            if sys.platform == "linux":
                raise  # other systems do not support all of these limits
    os.environ.setdefault("GOMEMLIMIT", str(HEAP_BYTES))
    os.execv(sys.argv[1], sys.argv[1:])


def _tasks_of_user() -> int:
    """Return the number of threads of all processes of this user."""
    count, me = 0, os.getuid()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == me:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


if __name__ == "__main__":
    main()
