"""A simulated network in which each peer has one line of its own for all of its connections.

Rules of this file:
1. A pair's bandwidth is only what its path carries at most; the ends' lines carry all pairs' traffic.
2. States go through the donor's uplink, too, after its payloads.
3. What has left goes on when its sender stands still: the kernel has it. What waits on a broken connection is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from p2pdiloco.protocol.identifiers import PeerId
from p2pdiloco.protocol.messages import Contribution, Message
from p2pdiloco.simulation.network import OUTBOX_S, STATE_BYTES_PER_S, Connection, Delivery, Link, Network
from p2pdiloco.simulation.shards import Payload
from p2pdiloco.simulation.uplinks import Bandwidth, Lines, Parcel, on_the_line

if TYPE_CHECKING:
    from p2pdiloco.simulation.driver import Process
    from p2pdiloco.simulation.world import World

STATE_URGENCY, CLOSE_URGENCY = 10.0, 100.0
"""States go after payloads, as in ``peer/respondent.py``; the end after all."""


def share_lines(world: World, bandwidths: Mapping[PeerId, Bandwidth]) -> None:
    """Each peer of a world that has not begun has a line of its own from now on."""
    before = world.network
    world.network = SharedNetwork(world, bandwidths)
    world.network.qualities, world.network.default = before.qualities, before.default


class SharedNetwork(Network):
    """See the module's rules."""

    def __init__(self, world: World, bandwidths: Mapping[PeerId, Bandwidth]) -> None:
        super().__init__(world, world.network.setting)
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
            if isinstance(old, Contribution) and old.shard == message.shard:
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
