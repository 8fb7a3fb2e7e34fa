"""Which congestion control connections got, where they asked for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from p2pdiloco.net.bandwidth import Path
from p2pdiloco.runtime import logs

log = logs.get("transport")


class Congestion:
    """Warns once that the kernel refused ``wanted``."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._has_warned = False

    def note(self, path: Path | None) -> None:
        """A connection is there."""
        if self._has_warned or not self._wanted or path is None or path.congestion == self._wanted:
            return
        self._has_warned = True
        log.warning(
            "the kernel refused the congestion control that we asked for: long or lossy paths will be slow",
            wanted=self._wanted,
            used=path.congestion,
        )


def count(paths: Iterable[Path | None]) -> dict[str, int]:
    """How many connections use which, as the kernel says."""
    return dict(Counter(path.congestion for path in paths if path is not None))
