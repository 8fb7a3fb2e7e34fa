"""Checkpoints that are known to be good, kept apart from the newest: training went on from them as it went before.

Rules of this file:
1. A checkpoint is judged when the next one is written, by the training loss of this peer's learner since: finite, and
   no higher above the median of the losses that were found good than ``ROOM``. Who does not train judges nothing.
2. The newest that is good stays, however many are written after it. Nothing is copied: a file beside it says so.
3. Who goes back to it puts aside what is newer, commits since it and the learner's inner state, too, and removes
   nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from p2pdiloco.peer.checkpoint import LEARNER, good_number, indices, mark_good, stem
from p2pdiloco.peer.disk import Disk
from p2pdiloco.peer.segments import numbers, path_of

MEMORY = 32
"""Losses."""
ROOM = 0.5
"""Nats a token, or as large a share of the median if that is more."""
ASIDE = "aside-"


class KnownGood:
    """Of one folder, in one life of its peer."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._losses: deque[float] = deque(maxlen=MEMORY)
        self._waiting: int | None = None
        """The checkpoint that was written last."""

    def written(self, number: int, loss: float | None) -> bool:
        """A checkpoint is there, and this peer's learner has had ``loss`` since the last one: whether that one is good.
        Blocks.

        Raises:
            OSError: it cannot be marked.
        """
        before, self._waiting = self._waiting, number
        if loss is None or not self._is_usual(loss):
            return False
        self._losses.append(loss)
        if before is not None:
            mark_good(self._folder, before, self._disk)
        return before is not None

    def _is_usual(self, loss: float) -> bool:
        if not math.isfinite(loss) or not self._losses:
            return math.isfinite(loss)
        usual = sorted(self._losses)[len(self._losses) // 2]
        return loss <= usual + max(ROOM, ROOM * abs(usual))


def _asides() -> Iterator[str]:
    """Of the first time, the second, and so on: none writes over another's."""
    yield ASIDE
    yield from (f"{ASIDE}{time}-" for time in count(2))


def go_back(folder: Path, disk: Disk) -> int | None:
    """Put aside what is newer than the checkpoint in ``folder`` that is known to be good; its number, or None if there
    is none. Only where nobody writes. Blocks.

    Raises:
        OSError: files cannot be renamed.
    """
    good = good_number(folder, disk)
    if good is None:
        return None
    newer = [number for number, _ in indices(folder, disk) if number > good]
    names = {f"{stem(number)}{suffix}" for number in newer for suffix in (".json", ".safetensors")} | {LEARNER}
    names |= {path_of(folder, number).name for number in numbers(folder, disk) if number >= good}
    there = disk.names(folder)
    aside = next(aside for aside in _asides() if not any(name.startswith(aside) for name in there))
    for name in sorted(names.intersection(there)):
        disk.rename(folder / name, folder / f"{aside}{name}")
    disk.sync_folder(folder)
    return good
