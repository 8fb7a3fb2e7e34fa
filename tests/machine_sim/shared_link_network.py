"""A simulated network in which each peer has one line of its own for all of its connections.

Rules of this file:
1. A pair's bandwidth is only what its path carries at most; the ends' lines carry all pairs' traffic.
2. States go through the donor's uplink, too, after its payloads.
3. What has left goes on when its sender stands still: the kernel has it. What waits on a broken connection is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import msgspec

from p2pdiloco.net.send_queue import URGENT
from p2pdiloco.net.traffic_shaping import PEER_TURN_BYTES, slice_bytes
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.messages import Contribution, Message
from tests.machine_sim.integer_shards import Payload
from tests.machine_sim.network import OUTBOX_S, STATE_BYTES_PER_S, Connection, Delivery, Link, Network

if TYPE_CHECKING:
    from tests.machine_sim.process import Process
    from tests.machine_sim.world import World


STATE_URGENCY, CLOSE_URGENCY = 10.0, 100.0
"""States go after payloads, as in ``peer/state_server.py``; the end after all."""


def share_lines(world: World, bandwidths: Mapping[PeerId, Bandwidth]) -> None:
    """Each peer of a world that has not begun has a line of its own from now on."""
    before = world.network
    world.network = SharedNetwork(world, bandwidths)
    world.network.qualities, world.network.default = before.qualities, before.default


class SharedNetwork(Network):
    """See the module's rules."""

    def __init__(self, world: World, bandwidths: Mapping[PeerId, Bandwidth]) -> None:
        super().__init__(world, world.network.setting)
        self.fetched_bytes = 0
        """Bytes of states and of audited payloads that were fetched while ``is_measured``."""
        self.lines = Lines(bandwidths, lambda at, action, argument: world.schedule(at, None, action, argument))

    def _send(self, link: Link, message: Message, payload: Payload | None, payload_bytes: int) -> None:
        if not self._carries(link, message, payload, payload_bytes):
            return
        now, source = self.world.now, link.source.name
        delivery = Delivery(link, message, payload)
        if not payload_bytes:
            at = self.lines.control(source, link.target.name, message, now) + self._path_s(link)
            link.control_at = max(at, link.control_at)
            self._deliver_at(link.control_at, delivery)
            return
        if isinstance(message, Contribution) and self._replaced(link, message, payload):
            return
        parcel = Parcel(on_the_line(payload_bytes), self._left, (delivery, payload_bytes))
        self.lines.uplink(source).put(link, parcel, now)

    def _replaced(self, link: Link, message: Contribution, payload: Payload | None) -> bool:
        """A contribution that waits is replaced by a newer one for the same shard."""
        for parcel in self.lines.uplink(link.source.name).waiting(link):
            waiting = parcel.argument[0]
            old = waiting.message if isinstance(waiting, Delivery) else None
            if isinstance(old, Contribution) and (old.shard, old.giver) == (message.shard, message.giver):
                waiting.message, waiting.payload = message, payload
                return True
        return False

    def _left(self, argument: tuple[Delivery, int]) -> None:
        """A payload's last byte has left its sender."""
        delivery, payload_bytes = argument
        link = delivery.link
        if not link.connection.is_open or link.is_dead:
            return
        if link.key in self.blocked:
            link.held.append((delivery.message, delivery.payload, payload_bytes))
            return
        if link.payload_at - self.world.now > OUTBOX_S:
            return  # the path carries less than comes
        at = self._taken_at(link, payload_bytes, link.quality.bytes_per_s) + self._path_s(link)
        self._deliver_at(max(at, link.opened_at), delivery)

    def _taken_at(self, link: Link, payload_bytes: int, path_bytes_per_s: float) -> float:
        """When what has left now has gone through the path and the other side's downlink, beside the delay."""
        took_s = payload_bytes / path_bytes_per_s
        link.payload_at = max(link.payload_at, self.world.now - took_s) + took_s
        return max(link.payload_at, self.lines.taken_at(link.target.name, on_the_line(payload_bytes), self.world.now))

    def _path_s(self, link: Link) -> float:
        return link.quality.delay_s + link.quality.jitter_s * self.world.random.random()

    def _deliver_at(self, at: float, delivery: Delivery) -> None:
        world, share = self.world, self.setting.duplicated_share
        world.schedule(at, delivery.link.target, self._deliver, delivery)
        if share and world.random.random() < share:
            world.schedule(at + 2.0 * world.random.random(), delivery.link.target, self._deliver, delivery)

    def carry(
        self, link: Link, state_bytes: int, slowness: float, action: Callable[[Any], None], argument: Any
    ) -> None:
        back = link.target.links.get(link.source.name)
        if back is None or back.connection is not link.connection:
            self.world.schedule(self.world.now, link.source, action, argument)
            return
        if self.is_measured:
            self.fetched_bytes += state_bytes
        parcel = Parcel(on_the_line(state_bytes), self._state_left, (back, state_bytes, action, argument))
        self.lines.uplink(link.target.name).put(back, parcel, self.world.now, STATE_URGENCY)

    def _state_left(self, argument: tuple[Link, int, Callable[[Any], None], Any]) -> None:
        """A state has left its donor, or never will."""
        link, state_bytes, action, wanted = argument
        at = self.world.now
        if link.connection.is_open:
            rate = max(link.quality.bytes_per_s, STATE_BYTES_PER_S)
            at = self._taken_at(link, state_bytes, rate) + self._path_s(link)
        self.world.schedule(at, link.target, action, wanted)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def break_connection(self, a: Process, b_name: PeerId, reason: str) -> None:
        link = a.links.get(b_name)
        super().break_connection(a, b_name, reason)
        if link is not None and not link.connection.is_open:
            self._clear(link)

    def _clear(self, link: Link) -> None:
        """What waits for the connection, both ways, is lost."""
        back = link.target.links.get(link.source.name)
        for gone in (link, back):
            if gone is not None and gone.connection is link.connection:
                for parcel in self.lines.uplink(gone.source.name).clear(gone, self.world.now):
                    parcel.leaves(parcel.argument)

    def close_in_order(self, process: Process) -> None:
        for link in process.links.values():
            end = Parcel(0.0, self._close_later, (link, process))
            self.lines.uplink(process.name).put(link, end, self.world.now, CLOSE_URGENCY)

    def _close_later(self, argument: tuple[Link, Process]) -> None:
        link, process = argument
        last = max(link.control_at, self._taken_at(link, 0, 1.0) + link.quality.delay_s + link.quality.jitter_s)
        end = (link.target, process, link.connection, "closed in order")
        self.world.schedule(last + 0.001, link.target, self._closed, end)

    def _closed(self, argument: tuple[Process, Process, Connection, str]) -> None:
        here, there = argument[:2]
        link = here.links.get(there.name)
        super()._closed(argument)
        if link is not None and link.connection is argument[2]:
            self._clear(link)


