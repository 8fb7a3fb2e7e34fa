"""Registry of the runs in which this process takes part, and their orderly end with the process.

Rules of this file:
1. One part a state folder. Who takes part again without having left (a notebook's cell that was interrupted and is run
   again, with the Trainer of before in its traceback) leaves first.
2. What still takes part when the process ends leaves in order: Ctrl+C and exceptions that no ``with`` sees, such as in
   the Hugging Face Trainer, lose nothing. What is killed does not come here; its node waits for the script's next life.
3. SIGTERM (spot machines, Kubernetes, systemd) ends the process as Ctrl+C does, with status 143, where nobody else has
   a handler of it. A rank of an island dies of it, as torchrun wants; the peer stays for the island's next life.
4. A forked process has no part in it.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType

log = logging.getLogger("p2pdiloco")

NOT_BEGUN = "DiLoCo was made and not begun: use it in a with statement, or start() it"
_here: dict[Path, tuple[int, Callable[[], None]]] = {}
"""By the folders: of which process, and how it leaves."""


def begin(folder: Path, leave: Callable[[], None], *, heeds_sigterm: bool = True) -> None:
    """``leave``: waits until it has left, and calls ``end``."""
    place = folder.resolve()
    if _is_ours(place):
        log.warning("this process takes part with %s already: what did so before leaves now", folder)
        _here[place][1]()
    _here[place] = os.getpid(), leave
    is_main = threading.current_thread() is threading.main_thread()
    if heeds_sigterm and is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def end(folder: Path) -> None:
    """It has left, or never came to be."""
    _here.pop(folder.resolve(), None)
    is_main = threading.current_thread() is threading.main_thread()
    if not _here and is_main and signal.getsignal(signal.SIGTERM) is _terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminated(number: int, frame: FrameType | None) -> None:
    if not any(map(_is_ours, _here)):  # forked
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(128 + number)


def alone(owner: object) -> Callable[..., None]:
    """A hook of an optimizer's steps for as long as its ``owner``, which lives, has not begun to take part: it warns
    once, if nothing else of this process does. It removes nothing, since torch calls one hook after the other."""
    living, is_told = weakref.ref(owner), False

    def hook(*_: object) -> None:
        nonlocal is_told
        if not is_told and not _here and living() is not None:
            is_told = True
            log.warning("%s; this trains alone", NOT_BEGUN)

    return hook


def _is_ours(place: Path) -> bool:
    return place in _here and _here[place][0] == os.getpid()


@atexit.register
def _leave() -> None:
    for place in filter(_is_ours, list(_here)):
        log.warning("the script ends: %s leaves in order, and contributes what is unmerged (Ctrl+C: at once)", place)
        try:
            _here[place][1]()
        except (KeyboardInterrupt, SystemExit):  # a second Ctrl+C or SIGTERM
            return
        except Exception:
            log.exception("%s did not leave in order", place)  # the next one may
