"""A process that dies with its parent, even if that is killed, and what it is called. Linux alone knows how."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