# -- One uplink and one downlink for each peer, shared by all of its connections, as homes and sites have --------------
# Rules of this file:
# 1. Connections with bulk take turns of a parcel, or PEER_TURN_BYTES of a larger one, or a slice of a state: that which
#    was served least. Of a connection, the most urgent parcel goes first (``net/traffic_shaping.py``,
#    ``net/send_queue.py``).
# 2. Control does not wait for bulk, only for control; bulk pays for the bytes.
# 3. A downlink takes what comes in the order in which it comes, at its own rate.
# 4. Pure: time is a number, connections are any objects; what is to happen later goes through ``schedule``.


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
    left: float = 0.0
    """Bytes that have not left yet, once it is begun."""
    turn: float = PEER_TURN_BYTES
    """Bytes that go before others' parcels."""


class Uplink:
    """One peer's."""

    __slots__ = (
        "_at",
        "_begun",
        "_bytes_per_s",
        "_control_at",
        "_count",
        "_due",
        "_held",
        "_level",
        "_owed",
        "_schedule",
        "_served",
        "_turn",
        "_turn_left",
        "_waiting",
        "sent",
    )

    def __init__(self, bytes_per_s: float, schedule: Schedule) -> None:
        self._bytes_per_s = bytes_per_s
        self._schedule = schedule
        self.sent = 0.0
        """Bytes that have left; control as soon as it was put."""
        self._at = 0.0
        self._owed = 0.0
        """Control bytes that bulk has not paid for."""
        self._control_at = 0.0
        """When the control that was put has left."""
        self._served: dict[Hashable, tuple[float, int]] = {}
        """Bytes of bulk that each connection was served, and its place behind those that were served as much."""
        self._level = 0.0
        """Bytes served to the last chosen connection, before its turn; one that rested counts from there."""
        self._begun: dict[Hashable, Parcel] = {}
        """One parcel a connection."""
        self._waiting: dict[Hashable, list[tuple[float, int, Parcel]]] = {}
        """A heap a connection, by urgency."""
        self._held: set[Hashable] = set()
        """Connections of which no parcel begins."""
        self._turn: Hashable | None = None
        """The connection whose parcel goes now."""
        self._turn_left = 0.0
        self._count = 0
        self._due = float("inf")
        """When ``_look`` was asked for."""

    def control(self, size: float, now: float) -> float:
        """So many bytes go out before all bulk; when the last of them has left."""
        self._advance(now)
        self.sent += size
        self._owed += size
        at = self._control_at = max(self._control_at, now) + size / self._bytes_per_s
        return at

    def put(self, connection: Hashable, parcel: Parcel, now: float, urgency: float = 0.0) -> bool:
        """Queue a parcel; lower ``urgency`` goes first. False: too much waits on this connection."""
        waiting = self._waiting.setdefault(connection, [])
        self._advance(now)
        if sum(other.size for _, _, other in waiting) + parcel.size > OUTBOX_BYTES:
            return False
        self._count += 1
        if urgency > URGENT:
            parcel.turn = slice_bytes(self._bytes_per_s)
        heappush(waiting, (urgency, self._count, parcel))
        self._served.setdefault(connection, (0.0, self._count))
        self._look_later(now)
        return True

    def waiting(self, connection: Hashable) -> list[Parcel]:
        """What is to go over the connection and is not begun."""
        return [parcel for _, _, parcel in sorted(self._waiting.get(connection, ()))]

    def clear(self, connection: Hashable, now: float) -> list[Parcel]:
        """The connection is gone: what was to go over it, which takes no more of the line."""
        self._held.discard(connection)
        self._advance(now)
        left = self.waiting(connection)
        left += [self._begun.pop(connection)] if connection in self._begun else []
        self._waiting.pop(connection, None)
        self._served.pop(connection, None)
        if self._turn is connection:
            self._turn = None
        self._look_later(now)
        return left

    def hold(self, connection: Hashable) -> None:
        """Begin no parcel of the connection until ``release``."""
        self._held.add(connection)

    def release(self, connection: Hashable, now: float) -> None:
        """End ``hold``."""
        if connection in self._held:
            self._held.discard(connection)
            self._advance(now)
            self._look_later(now)

    def _advance(self, now: float) -> None:
        able = (now - self._at) * self._bytes_per_s
        self._at = now
        paid = min(self._owed, able)
        self._owed -= paid
        if self._turn is not None:
            self._begun[self._turn].left -= able - paid
            self._turn_left -= able - paid

    def _look_later(self, now: float) -> None:
        if self._turn is None:
            self._next_turn()
        if self._turn is not None:
            left = max(0.0, min(self._begun[self._turn].left, self._turn_left))
            at = now + (left + self._owed) / self._bytes_per_s
            if at < self._due:
                self._due = at
                self._schedule(at, self._look, at)

    def _next_turn(self) -> None:
        able = {one for one, waiting in self._waiting.items() if waiting and one not in self._held} | self._begun.keys()
        if not able:
            return
        self._turn = turn = min(able, key=self._served.__getitem__)
        if turn not in self._begun:
            parcel = self._begun[turn] = heappop(self._waiting[turn])[2]
            parcel.left = parcel.size
        parcel = self._begun[turn]
        self._level, self._turn_left = max(self._level, self._served[turn][0]), parcel.turn
        self._count += 1
        self._served[turn] = (self._level + min(parcel.left, parcel.turn), self._count)

    def _look(self, due: float) -> None:
        """Something may have left. If bulk was put meanwhile, it has not yet."""
        if due != self._due:
            return
        self._due = float("inf")
        self._advance(due)
        turn, left = self._turn, None
        if turn is not None and self._begun[turn].left <= ROUNDING:
            left = self._begun.pop(turn)
            self.sent += left.size
        if turn is not None and (left is not None or self._turn_left <= ROUNDING):
            self._turn = None
        self._look_later(due)
        if left is not None:
            left.leaves(left.argument)


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
