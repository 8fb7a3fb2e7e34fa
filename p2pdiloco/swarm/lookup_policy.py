"""Decides when the directory is asked: only when needed, since the cost of a lookup grows with the run.

Rules of this file:
1. Peers. A peer that is alone looks every LOOK_S. It looks soon when an unknown peer connects, when one disconnects,
   and when others hear a peer that is not connected here (their heartbeats tell). Otherwise the interval doubles.
   Beyond FEW peers it is stretched in proportion, since an answer holds all records; but at most MAX_STRETCH times: in
   an open run, most records may belong to attackers.
2. Meeting points. A peer looks soon when it no longer attends one of them, or when a peer is missing and it attends
   none. Otherwise the interval doubles while nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from p2pdiloco.discovery.directory import Directory, DirectoryError
from p2pdiloco.protocol.connectivity import fingerprint
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.timing import Backoff

LOOK_S, LOOK_MOST_S = 2.0, 600.0
"""Between two looks. One costs a peer some 600 kB among 64 peers. With at most 300 s idle peers would use 5.0 kB/s
instead of 4.8 (benchmarks/notes.md, idle traffic)."""
FEW = 16
MAX_STRETCH = 4.0
UNMET_LOOK_S, UNMET_FOR_S = 6.0, 120.0
"""Longest interval, and for how long it holds, after others hear a peer that is not connected here: the meeting points
of that peer may change, as when one has died."""
UNMET_MOST_S = 30.0
"""Longest interval between two looks for meeting points while none is attended and a peer is missing."""


class LookupPolicy:
    """When ``me`` looks for other peers of its run. ``heard_of``: fingerprints of all peers that others hear."""

    def __init__(self, me: PeerId, heard_of: Callable[[], frozenset[int]]) -> None:
        self._me = me
        self._heard_of = heard_of
        self._pause = Backoff(LOOK_S, LOOK_MOST_S)
        self._look_at: float | None = None
        self._looked_at = self._missing_at = float("-inf")
        self._missing: frozenset[int] = frozenset()
        """Fingerprints of peers that others heard and that were not connected at the last ``is_lookup_due``."""
        self._connected: frozenset[PeerId] = frozenset()
        """Peers that were connected then."""

    @property
    def pause_s(self) -> float:
        """Interval after the next lookup."""
        return self._pause.pause_s

    @property
    def stretch(self) -> float:
        """Factor by which intervals are longer than in a small run."""
        return min(MAX_STRETCH, max(1.0, len(self._connected) / FEW))

    @property
    def is_peer_missing(self) -> bool:
        """Whether others hear a peer that is not connected here, or none is connected."""
        return bool(self._missing) or not self._connected

    @property
    def has_looked_up(self) -> bool:
        """Whether the directory was ever asked."""
        return self._look_at is not None

    def is_lookup_due(self, connected: Collection[PeerId], known: Collection[PeerId], now: float) -> bool:
        """Note the ``connected`` peers; whether the directory is to be asked now."""
        missing = self._heard_of() - {fingerprint(peer) for peer in (*connected, self._me)}
        came = any(peer not in known and peer not in self._connected for peer in connected)
        if missing - self._missing:
            self._missing_at = now
        if came or missing - self._missing:
            self.look_soon(now)
        self._missing, self._connected = missing, frozenset(connected)
        if self._look_at is None or not connected:
            return True
        is_sought = missing and now - self._missing_at < UNMET_FOR_S
        return now >= (min(self._look_at, self._looked_at + UNMET_LOOK_S) if is_sought else self._look_at)

    def look_soon(self, now: float) -> None:
        """Look within LOOK_S: something has changed."""
        self._pause.reset()
        if self._look_at is not None:
            self._look_at = min(self._look_at, now + LOOK_S)

    def record_lookup(self, now: float, *, is_news: bool) -> None:
        """The directory was asked; ``is_news``: it named peers, or addresses, that were not known."""
        if is_news:
            self._pause.reset()
        self._look_at, self._looked_at = now + self._pause.next_s() * self.stretch, now


class KnownPoints:
    """The meeting points in the directory. ``lookup`` knows whether a peer is not connected that should be."""

    def __init__(self, directory: Directory, lookup: LookupPolicy) -> None:
        self._directory = directory
        self._lookup = lookup
        self._pause = Backoff(LOOK_S, LOOK_MOST_S)
        self._look_at = self._looked_at = float("-inf")
        self._attended: frozenset[PeerId] = frozenset()
        self._records: dict[PeerId, bytes] = {}

    async def records(self, attended: Collection[PeerId], now: float) -> dict[PeerId, bytes]:
        """Records of the meeting points, as the directory gave them last; it is asked if that is due."""
        if self._attended.difference(attended):
            self._pause.reset()
            self._look_at = now
        self._attended = frozenset(attended)
        if not attended and self._lookup.is_peer_missing:
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
