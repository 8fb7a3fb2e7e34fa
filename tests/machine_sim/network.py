"""The simulated network: connections between pairs of processes, and what can go wrong with them.

The rules of ``tests.simulation.network`` hold. Messages with a payload may overtake each other and the rest, as chunked
streams do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from p2pdiloco.protocol.events import Contradicted, PeerConnected, PeerDisconnected, Received
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.messages import Commit, CommitHeader, Contribution, Message, WrongMerge
from p2pdiloco.swarm.neighbours import MOST, surplus, wanted
from p2pdiloco.swarm.peer_manager import LEFT_S
from tests.machine_sim.integer_shards import Payload
from tests.simulation.network import Direction, Key, PairNetwork
from tests.simulation.topologies import Mesh, Pair, pair_of

if TYPE_CHECKING:
    from tests.machine_sim.process import Process
    from tests.machine_sim.world import World

NO_PAYLOAD = Digest("")
OUTBOX_S = 3.0
"""Payloads that would wait longer than this to be sent are dropped: outboxes are bounded."""

ENTRIES = 4
"""Peers that a newcomer finds in the directory of a bounded run."""
STATE_BYTES_PER_S = 2e4
"""No path is slower for states."""


def payload_named(message: Message) -> Digest:
    """The payload that travels with ``message``; empty if none does."""
    match message:
        case Commit():
            return message.header.payload
        case Contribution():
            return message.payload
        case _:
            return NO_PAYLOAD


class LinkQuality(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of one pair."""

    delay_s: float = 0.02
    jitter_s: float = 0.005
    bytes_per_s: float = 1e7


class NetworkSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Rates that hold for the whole network while faults last."""

    duplicated_share: float = 0.0
    """Of messages, delivered a second time."""
    patience_s: float = 8.0
    """How long a cut may last before connections break."""
    redial_s: float = 1.0
    silent_close_share: float = 0.0
    """Of breaks, those that one end learns much later."""
    is_bounded: bool = False
    """Peers connect to those that ``swarm/neighbours.py`` chooses, newcomers to ENTRIES others; else all to all."""
    most_connections: int = MOST


class Delivery(msgspec.Struct, gc=False):
    """A message under way."""

    link: Link
    message: Message
    payload: Payload | None


class Connection:
    """One authenticated connection."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = True


class Link(Direction):
    """One direction of a connection."""

    __slots__ = ("connection", "key", "opened_at", "quality", "source", "target", "waiting")

    def __init__(self, connection: Connection, source: Process, target: Process, quality: LinkQuality) -> None:
        self.opened_at = source.world.now + quality.delay_s
        super().__init__(self.opened_at)
        self.connection = connection
        self.source = source
        self.target = target
        self.key = (source.name, target.name)
        self.quality = quality
        self.waiting: dict[ShardId, tuple[float, Delivery]] = {}
        """By shard, the newest contribution, and when its first byte leaves."""


