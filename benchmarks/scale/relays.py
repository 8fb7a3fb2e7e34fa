"""The volunteers' network: ids and signatures have the sizes that they have outside of the simulator, and a peer that
can be dialled joins the connections of two that cannot connect directly.

Rules of this file, after nat/introducer.py and nat/rendezvous_server.py:
1. Each peer of a pair is registered with a few of all living relays (``drawn_points``), without a bootstrap. One of
   these that has room relays the pair, or, if none has, one with a free place; without one the pair tries again. Room
   and budget follow the relay's line from ``lines_known_at`` on, when it has measured that. Then it ends the pairs
   beyond its room, the latest first, and these dial again.
2. Both paths' delays add. A payload takes the relay's downlink, then its budget, in the order of arrival (it is paid
   for afterwards, and a payload is smaller than the largest turn), then its share of the relay's uplink. States, which
   are tiny here, and messages without a payload take only the delays.
3. While a payload of a direction is at the relay, its source begins no other one: TCP's flow control holds it back.
4. A payload's message goes with it, on the line and through relays.
5. When the relay ends, its pairs break at once; when it falls silent, after DEAD_AFTER_S. Then they dial again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

import msgspec

from p2pdiloco.nat.rendezvous_client import POINTS
from p2pdiloco.nat.rendezvous_server import USUAL_BYTES_PER_S, USUAL_RELAYS, relay_limits
from p2pdiloco.protocol.groups import group_bits
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.messages import SIGNATURE_BYTES, Commit, Contribution, Message
from p2pdiloco.swarm.reachability import drawn_points
from p2pdiloco.transport.sockets import DEAD_AFTER_S
from p2pdiloco.wire.directory_records import RELAYS
from tests.machine_sim.integer_shards import Payload
from tests.machine_sim.network import Delivery, Link, LinkQuality
from tests.machine_sim.process import Process
from tests.machine_sim.shared_link_network import Bandwidth, Parcel, SharedNetwork, on_the_line
from tests.machine_sim.world import World
from tests.simulation.network import Key
from tests.simulation.topologies import Pair, pair_of

LEARNER_BYTES = 61
"""A learner's id: its peer's, a stroke and eight digits."""


def body_bytes(message: Message) -> int:
    """Return the bytes of a message with a payload, without it."""
    size = len(msgspec.msgpack.encode(message))
    if isinstance(message, Commit | Contribution):
        signed = message.header.contributors if isinstance(message, Commit) else message.contributors
        size += sum(LEARNER_BYTES - len(one.learner) + SIGNATURE_BYTES for one in signed)
    return size


class RelayedNetwork(SharedNetwork):
    """See the module's rules."""

    def __init__(
        self, world: World, bandwidths: Mapping[PeerId, Bandwidth], own_bytes_per_s: float, together: int
    ) -> None:
        super().__init__(world, bandwidths)
        self._bandwidths = bandwidths
        self._together = together
        """Peers of which each is connected to all others; more make groups."""
        self._own_bytes_per_s = own_bytes_per_s
        """Payloads that each peer sends on average."""
        self.lines_known_at = 0.0
        self.relays: set[PeerId] = set()
        """Peers that relay while they live."""
        self.unreachable: set[Pair] = set()
        """Pairs that connect only over a relay."""
        self.relay_of: dict[Pair, PeerId] = {}
        """The relay of each pair that is relayed now."""
        self.relayed_bytes = 0
        """Bytes of payloads that went over relays while ``is_measured``."""
        self._budget_at: dict[PeerId, float] = {}
        """When each relay's budget allows more."""
        self._bodies: tuple[Message | None, int] = (None, 0)
        """The last message that came with a payload, and its bytes: it goes to many."""

    def _send(self, link: Link, message: Message, payload: Payload | None, payload_bytes: int) -> None:
        if payload_bytes and self._bodies[0] is not message:
            self._bodies = (message, body_bytes(message))
        super()._send(link, message, payload, payload_bytes and payload_bytes + self._bodies[1])

    def measure(self, message: Message, payload_bytes: int) -> None:
        if not payload_bytes:
            super().measure(message, 0)
            return
        self.control_bytes += self._bodies[1]
        self.payload_bytes += payload_bytes - self._bodies[1]

    def limits(self, relay: PeerId) -> tuple[float, int]:
        """Return the budget of a relay, and the number of pairs for which it has room."""
        if self.world.now < self.lines_known_at:
            return USUAL_BYTES_PER_S, USUAL_RELAYS
        line, peers = self._bandwidths[relay].up_bytes_per_s, len(self.world.processes)
        groups = 1 << group_bits(peers, self._together)
        return relay_limits("auto", line, self._own_bytes_per_s, peers // groups + groups - 2)

    def make_room(self, _: object) -> None:
        """All relays know their lines now, and end the pairs for which they have no room."""
        for relay in sorted(self.relays):
            pairs = [pair for pair, one in self.relay_of.items() if one == relay]
            self._part(pairs[self.limits(relay)[1] :], "its relay has no room")

    def _finds_path(self, pair: Pair) -> bool:
        if pair not in self.unreachable:
            return True
        taken = Counter(self.relay_of.values())
        asked = [relay for peer in pair for relay in self._points(peer) if taken[relay] < RELAYS]
        roomy = [relay for relay in asked if taken[relay] < self.limits(relay)[1]]
        for relay in (roomy or asked)[:1]:
            self.relay_of[pair] = relay
        return bool(asked)

    def _points(self, peer: PeerId) -> tuple[PeerId, ...]:
        """Return the relays with which a peer is registered; a relay's own record names none."""
        if peer in self.relays:
            return ()
        living = {
            name for name in self.relays & self.world.processes.keys() if not self.world.processes[name].is_paused()
        }
        return drawn_points(peer, {relay: self.limits(relay)[1] for relay in living})[:POINTS]

    def quality(self, key: Key) -> LinkQuality:
        relay = self.relay_of.get(pair_of(*key))
        if relay is None:
            return super().quality(key)
        near, far = super().quality((key[0], relay)), super().quality((relay, key[1]))
        return LinkQuality(
            delay_s=near.delay_s + far.delay_s,
            jitter_s=near.jitter_s + far.jitter_s,
            bytes_per_s=min(near.bytes_per_s, far.bytes_per_s),
        )

    def _left(self, argument: tuple[Delivery, int]) -> None:
        delivery, payload_bytes = argument
        link = delivery.link
        relay = self.relay_of.get(pair_of(*link.key))
        if relay is None or link.is_dead or not link.connection.is_open:
            super()._left(argument)
            return
        if self.is_measured:
            self.relayed_bytes += payload_bytes
        size, now = on_the_line(payload_bytes), self.world.now
        took_s = size / self.limits(relay)[0]
        begins_at = max(self._budget_at.get(relay, 0.0), self.lines.taken_at(relay, size, now) - took_s)
        self._budget_at[relay] = begins_at + took_s
        self.lines.uplink(link.source.name).hold(link)
        parcel = Parcel(size, self._left_relay, argument)
        self.world.schedule(begins_at + took_s, None, partial(self._pass_on, relay), parcel)

    def _pass_on(self, relay: PeerId, parcel: Parcel) -> None:
        if parcel.argument[0].link.connection.is_open:
            self.lines.uplink(relay).put(parcel.argument[0].link, parcel, self.world.now)

    def _left_relay(self, argument: tuple[Delivery, int]) -> None:
        link = argument[0].link
        self.lines.uplink(link.source.name).release(link, self.world.now)
        super()._left(argument)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _clear(self, link: Link) -> None:
        back = link.target.links.get(link.source.name)
        relay = self.relay_of.pop(pair_of(*link.key), None)
        super()._clear(link)
        for gone in (link, back):
            if relay is not None and gone is not None:
                self.lines.uplink(relay).clear(gone, self.world.now)

    def vanish(self, process: Process) -> None:
        super().vanish(process)
        self.stop_relaying(process.name)

    def close_in_order(self, process: Process) -> None:
        super().close_in_order(process)
        self.stop_relaying(process.name)

    def silence(self, relay: PeerId) -> None:
        """This peer's machine is gone, and nobody is told."""
        for a, b in self._pairs_of(relay):
            for key in ((a, b), (b, a)):
                if (link := self._direction(key)) is not None:
                    link.is_dead = True
        self._later(DEAD_AFTER_S, self.stop_relaying, relay)

    def stop_relaying(self, relay: PeerId) -> None:
        """The pairs of this relay break."""
        self._part(self._pairs_of(relay), "its relay is gone")

    def _part(self, pairs: Iterable[Pair], reason: str) -> None:
        for a, b in pairs:
            for name, other in ((a, b), (b, a)):
                if (process := self.world.processes.get(name)) is not None:
                    self.break_connection(process, other, reason)

    def _pairs_of(self, relay: PeerId) -> list[Pair]:
        return sorted(pair for pair, one in self.relay_of.items() if one == relay)
