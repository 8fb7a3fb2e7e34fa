"""When the directory is asked: where it is needed, since what a look costs grows with the run.

Rules of this file:
1. Peers: every LOOK_S by who is alone; soon when somebody came whom we did not know, or went, or when others hear a
   peer that is not connected here (their heartbeats tell); else ever more seldom, and beyond FEW peers more seldom in
   proportion, since answers hold all of them. Somebody looks as often as ever, and tells the others by being heard;
   but no more seldom than SELDOM times, since any of them may be a stranger's, in an open run.
2. Meeting points: soon when one that was attended is not any more, or somebody is missed and none is attended; ever
   more seldom while nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from p2pdiloco.discovery.directory import Directory, DirectoryError
from p2pdiloco.protocol.connectivity import fingerprint
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.timing import Backoff

LOOK_S, LOOK_MOST_S = 2.0, 600.0
"""Between two looks."""
FEW = 16
SELDOM = 4.0
UNMET_LOOK_S, UNMET_FOR_S = 6.0, 120.0
"""Between two looks, at most, for so long after others hear a peer that is not connected here: where it can be met may
change, as when a meeting point has died."""
UNMET_MOST_S = 30.0
"""At most, between two looks for meeting points where none is attended and somebody is missed."""


class LookupPolicy:
    """Of peer ``me`` about the others of its run. ``heard_of``: fingerprints of all whom others hear."""

    def __init__(self, me: PeerId, heard_of: Callable[[], frozenset[int]]) -> None:
        self._me = me
        self._heard_of = heard_of
        self._pause = Backoff(LOOK_S, LOOK_MOST_S)
        self._look_at: float | None = None
        self._looked_at = self._unmet_at = float("-inf")
        self._unmet: frozenset[int] = frozenset()
        """Whom others heard and we did not when we last looked round."""
        self._connected: frozenset[PeerId] = frozenset()
        """Who was then."""

    @property
    def pause_s(self) -> float:
        """Until the look after the next one."""
        return self._pause.pause_s

    @property
    def seldom(self) -> float:
        """How many times as seldom as in a small run the directory is to be asked for what grows with the run."""
        return min(SELDOM, max(1.0, len(self._connected) / FEW))

    @property
    def is_missing(self) -> bool:
        """Whether others hear a peer that is not connected here, or nobody is."""
        return bool(self._unmet) or not self._connected

    @property
    def has_looked(self) -> bool:
        """Into the directory, ever."""
        return self._look_at is not None

    def look_round(self, connected: Collection[PeerId], known: Collection[PeerId], now: float) -> bool:
        """Whether the directory is to be asked now."""
        unmet = self._heard_of() - {fingerprint(peer) for peer in (*connected, self._me)}
        came = any(peer not in known and peer not in self._connected for peer in connected)
        if unmet - self._unmet:
            self._unmet_at = now
        if came or unmet - self._unmet:
            self.wake(now)
        self._unmet, self._connected = unmet, frozenset(connected)
        if self._look_at is None or not connected:
            return True
        is_sought = unmet and now - self._unmet_at < UNMET_FOR_S
        return now >= (min(self._look_at, self._looked_at + UNMET_LOOK_S) if is_sought else self._look_at)

    def wake(self, now: float) -> None:
        """There is news: look soon."""
        self._pause.reset()
        if self._look_at is not None:
            self._look_at = min(self._look_at, now + LOOK_S)

    def looked(self, now: float, *, is_news: bool) -> None:
        """The directory was asked."""
        if is_news:
            self._pause.reset()
        self._look_at, self._looked_at = now + self._pause.next_s() * self.seldom, now


class KnownPoints:
    """The meeting points in the directory. ``is_missing``: whether somebody is not connected who should be."""

    def __init__(self, directory: Directory, is_missing: Callable[[], bool]) -> None:
        self._directory = directory
        self._is_missing = is_missing
        self._pause = Backoff(LOOK_S, LOOK_MOST_S)
        self._look_at = self._looked_at = float("-inf")
        self._attended: frozenset[PeerId] = frozenset()
        self._records: dict[PeerId, bytes] = {}

    async def records(self, attended: Collection[PeerId], now: float) -> dict[PeerId, bytes]:
        """As ``Directory.points`` gave them last."""
        if self._attended.difference(attended):
            self._pause.reset()
            self._look_at = now
        self._attended = frozenset(attended)
        if not attended and self._is_missing():
            self._look_at = min(self._look_at, self._looked_at + UNMET_MOST_S)
        if now >= self._look_at:
            try:
                found = await self._directory.points()
            except DirectoryError:
                found = self._records
            if found != self._records:
                self._records = found
                self._pause.reset()
            self._look_at, self._looked_at = now + self._pause.next_s(), now
        return self._records
