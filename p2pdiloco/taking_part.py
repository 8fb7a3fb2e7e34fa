"""What of this process takes part in runs.

Rules of this file:
1. One part a state folder. Who takes part again without having left (a notebook's cell that was interrupted and is run
   again, with the Trainer of before in its traceback) leaves first.
2. What still takes part when the process ends leaves in order: Ctrl+C and exceptions that no ``with`` sees, such as in
   the Hugging Face Trainer, lose nothing. What is killed does not come here; its node waits for the script's next life.
3. A forked process has no part in it.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("p2pdiloco")

_here: dict[Path, tuple[int, Callable[[], None]]] = {}
"""By the folders: of which process, and how it leaves."""


def begin(folder: Path, leave: Callable[[], None]) -> None:
    """``leave``: waits until it has left, and calls ``end``."""
    place = folder.resolve()
    if _is_ours(place):
        log.warning("this process takes part with %s already: what did so before leaves now", folder)
        _here[place][1]()
    _here[place] = os.getpid(), leave


def end(folder: Path) -> None:
    """It has left, or never came to be."""
    _here.pop(folder.resolve(), None)


def _is_ours(place: Path) -> bool:
    return place in _here and _here[place][0] == os.getpid()


@atexit.register
def _leave() -> None:
    for place in filter(_is_ours, list(_here)):
        log.warning("the script ends: %s leaves in order, and contributes what is unmerged (Ctrl+C: at once)", place)
        try:
            _here[place][1]()
        except KeyboardInterrupt:
            return
