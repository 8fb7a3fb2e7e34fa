"""Decides when to query the directory: only when needed, since the cost of a lookup grows with the run.

Rules of this file:
1. Peers. A peer without connections queries every LOOK_S. It queries soon when an unknown peer connects, when a peer
   disconnects, and when heartbeats name a peer that is connected to others but not to this one. Otherwise the interval
   doubles. Above FEW peers it is stretched in proportion, since an answer holds all records, but at most MAX_STRETCH
   times: in an open run, most records may belong to attackers. There peers come and go all the time: the interval is
   at least LARGE_LOOK_S, as newcomers query themselves.
2. Rendezvous servers. A peer queries soon when it has lost one of its servers, or when a peer is missing and it has no
   server. Otherwise the interval doubles while nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from p2pdiloco.discovery.directory import Directory, DirectoryError
from p2pdiloco.protocol.ids import PeerId, fingerprint
from p2pdiloco.timing import Backoff

# Shortest and longest interval between two lookups. A lookup costs some 600 kB in a run of 64 peers. With at most
# 300 s, idle peers would use 5.0 kB/s instead of 4.8 (benchmarks/notes.md, idle traffic).
LOOK_S, LOOK_MOST_S = 2.0, 600.0
FEW = 16
MAX_STRETCH = 4.0
LARGE_LOOK_S = 30.0
# Longest interval while a peer is missing, and for how long it applies after a peer went missing. The rendezvous
# servers of that peer may change, for example because one has died.
UNMET_LOOK_S, UNMET_FOR_S = 6.0, 120.0
# Longest interval between two lookups of rendezvous servers while this peer has none and a peer is missing.
UNMET_MOST_S = 30.0


class LookupPolicy:
    """Decides when ``me`` looks up the other peers of its run.

    heard_of: returns the fingerprints of all peers to which other peers are connected.
    """

    def __init__(self, me: PeerId, heard_of: Callable[[], frozenset[int]]) -> None:
        self._me = me
        self._heard_of = heard_of
        # Interval after the next lookup, before the stretch.
        self.pause = Backoff(LOOK_S, LOOK_MOST_S)
        self._look_at: float | None = None
        self._looked_at = self._missing_at = float("-inf")
        # At the last ``is_lookup_due``: fingerprints of peers that were connected to others but not to this peer.
        self._missing: frozenset[int] = frozenset()
        # Peers that were connected at the last ``is_lookup_due``.
        self._connected: frozenset[PeerId] = frozenset()

    @property
    def stretch(self) -> float:
        """Factor by which intervals are stretched in a large run."""
        return min(MAX_STRETCH, max(1.0, len(self._connected) / FEW))

    @property
    def least_s(self) -> float:
        """Shortest interval between two lookups, in seconds."""
        return LARGE_LOOK_S if len(self._connected) > FEW else LOOK_S

    @property
    def is_peer_missing(self) -> bool:
        """True if no peer is connected, or if others are connected to a peer that this one is not connected to."""
        return bool(self._missing) or not self._connected

    @property
    def has_looked_up(self) -> bool:
        """True once the directory has been queried."""
        return self._look_at is not None

    def is_lookup_due(self, connected: Collection[PeerId], known: Collection[PeerId], now: float) -> bool:
        """Note the ``connected`` peers, and return whether to query the directory now."""
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
        sought_at = self._looked_at + max(UNMET_LOOK_S, self.least_s)
        return now >= (min(self._look_at, sought_at) if is_sought else self._look_at)

    def look_soon(self, now: float) -> None:
        """Make the next lookup due within LOOK_S, after a change; in a large run, within LARGE_LOOK_S."""
        self.pause.reset()
        if self._look_at is not None:
            self._look_at = min(self._look_at, max(now + LOOK_S, self._looked_at + self.least_s))

    def record_lookup(self, now: float, *, is_news: bool) -> None:
        """Record a lookup. ``is_news``: it returned new peers or addresses."""
        if is_news:
            self.pause.reset()
        self._look_at, self._looked_at = now + max(self.least_s, self.pause.next_s() * self.stretch), now


class KnownPoints:
    """Cache of the rendezvous servers in the directory. ``lookup`` knows whether a peer is missing."""

    def __init__(self, directory: Directory, lookup: LookupPolicy) -> None:
        self._directory = directory
        self._lookup = lookup
        self._pause = Backoff(LOOK_S, LOOK_MOST_S)
        self._look_at = self._looked_at = float("-inf")
        self._attended: frozenset[PeerId] = frozenset()
        self._records: dict[PeerId, bytes] = {}

    async def records(self, attended: Collection[PeerId], now: float) -> dict[PeerId, bytes]:
        """Return the records of the rendezvous servers. The directory is queried first if that is due.

        attended: servers with which this peer is registered.
        """
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
