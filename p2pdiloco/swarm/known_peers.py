"""Table of the known peers of a run: their records, and the state of dialling them.

Rules of this file:
1. The table holds at most MAX_KNOWN peers. Nobody can fill it for good: the peers with the most failed dials make room
   for peers that were not tried yet.
2. A record that a connected peer sent about itself is newer than the one in the directory.
3. After a peer has left gracefully, records of that incarnation are ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, ItemsView, Iterator

from msgspec import Struct, field

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.timing import Backoff
from p2pdiloco.wire.directory_records import PeerRecord

MAX_KNOWN = 4096
# First and longest pause between two dials of a peer.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 30.0
# First and longest pause between two attempts to replace a relayed connection by a direct one.
DIRECT_S, DIRECT_MOST_S = 30.0, 600.0


class KnownPeer(Struct, eq=False):
    """One known peer and the state of dialling it. Times are those of the event loop."""

    since: float
    """Time at which it became known, or at which its last connection was lost."""
    next_dial_at: float
    record: PeerRecord = PeerRecord(())
    reached_at: float = float("-inf")
    """Time of the last successful dial."""
    dials: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S))
    """Pauses between dials; it also counts consecutive failed dials (``failures``)."""
    refusals: int = 0
    """Number of dials that were refused, or answered by another peer."""
    is_dialling: bool = False
    left_s: float | None = None
    """Time of its graceful leave, by the directory's clock; None: it has not left, or has come back."""
    is_first_hand: bool = False
    """True if the peer itself sent the record over a connection that is still open."""
    next_direct_at: float | None = None
    """Time of the next attempt to replace its relayed connection by a direct one."""
    direct_looks: Backoff = field(default_factory=lambda: Backoff(DIRECT_S, DIRECT_MOST_S))


class KnownPeers:
    """Table of known peers. It never contains ``me``."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._known: dict[PeerId, KnownPeer] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, peer: object) -> bool:
        return peer in self._known

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._known)

    def get(self, peer: PeerId) -> KnownPeer | None:
        """Return the entry of ``peer``, or None."""
        return self._known.get(peer)

    def items(self) -> ItemsView[PeerId, KnownPeer]:
        """Return all peers with their entries."""
        return self._known.items()

    def records(self) -> dict[PeerId, PeerRecord]:
        """Return the record of each known peer."""
        return {peer: known.record for peer, known in self._known.items()}

    def points_of(self, peer: PeerId) -> tuple[str, ...]:
        """Return the addresses of the rendezvous servers with which ``peer`` is registered."""
        known = self._known.get(peer)
        return () if known is None else known.record.points

    def learn(self, peer: PeerId, record: PeerRecord, now: float, since: float | None = None) -> bool:
        """Store ``record``, unless it belongs to an incarnation that has left. Return whether its addresses are new.

        since: time from which a new peer counts as known (default: now).
        """
        if peer == self._me:
            return False
        known = self._known.get(peer)
        if known is None:
            if not self.free_places:
                return False
            since = now if since is None else since
            known = self._known[peer] = KnownPeer(since, next_dial_at=since)
        if known.left_s is not None and record.began_s <= known.left_s:
            return False  # a record of the incarnation that has left
        is_back, known.left_s = known.left_s is not None, None
        where = (record.addresses, record.points, record.seen)
        is_other = is_back or where != (known.record.addresses, known.record.points, known.record.seen)
        is_news = any(where[:2]) and is_other
        if is_news:
            known.dials.reset()
            known.next_dial_at = now
        if any(where[:2]):
            known.record = record
        return is_news

    def learn_first_hand(self, peer: PeerId, record: PeerRecord, now: float, connected: Collection[PeerId]) -> None:
        """Store a record that a connected peer sent about itself."""
        known = self._known.get(peer)
        if known is None:
            self.make_room(1, connected)
        else:
            known.left_s = None
        self.learn(peer, record, now)
        if (known := self._known.get(peer)) is not None:
            known.is_first_hand = True

    @property
    def free_places(self) -> int:
        """Number of free places in the table."""
        return MAX_KNOWN - len(self._known)

    def make_room(self, places: int, connected: Collection[PeerId]) -> None:
        """Forget the peers with the most failed dials until ``places`` are free, but none of those ``connected``."""
        missing = places - self.free_places
        if missing <= 0:
            return
        vain = [
            (known.dials.failures, peer)
            for peer, known in self._known.items()
            if known.dials.failures and not known.is_dialling and peer not in connected
        ]
        for _, peer in heapq.nlargest(missing, vain):
            del self._known[peer]
