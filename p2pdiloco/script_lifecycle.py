"""Registry of the runs in which this process takes part. Shuts them down gracefully when the process ends.

Rules of this file:
1. There is one participation per state folder. A second one first ends the earlier one. This happens in a notebook: an
   interrupted cell is run again while its traceback still holds the old Trainer.
2. Participations that are active when the process ends shut down gracefully. So Ctrl+C and exceptions outside of a
   ``with`` statement, as in the Hugging Face Trainer, lose nothing. A killed process does not get here; its node waits
   for the script's next process.
3. SIGTERM (spot machines, Kubernetes, systemd) and SIGHUP (a terminal or ssh connection that closes) end the process
   as Ctrl+C does, with status 143 and 129, unless there is another handler, or nohup ignores SIGHUP. A rank of an
   island dies of them, as torchrun expects; the peer stays for the next attempt.
   A further signal within a second, also SIGINT, is the same one, and has no effect.
4. A forked process does not inherit the participations.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from p2pdiloco.util.process import SAME_S

log = logging.getLogger("p2pdiloco")

NOT_BEGUN = "DiLoCo was created but not started: use it in a with statement, or call start()"
# By state folder: the process id, and the function that ends the participation.
_here: dict[Path, tuple[int, Callable[[], None]]] = {}
# Signals that end this process in order, with the handlers that are replaced.
_ENDING: dict[signal.Signals, Callable[[int, FrameType | None], object] | signal.Handlers] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
# Until this time (monotonic) a further signal is the same one.
_same_until = 0.0


def begin(folder: Path, leave: Callable[[], None], *, heeds_sigterm: bool = True) -> None:
    """Register a participation with the state ``folder``, after ending an earlier one with the same folder.

    leave: ends the participation, waits until that is done, and calls ``end``.
    heeds_sigterm: whether SIGTERM and SIGHUP end this process as Ctrl+C does.
    """
    place = folder.resolve()
    if _is_ours(place):
        log.warning("this process already takes part with %s: the earlier participation ends now", folder)
        _here[place][1]()
    _here[place] = os.getpid(), leave
    is_main = threading.current_thread() is threading.main_thread()
    for number, usual in _ENDING.items() if heeds_sigterm and is_main else ():
        if signal.getsignal(number) == usual:
            signal.signal(number, _told_to_end)


def end(folder: Path) -> None:
    """Remove a participation that has ended or failed to start."""
    _here.pop(folder.resolve(), None)
    is_main = threading.current_thread() is threading.main_thread()
    for number, usual in _ENDING.items() if not _here and is_main else ():
        if signal.getsignal(number) is _told_to_end:
            signal.signal(number, usual)


def _told_to_end(number: int, frame: FrameType | None) -> None:
    global _same_until
    if number != signal.SIGINT and not any(map(_is_ours, _here)):  # a forked process: die of the signal
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if time.monotonic() < _same_until:
        return
    _same_until = time.monotonic() + SAME_S
    if number == signal.SIGINT:
        signal.default_int_handler(number, frame)
    sys.exit(128 + number)


def alone(owner: object) -> Callable[..., None]:
    """Return a hook for an optimizer's steps that warns once if nothing in this process takes part in a run.

    owner: object that must be started for that. The hook does nothing once it is garbage-collected.

    The hook does not remove itself, since torch iterates over the hooks while it runs."""
    living, is_told = weakref.ref(owner), False

    def hook(*_: object) -> None:
        nonlocal is_told
        if not is_told and not _here and living() is not None:
            is_told = True
            log.warning("%s. This script trains alone", NOT_BEGUN)

    return hook


def _is_ours(place: Path) -> bool:
    return place in _here and _here[place][0] == os.getpid()


@atexit.register
def _leave() -> None:
    for place in filter(_is_ours, list(_here)):
        log.warning("the script ends: %s contributes its progress and shuts down (Ctrl+C: end at once)", place)
        try:
            _here[place][1]()
        except (KeyboardInterrupt, SystemExit):  # a second Ctrl+C or SIGTERM
            return
        except Exception:
            log.exception("%s could not shut down gracefully", place)  # continue with the others