class Network(PairNetwork[Link]):
    """All connections."""

    def __init__(self, world: World, setting: NetworkSetting) -> None:
        super().__init__(world.random)
        self.world = world
        self.setting = setting
        self.qualities: dict[tuple[PeerId, PeerId], LinkQuality] = {}
        self.slowed: dict[tuple[PeerId, PeerId], LinkQuality] = {}
        self.default = LinkQuality()
        self._spared: dict[Pair, float] = {}
        """Pairs of which one did without the other, and when."""
        self.messages = 0
        self.control_bytes = 0
        self.payload_bytes = 0
        self.is_measured = False
        self._sized: tuple[Message | None, int] = (None, 0)
        """The last message, and its bytes: it goes to many."""

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, link: Link, message: Message, payload: Payload | None, payload_bytes: int) -> None:
        """Put a message on its way."""
        liars = self.world.liars
        if liars is None:
            self._send(link, message, payload, payload_bytes)
            return
        for said in liars.said(link.source.name, message, link.source.setting.lies):
            self._send(link, said, payload, payload_bytes)

    def measure(self, message: Message, payload_bytes: int) -> None:
        """Count what a message takes."""
        if self._sized[0] is not message:
            self._sized = (message, len(msgspec.msgpack.encode(message)) + 16)
        self.control_bytes += self._sized[1]
        self.payload_bytes += payload_bytes

    def _carries(self, link: Link, message: Message, payload: Payload | None, payload_bytes: int) -> bool:
        """Whether a message sets off now; one over a blocked link is held up."""
        self.messages += 1
        if self.is_measured:
            self.measure(message, payload_bytes)
        if not link.connection.is_open or link.is_dead:
            return False
        if link.key in self.blocked:
            link.held.append((message, payload, payload_bytes))
            return False
        return True

    def _send(self, link: Link, message: Message, payload: Payload | None, payload_bytes: int) -> None:
        if not self._carries(link, message, payload, payload_bytes):
            return
        world, quality = self.world, link.quality
        random = world.random.random
        now = world.now
        if payload_bytes:
            if link.payload_at - now > OUTBOX_S:
                return  # the outbox is full
            begins_at = max(link.payload_at, now)
            if isinstance(message, Contribution) and self._replaces(link, message, payload):
                return
        jitter_s = quality.jitter_s * random()
        at = link.arrives_at(now, payload_bytes, quality.bytes_per_s, quality.delay_s, jitter_s)
        at = max(at, link.opened_at)
        delivery = Delivery(link, message, payload)
        if payload_bytes and isinstance(message, Contribution):
            link.waiting[message.shard] = (begins_at, delivery)
        world.schedule(at, link.target, self._deliver, delivery)
        if self.setting.duplicated_share and random() < self.setting.duplicated_share:
            world.schedule(at + 2.0 * random(), link.target, self._deliver, delivery)

    def _replaces(self, link: Link, message: Contribution, payload: Payload | None) -> bool:
        """A contribution that waits to be sent is replaced by a newer one for the same shard, as outboxes do."""
        waits_until, delivery = link.waiting.get(message.shard, (0.0, None))
        if delivery is None or waits_until <= self.world.now:
            return False
        delivery.message, delivery.payload = message, payload
        return True

    def _deliver(self, delivery: Delivery) -> None:
        link = delivery.link
        if link.connection.is_open:
            target, message = link.target, delivery.message
            if self.world.liars is not None and not self.world.liars.is_passed(message):
                return
            if isinstance(message, WrongMerge) and not self.world.auditing.holds(target, link.source, message):
                return
            if delivery.payload is not None:
                target.store[payload_named(message)] = delivery.payload
            target.tell(Received(link.source.name, message))
            if self.world.liars is not None and isinstance(message, Commit) and not target.is_dead:
                self._compare(target, message.header)

    def _compare(self, target: Process, header: CommitHeader) -> None:
        """As a driver does with the signed commits that it has."""
        checks = self.world.checks
        if (proof := checks.honesty.compared(target.name, header)) is not None:
            checks.contradicted(header.owner)
            target.tell(Contradicted(proof))

    def carry(
        self, link: Link, state_bytes: int, slowness: float, action: Callable[[Any], None], argument: Any
    ) -> None:
        """A state comes to the link's source from its target; then, or when it will not come, ``action`` is called."""
        world, quality = self.world, self.quality(link.key[::-1])
        took_s = 2 * quality.delay_s + state_bytes / max(quality.bytes_per_s, STATE_BYTES_PER_S) * slowness
        world.schedule(world.now + took_s, link.source, action, argument)

    # -- connections ---------------------------------------------------------------------------------------------------

    @property
    def redial_s(self) -> float:
        return self.setting.redial_s

    def _later(self, after_s: float, action: Callable[[Any], None], argument: Any) -> None:
        self.world.schedule(self.world.now + after_s, None, action, argument)

    def _direction(self, key: Key) -> Link | None:
        process = self.world.processes.get(key[0])
        return None if process is None else process.links.get(key[1])

    def _meet(self, pair: Pair, *, is_cut: bool) -> bool:
        a, b = (self.world.processes.get(name) for name in pair)
        if a is None or b is None:
            return True  # whoever starts later dials
        link = a.links.get(b.name)
        if link is not None and link.connection.is_open and link.target is b:
            return True
        if self.setting.is_bounded and b.name not in self._wanted(a, [b]) and a.name not in self._wanted(b, [a]):
            return True
        if is_cut or a.is_paused() or b.is_paused() or not self._finds_path(pair):
            return False
        connection = Connection()
        for source, target in ((a, b), (b, a)):
            new = Link(connection, source, target, self.quality((source.name, target.name)))
            self.world.schedule(new.opened_at, target, self._connected, (target, source, connection))
            source.links[target.name] = new
        return True

    def keep_bounded(self, process: Process) -> None:
        """Dial whom a peer of a bounded run wants, end what it can do without, and look again later."""
        if not process.is_paused():
            others = [other for other in self.world.processes.values() if other is not process]
            for name in self._wanted(process, self.random.sample(others, len(others))):
                self.dial_later(process.name, name, 0.1 * self.redial_s * self.random.random())
            if process.machine.core.is_current:
                bits, most = process.machine.core.chains[0].group_bits, self.setting.most_connections
                for name in surplus(process.name, bits, process.links, most):
                    self._spared[pair_of(process.name, name)] = self.world.now
                    self.break_connection(process, name, "it is not needed")
        at = self.world.now + self.redial_s * (0.5 + self.random.random())
        self.world.schedule(at, process, self.keep_bounded, process)

    def _wanted(self, process: Process, others: Sequence[Process]) -> list[PeerId]:
        """Return the names of those of ``others`` that ``process`` dials now."""
        since, here = self.world.now - LEFT_S, process.links.keys()
        names = [one.name for one in others if self._spared.get(pair_of(process.name, one.name), -LEFT_S) <= since]
        if not process.machine.core.is_current:
            return [name for name in names if name not in here][: max(0, ENTRIES - len(here))]
        bits, leaving = process.machine.core.chains[0].group_bits, process.machine.core.membership.roles().leaving
        return wanted(process.name, bits, [name for name in names if name not in here], here - leaving)

    def _finds_path(self, _: Pair) -> bool:
        """Whether a connection of these two can be made now."""
        return True

    def _connected(self, argument: tuple[Process, Process, Connection]) -> None:
        target, source, connection = argument
        if connection.is_open:
            target.tell(PeerConnected(source.name))

    def break_connection(self, a: Process, b_name: PeerId, reason: str) -> None:
        """The connection is gone; both ends learn it, each at its own time."""
        link = a.links.get(b_name)
        if link is None or not link.connection.is_open:
            return
        link.connection.is_open = False
        random = self.world.random.random
        for here, there in ((a, link.target), (link.target, a)):
            after_s = 0.1 * random()
            if random() < self.setting.silent_close_share:
                after_s = 5.0 * random()
            self.world.schedule(
                self.world.now + after_s, here, self._disconnected, (here, there, link.connection, reason)
            )
        self.dial_later(a.name, b_name, self.setting.redial_s * (0.2 + random()))

    def _disconnected(self, argument: tuple[Process, Process, Connection, str]) -> None:
        here, there, connection, reason = argument
        link = here.links.get(there.name)
        if link is not None and link.connection is connection:
            del here.links[there.name]
            here.tell(PeerDisconnected(there.name, reason))

    def vanish(self, process: Process) -> None:
        """The process is dead: its connections are, too."""
        for name in list(process.links):
            self.break_connection(process, name, "connection reset")
        process.links.clear()

    def close_in_order(self, process: Process) -> None:
        """The process has said good-bye: what it sent arrives, then its connections end."""
        for link in process.links.values():
            at = max(link.control_at, link.payload_at + link.quality.delay_s + link.quality.jitter_s, self.world.now)
            self.world.schedule(
                at + 0.001, link.target, self._closed, (link.target, process, link.connection, "closed in order")
            )

    def _closed(self, argument: tuple[Process, Process, Connection, str]) -> None:
        argument[2].is_open = False
        self._disconnected(argument)

    def part(self, apart: Mesh) -> None:
        """From now on these pairs cannot connect, and all others can."""
        before, self.apart = self.apart, apart
        for a, b in sorted(apart - before):
            process = self.world.processes.get(a)
            if process is not None:
                self.break_connection(process, b, "no path")
        for pair in sorted(before - apart):
            self.dial_later(*pair, self.setting.redial_s * (0.2 + self.world.random.random()))

    # -- cuts ----------------------------------------------------------------------------------------------------------

    def _lose_patience_later(self, key: Key, direction: Link) -> None:
        patience_s = self.setting.patience_s * (0.5 + self.random.random())
        self.world.schedule(self.world.now + patience_s, direction.source, self._lose_patience, direction)

    def _lose_patience(self, link: Link) -> None:
        if link.key in self.blocked and link.connection.is_open:
            self.break_connection(link.source, link.target.name, "timed out")

    def _resume(self, direction: Link, held: tuple[Message, Payload | None, int]) -> None:
        self.send(direction, *held)

    # -- slow links ----------------------------------------------------------------------------------------------------

    def quality(self, key: tuple[PeerId, PeerId]) -> LinkQuality:
        """What the direction is like now."""
        return self.slowed.get(key) or self.qualities.get(key, self.default)

    def slow_down(self, key: tuple[PeerId, PeerId], quality: LinkQuality) -> None:
        """This direction is like this for a while."""
        self.slowed[key] = quality
        self._update(key)

    def speed_up(self, key: tuple[PeerId, PeerId]) -> None:
        """This direction is as it was made."""
        self.slowed.pop(key, None)
        self._update(key)

    def _update(self, key: tuple[PeerId, PeerId]) -> None:
        if (link := self._direction(key)) is not None:
            link.quality = self.quality(key)
