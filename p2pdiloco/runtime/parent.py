"""A process that dies with its parent, even if that is killed. Linux alone knows how."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask Linux for ``number`` when the parent of this process dies; elsewhere nothing is asked. For the new process
    itself, or for ``preexec_fn``."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(0)  # it died before we had asked
