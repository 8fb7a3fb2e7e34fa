"""One uplink and one downlink for each peer, shared by all of its connections, as homes and sites have them.

Rules of this file:
1. Connections with bulk share an uplink equally, byte by byte; one parcel of a connection goes at a time, the most
   urgent first (``net/shares.py``, ``net/outbox.py``).
2. Control does not wait for bulk, only for control; bulk pays for the bytes.
3. A downlink takes what comes in the order in which it comes, at its own rate.
4. Pure: time is a number, connections are any objects; what is to happen later goes through ``schedule``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from heapq import heapify, heappop, heappush
from typing import Any

import msgspec

from p2pdiloco.protocol.identifiers import PeerId
from p2pdiloco.protocol.messages import Message

PAYLOAD_SHARE = 1448 / 1514
"""Payload in a full packet."""
PACKET_BYTES = 104
"""What a small message takes beside its body: Ethernet, IP, TCP with timestamps (66), TLS (22), frame, sealing."""
OUTBOX_BYTES = 1 << 30
"""Of payloads that may wait on one connection; what comes then is dropped (``net/limits.py``)."""
ROUNDING = 1e-3
"""Bytes by which sums of floats may be off."""

Schedule = Callable[[float, Callable[[Any], None], Any], None]
"""Call the function with the argument at this time."""


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer's line carries, all headers included."""

    up_bytes_per_s: float
    down_bytes_per_s: float


class Parcel(msgspec.Struct, gc=False):
    """Bulk on its way out."""

    size: float
    """On the line."""
    leaves: Callable[[Any], None]
    """Called with the argument when the last byte has left."""
    argument: Any
    is_begun: bool = False


class Uplink:
    """One peer's. Bulk is served in equal shares: while n connections have some, each gets an n-th of the rate, so it
    is enough to count what *one* of them was served."""

    __slots__ = (
        "_at",
        "_bytes_per_s",
        "_control_at",
        "_count",
        "_due",
        "_going",
        "_owed",
        "_schedule",
        "_served",
        "_waiting",
    )

    def __init__(self, bytes_per_s: float, schedule: Schedule) -> None:
        self._bytes_per_s = bytes_per_s
        self._schedule = schedule
        self._at = 0.0
        self._served = 0.0
        """Bytes of bulk for each connection that has some."""
        self._owed = 0.0
        """Control bytes that bulk has not paid for."""
        self._control_at = 0.0
        """When the control that was put has left."""
        self._going: list[tuple[float, int, Hashable, Parcel]] = []
        """A heap: what will have been served when the parcel has left; one parcel a connection."""
        self._waiting: dict[Hashable, list[tuple[float, int, Parcel]]] = {}
        """A heap a connection, by urgency, for all connections in ``_going``."""
        self._count = 0
        self._due = float("inf")
        """When ``_look`` was asked for."""

    def control(self, size: float, now: float) -> float:
        """So many bytes go out before all bulk; when the last of them has left."""
        self._advance(now)
        self._owed += size
        at = self._control_at = max(self._control_at, now) + size / self._bytes_per_s
        return at

    def put(self, connection: Hashable, parcel: Parcel, now: float, urgency: float = 0.0) -> bool:
        """Queue a parcel; lower ``urgency`` goes first. False: too much waits on this connection."""
        waiting = self._waiting.get(connection)
        self._advance(now)
        self._count += 1
        if waiting is None:
            self._waiting[connection] = []
            self._begin(connection, parcel)
        elif sum(other.size for _, _, other in waiting) + parcel.size > OUTBOX_BYTES:
            return False
        else:
            heappush(waiting, (urgency, self._count, parcel))
        self._look_later(now)
        return True

    def waiting(self, connection: Hashable) -> list[Parcel]:
        """What is to go over the connection and is not begun."""
        return [parcel for _, _, parcel in self._waiting.get(connection, ())]

    def clear(self, connection: Hashable, now: float) -> list[Parcel]:
        """The connection is gone: what was to go over it, which takes no more of the line."""
        if connection not in self._waiting:
            return []
        self._advance(now)
        left = [parcel for _, _, parcel in sorted(self._waiting.pop(connection))]
        left += [parcel for _, _, other, parcel in self._going if other is connection]
        self._going = [entry for entry in self._going if entry[2] is not connection]
        heapify(self._going)
        self._look_later(now)
        return left

    def _begin(self, connection: Hashable, parcel: Parcel) -> None:
        parcel.is_begun = True
        heappush(self._going, (self._served + parcel.size, self._count, connection, parcel))

    def _advance(self, now: float) -> None:
        able = (now - self._at) * self._bytes_per_s
        self._at = now
        paid = min(self._owed, able)
        self._owed -= paid
        if self._going:
            self._served += (able - paid) / len(self._going)

    def _look_later(self, now: float) -> None:
        if self._going:
            left = max(0.0, self._going[0][0] - self._served)
            at = now + (left * len(self._going) + self._owed) / self._bytes_per_s
            if at < self._due:
                self._due = at
                self._schedule(at, self._look, at)

    def _look(self, due: float) -> None:
        """Something may have left. If bulk was put meanwhile, it has not yet."""
        if due != self._due:
            return
        self._due = float("inf")
        self._advance(due)
        left = []
        while self._going and self._going[0][0] <= self._served + ROUNDING:
            _, _, connection, parcel = heappop(self._going)
            left.append(parcel)
            waiting = self._waiting[connection]
            if waiting:
                self._count += 1
                self._begin(connection, heappop(waiting)[2])
            else:
                del self._waiting[connection]
        self._look_later(due)
        for parcel in left:
            parcel.leaves(parcel.argument)


class Lines:
    """All peers' own."""

    __slots__ = ("_bandwidths", "_down_at", "_schedule", "_sized", "_uplinks")

    def __init__(self, bandwidths: Mapping[PeerId, Bandwidth], schedule: Schedule) -> None:
        self._bandwidths = bandwidths
        self._schedule = schedule
        self._uplinks: dict[PeerId, Uplink] = {}
        self._down_at: dict[PeerId, float] = {}
        """When a downlink has taken all that has come."""
        self._sized: tuple[Message | None, float] = (None, 0.0)
        """The last message, and its bytes: it goes to many."""

    def uplink(self, peer: PeerId) -> Uplink:
        """The peer's, whichever life of it sends."""
        found = self._uplinks.get(peer)
        if found is None:
            rate = self._bandwidths[peer].up_bytes_per_s
            found = self._uplinks[peer] = Uplink(rate, self._schedule)
        return found

    def control(self, source: PeerId, target: PeerId, message: Message, now: float) -> float:
        """When a message without a payload has gone through both lines, beside the path's delay."""
        if self._sized[0] is not message:
            self._sized = (message, len(msgspec.msgpack.encode(message)) + PACKET_BYTES)
        size = self._sized[1]
        took_s = size / self._bandwidths[target].down_bytes_per_s
        self._down_at[target] = self._down_at.get(target, 0.0) + took_s
        return self.uplink(source).control(size, now) + took_s

    def taken_at(self, target: PeerId, size: float, now: float) -> float:
        """When a parcel of which the last byte comes now has gone through the downlink, which took the others while
        they came."""
        took_s = size / self._bandwidths[target].down_bytes_per_s
        at = max(self._down_at.get(target, 0.0), now - took_s) + took_s
        self._down_at[target] = at
        return at


def on_the_line(payload_bytes: int) -> float:
    """Bytes of a payload with its packets' headers."""
    return payload_bytes / PAYLOAD_SHARE + PACKET_BYTES
