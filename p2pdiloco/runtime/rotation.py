"""Files that would grow for ever, or be overwritten when they are needed most: the last few of each are kept.

``metrics.jsonl`` becomes ``metrics.1.jsonl``, that one ``metrics.2.jsonl``, and so on; the oldest goes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def rotate(path: Path, *, keep: int, most_bytes: int) -> None:
    """Move ``path`` aside, if it is there. Of what was moved aside at any time the newest ``keep`` stay, as far as they
    have ``most_bytes`` together; the newest always does.

    Raises:
        OSError: it cannot be moved.
    """
    if not path.exists():
        return
    last = next(number for number in range(1, keep + 2) if number > keep or not _numbered(path, number).exists())
    for number in range(min(last, keep), 1, -1):
        _numbered(path, number - 1).replace(_numbered(path, number))
    path.replace(_numbered(path, 1))
    room = most_bytes
    for number in range(1, keep + 1):
        with contextlib.suppress(FileNotFoundError):
            room -= _numbered(path, number).stat().st_size
            if room < 0 and number > 1:
                _numbered(path, number).unlink()


def older(path: Path) -> list[Path]:
    """What was moved aside, the oldest first."""
    found = [other for other in path.parent.glob(f"{path.stem}.*{path.suffix}") if _number(path, other)]
    return sorted(found, key=lambda other: _number(path, other), reverse=True)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _number(path: Path, other: Path) -> int:
    middle = other.name.removeprefix(f"{path.stem}.").removesuffix(path.suffix)
    return int(middle) if middle.isdecimal() else 0
