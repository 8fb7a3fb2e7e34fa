"""The peers of a run that this peer has heard of: how each can be reached, and how dialling it went.

Rules of this file:
1. At most MAX_KNOWN peers are known, and nobody fills the table for good: peers that were dialled most often in vain
   make room for peers that were not tried yet.
2. A record that a connected peer gave of itself is newer than the one in the directory.
3. After a peer has said goodbye, records of the life that is over are ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, ItemsView, Iterator

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.timing import Backoff
from p2pdiloco.wire.directory_records import PeerRecord

MAX_KNOWN = 1024
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 30.0
"""Between two dials of a peer."""
DIRECT_S, DIRECT_MOST_S = 30.0, 600.0
"""Between two attempts to replace a relayed connection by a direct one."""


class KnownPeer:
    """One peer, as it is known and was dialled. Times are the event loop's."""

    __slots__ = (
        "dials",
        "direct_looks",
        "is_dialling",
        "is_first_hand",
        "left_s",
        "next_dial_at",
        "next_direct_at",
        "reached_at",
        "record",
        "refusals",
        "since",
    )

    def __init__(self, since: float) -> None:
        self.record = PeerRecord(())
        self.since = since
        """When it became known, or its last connection was lost."""
        self.next_dial_at = since
        self.reached_at = float("-inf")
        """When a dial last succeeded."""
        self.dials = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        """Pauses between dials; its failures are dials in a row that failed."""
        self.refusals = 0
        """Dials that were answered by a no, or by somebody else."""
        self.is_dialling = False
        self.left_s: float | None = None
        """When it said goodbye, by the directory's clock; None: it has not, or has come back."""
        self.is_first_hand = False
        """The record is the peer's own word, over a connection that lasts."""
        self.next_direct_at: float | None = None
        """When a direct connection is tried to a peer that is connected over a relay."""
        self.direct_looks = Backoff(DIRECT_S, DIRECT_MOST_S)


class KnownPeers:
    """See the module's rules. ``me`` is never one of them."""

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
        """What is known of ``peer``, or None."""
        return self._known.get(peer)

    def items(self) -> ItemsView[PeerId, KnownPeer]:
        """All of them."""
        return self._known.items()

    def records(self) -> dict[PeerId, PeerRecord]:
        """How each can be reached."""
        return {peer: known.record for peer, known in self._known.items()}

    def points_of(self, peer: PeerId) -> tuple[str, ...]:
        """Addresses of the meeting points at which ``peer`` can be met."""
        known = self._known.get(peer)
        return () if known is None else known.record.points

    def learn(self, peer: PeerId, record: PeerRecord, now: float, since: float | None = None) -> bool:
        """Take ``record`` over, if it is not of a life that is over; whether it is news.

        since: when a peer that was not known counts as known (default: now).
        """
        if peer == self._me:
            return False
        known = self._known.get(peer)
        if known is None:
            if not self.free_places:
                return False
            known = self._known[peer] = KnownPeer(now if since is None else since)
        if known.left_s is not None and record.began_s <= known.left_s:
            return False
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
        """Take over what a connected peer says of itself."""
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
        """How many more can be known."""
        return MAX_KNOWN - len(self._known)

    def make_room(self, places: int, connected: Collection[PeerId]) -> None:
        """Forget peers that were dialled most often in vain until ``places`` are free; never those ``connected``."""
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
