"""Connections between simulated peers: messages with their payloads, questions and answers, in order, in virtual time.

Rules of this file, beside those of ``tests.simulation.network``:
1. Payloads arrive when they are whole. An end learns ``connected`` and ``disconnected`` in turns.
2. A payload's memory is admitted before it is taken.
3. Two lives meet by the real greeting: of two releases that do not understand each other both are told so.
4. What comes with messages and answers may be spoilt on the way (``spoiling``), behind the greeting and TLS: by the
   sender's memory.
5. What a peer sends may come once more, later, also to the next life of who got it (``repeating``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from p2pdiloco.net.handshake import NONCE_BYTES, Dialled, HandshakeFactory, MismatchError, Role
from p2pdiloco.peer.host import within
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.swarm.neighbours import surplus, wanted
from p2pdiloco.swarm.peer_manager import SURPLUS
from p2pdiloco.wire.request_reply import RequestError, RequestRefused, Response
from tests.simulation.network import Direction, Key, PairNetwork
from tests.simulation.topologies import Pair, pair_of

if TYPE_CHECKING:
    from tests.peer_sim.host import SimulatedHost
    from tests.peer_sim.world import World

PATIENCE_S = 5.0
"""How long an end that hears nothing keeps a connection, about."""
QUEUED_MOST_BYTES = 1 << 22
SPARED_S = 2.0
"""Between two looks at what is not needed."""


class Link(Direction):
    """One direction of one connection."""

    LEAST_S = 1e-7

    def __init__(self, connection: Connection, source: SimulatedHost, target: SimulatedHost) -> None:
        super().__init__()
        self.connection = connection
        self.source = source
        self.target = target
        self.waiting: dict[str, tuple[float, list[object]]] = {}
        """By topic: until when it may be replaced, and the message."""


class Connection:
    """Between two lives."""

    def __init__(self, a: SimulatedHost, b: SimulatedHost, delay_s: float, bytes_per_s: float) -> None:
        self.ends = (a, b)
        self.directions = {a.name: Link(self, a, b), b.name: Link(self, b, a)}
        self.delay_s, self.bytes_per_s = delay_s, bytes_per_s
        self.is_open = True
        self.is_read_to_its_end = False  # it ends in order: who stands still reads what had come when it goes on


class Network(PairNetwork[Link]):
    """All connections of a world."""

    REPEATED_S = 20.0
    """How much later a message comes once more, at most."""

    redial_s = 1.0

    def __init__(self, world: World) -> None:
        super().__init__(world.random)
        self.world = world
        self.repeating: dict[PeerId, float] = {}
        """Peers of which what they send comes once more, and until when they do that."""
        self.spoiling: dict[PeerId, float] = {}
        """The same, of those of whose payloads bits are flipped."""
        self.slow: dict[PeerId, float] = {}
        """Bytes per second of a peer that is slow now."""
        self._spared: set[Pair] = set()
        """Pairs that have done without each other."""
        self.met: dict[PeerId, set[PeerId]] = {name: {name} for name in world.computers}
        """Whom each knows as members, in all its lives."""

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def carry(self, connection: Connection, source: PeerId, size: int, arrive: Callable[[], None]) -> None:
        """``arrive`` at the other end after ``size`` bytes; 0: a control message."""
        direction = connection.directions[source]
        if direction.is_dead:
            return
        if (source, direction.target.name) in self.blocked:
            direction.held.append((arrive, size))
            return
        delay_s, rate = connection.delay_s, self.slow.get(source, connection.bytes_per_s)
        at = direction.arrives_at(self.world.now, size, rate, delay_s, delay_s * self.random.random())
        self.world.at(at, lambda: self._arrive(connection, direction, arrive))

    def _arrive(self, connection: Connection, direction: Link, arrive: Callable[[], None]) -> None:
        if connection.is_open:
            direction.target.do(lambda: arrive() if connection.is_open or connection.is_read_to_its_end else None)

    def repeat(self, source: SimulatedHost, target: SimulatedHost, message: list[object]) -> None:
        """Whether or not they live on: if they, or their next lives, are connected then."""
        world = self.world
        if self.repeating.get(source.name, 0.0) < world.now or world.random.random() < 0.5:
            return

        def come() -> None:
            there = world.hosts.get(target.name)
            connection = None if there is None else there.links.connections.get(source.name)
            if there is None or connection is None or not connection.is_open:
                return
            world.happened["repeated"] += 1
            if there is not target or world.hosts.get(source.name) is not source:
                world.happened["repeated-to-another-life"] += 1
            there.do(partial(deliver, there, source.name, message))

        world.at(world.now + self.REPEATED_S * world.random.random() ** 3, come)

    def copied(self, source: PeerId, payload: bytes | bytearray | memoryview) -> memoryview:
        """What comes of a payload: the receiver's own memory."""
        data, random = bytearray(payload), self.world.random
        if data and self.spoiling.get(source, 0.0) > self.world.now and random.random() < 0.5:
            size = random.choice((64, 160, len(data)))  # a commit's first parts are small
            where = random.randrange(min(len(data), size))
            data[where] ^= 1 << random.randrange(8)
            self.world.happened["spoil"] += 1
        return memoryview(data)

    # -- connections ---------------------------------------------------------------------------------------------------

    def _later(self, after_s: float, action: Callable[[Any], None], argument: Any) -> None:
        self.world.at(self.world.now + after_s, partial(action, argument))

    def _direction(self, key: Key) -> Link | None:
        host = self.world.hosts.get(key[0])
        connection = None if host is None else host.links.connections.get(key[1])
        return None if connection is None else connection.directions[key[0]]

    def _meet(self, pair: Pair, *, is_cut: bool) -> bool:
        world = self.world
        a, b = (world.hosts.get(name) for name in pair)
        if a is None or b is None or a.links.is_closed or b.links.is_closed:
            return True  # whoever starts later dials
        if pair[1] in a.links.connections:
            return True
        if pair in self._spared and not (self._is_needed(a, pair[1]) or self._is_needed(b, pair[0])):
            return False
        has_no_socket = "no-descriptor" in (a.disk.shortage, b.disk.shortage)
        if is_cut or has_no_socket or a.is_paused or b.is_paused or pair[0] in b.links.connections:
            return False
        if (reason := greeting(a, b)) is not None:
            world.happened["refused-release"] += 1
            if str(a.version) not in reason or str(b.version) not in reason:
                world.checks.violated(5, f"who meets another release is told no more than: {reason}")
            return True  # the directory brings them together again
        connection = Connection(a, b, world.setting.delay_s * (0.2 + world.random.random()), world.setting.bytes_per_s)
        for here, there in ((a, b), (b, a)):
            here.links.connections[there.name] = connection
            world.at(
                world.now + connection.delay_s * world.random.random(),
                partial(here.do, partial(here.links.stands, there.name, connection)),
            )
        return True

    def _is_needed(self, host: SimulatedHost, other: PeerId) -> bool:
        """Whether a peer needs this one, beside the others to which it is connected."""
        view = host.peer.machine.view
        here = [name for name in host.links.connections if name != other and not view.is_leaving(name)]
        return bool(wanted(host.name, view.group_bits, [other], here))

    def spare(self) -> None:
        """Where there are groups, peers end connections without which both can do (``swarm/neighbours.py``), although
        these are few."""
        for host in list(self.world.hosts.values()):
            bits = 0 if host.is_paused else host.peer.machine.view.group_bits
            for name in surplus(host.name, bits, list(host.links.connections), most=0):
                connection = host.links.connections[name]
                other = connection.directions[host.name].target
                if connection.is_open and not (self._is_needed(host, name) or self._is_needed(other, host.name)):
                    self._spared.add(pair_of(host.name, name))
                    self.world.happened["spared"] += 1
                    self.break_connection(connection, SURPLUS)
        self.world.at(self.world.now + SPARED_S, self.spare)

    def break_connection(self, connection: Connection, reason: str, *, is_silent: bool = False) -> None:
        """It is gone; both ends learn it, each at its own time."""
        if not connection.is_open:
            return
        connection.is_open = False
        world = self.world
        for here, there in (connection.ends, connection.ends[::-1]):
            after_s = (PATIENCE_S if is_silent else 0.1) * world.random.random()
            world.at(
                world.now + after_s,
                partial(here.do, partial(here.links.lost, there.name, connection, reason)),
            )
        self.dial_later(connection.ends[0].name, connection.ends[1].name, self.redial_s * (0.2 + world.random.random()))

    def vanish(self, host: SimulatedHost) -> None:
        """The process is dead: its connections are, too."""
        host.links.is_closed = True
        is_silent = self.world.random.random() < 0.3
        for connection in list(host.links.connections.values()):
            self.break_connection(connection, "connection reset", is_silent=is_silent)

    def close(self, host: SimulatedHost) -> None:
        """The process ends in order: what it sent arrives before the end does."""
        host.links.is_closed = True
        for connection in list(host.links.connections.values()):
            direction = connection.directions[host.name]
            at = max(direction.control_at, direction.payload_at + 2 * connection.delay_s, self.world.now) + 1e-3
            connection.is_read_to_its_end = True
            self.world.at(at, partial(self.break_connection, connection, "closed in order"))

    # -- cuts ----------------------------------------------------------------------------------------------------------

    def cut_for(self, directions: list[Key], seconds: float) -> None:
        """Nothing passes in these directions for a while."""
        self.cut(directions)
        self._later(seconds, self.mend, directions)

    def _lose_patience_later(self, key: Key, direction: Link) -> None:
        self._later(PATIENCE_S * (0.5 + self.random.random()), self._lose_patience, (key, direction.connection))

    def _lose_patience(self, argument: tuple[Key, Connection]) -> None:
        key, connection = argument
        if key in self.blocked:
            self.break_connection(connection, "timed out")

    def _resume(self, direction: Link, held: tuple[Callable[[], None], int]) -> None:
        arrive, size = held
        self.carry(direction.connection, direction.source.name, size, arrive)


def greeting(a: SimulatedHost, b: SimulatedHost) -> str | None:
    """What both are told when they cannot work together; None: they can."""
    halves = [
        HandshakeFactory(
            peer=host.name,
            run=host.world.manifest.run,
            version=host.version,
            life=f"{host.life:08d}".encode(),
            sign=lambda _: b"",
            verify=lambda *_: True,
            nonce=lambda: bytes(NONCE_BYTES),
        ).handshake(role, b"", Dialled(other.name))
        for host, other, role in ((a, b, Role.DIALLER), (b, a, Role.LISTENER))
    ]
    try:
        for half, other in (halves, halves[::-1]):
            half.proof_after(other.hello_body)
    except MismatchError as error:
        return str(error)
    return None


def deliver(target: SimulatedHost, source: PeerId, message: list[object]) -> None:
    """A message is whole at the other end."""
    body, payload = message
    assert isinstance(body, bytes)
    if payload is None:
        target.peer.message(source, body, None)
        return
    assert isinstance(payload, bytes | memoryview)
    admitted = target.peer.admit(source, body, len(payload))
    if admitted is not None:
        target.peer.message(source, admitted, target.world.network.copied(source, payload))


class SimulatedLinks:
    """One life's connections (``peer.host.Links``)."""

    up_bytes_per_s: float | None = None
    """No limit is known."""
    line_bytes_per_s: float | None = None

    def __init__(self, host: SimulatedHost) -> None:
        self._host = host
        self.connections: dict[PeerId, Connection] = {}
        self.is_closed = False
        self._standing: dict[PeerId, Connection] = {}
        """Of which the peer was told."""
        self._questions: dict[asyncio.Future[Response], Connection] = {}

    def peers(self) -> list[PeerId]:
        """Who can be sent to."""
        return [peer for peer, connection in self._standing.items() if connection.is_open]

    def queued_bytes(self, peer: PeerId) -> int:
        """That wait to be sent."""
        connection = self.connections.get(peer)
        if connection is None:
            return 0
        direction = connection.directions[self._host.name]
        return int(max(0.0, direction.payload_at - self._host.world.now) * connection.bytes_per_s)

    def send(
        self, peer: PeerId, body: bytes, payload: bytes | memoryview | None = None, *, topic: str | None = None
    ) -> bool:
        """Send a message."""
        connection = self._standing.get(peer)
        if self._host.is_dead or connection is None or not connection.is_open:
            return False
        if payload is not None and self.queued_bytes(peer) > QUEUED_MOST_BYTES:
            return False
        direction = connection.directions[self._host.name]
        message: list[object] = [body, payload]
        if topic is not None:
            until, waiting = direction.waiting.get(topic, (0.0, None))
            if waiting is not None and until > self._host.world.now:
                waiting[:] = message
                return True
            direction.waiting[topic] = (max(direction.payload_at, self._host.world.now), message)
        size = 0 if payload is None else len(payload) + len(body)
        network, source, target = self._host.world.network, self._host.name, direction.target

        def arrive() -> None:
            network.repeat(self._host, target, list(message))
            deliver(target, source, message)

        network.carry(connection, source, size, arrive)
        return True

    async def request(self, peer: PeerId, body: bytes, *, timeout_s: float, max_payload: int = 0) -> Response:
        """Ask."""
        connection = self._standing.get(peer)
        if connection is None or not connection.is_open:
            raise RequestError("not connected")
        host, network = self._host, self._host.world.network
        target = connection.directions[host.name].target
        done: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._questions[done] = connection

        def resolve(response: Response | RequestError) -> None:
            if done.done():
                return
            if isinstance(response, RequestError):
                done.set_exception(response)
            elif response.payload is not None and len(response.payload) > max_payload:
                done.set_exception(RequestError("the answer is too large"))
            else:
                done.set_result(response)

        async def answer() -> None:
            result: Response | RequestError
            try:
                found = await target.peer.answer(host.name, body)
                payload = None if found.payload is None else network.copied(target.name, found.payload)
                result = Response(found.body, payload)
            except RequestRefused as error:
                result = RequestRefused(str(error))
            size = len(result.payload) if isinstance(result, Response) and result.payload is not None else 0
            network.carry(connection, target.name, size, lambda: resolve(result))

        network.carry(connection, host.name, 0, lambda: target.start(answer(), "answer"))
        try:
            return await within(host, done, timeout_s)
        except TimeoutError:
            raise RequestError(f"no answer within {timeout_s:g} s") from None
        finally:
            del self._questions[done]

    def hang_up(self, peer: PeerId, reason: str) -> None:
        """End the connection with ``peer``."""
        if (connection := self.connections.get(peer)) is not None:
            self._host.world.network.break_connection(connection, reason)

    def is_shut_out(self, peer: PeerId) -> bool:
        """Nobody is."""
        return False

    def blame(self, peer: PeerId, *, is_forged: bool = False) -> None:
        """``peer`` sent what cannot be read: nobody does, here. What is forged may come from spoilt memory."""
        if is_forged:
            return
        self._host.world.checks.violated(5, f"{self._host.name[-6:]} cannot read what {peer[-6:]} sent")

    # -- what the network tells ----------------------------------------------------------------------------------------

    def stands(self, peer: PeerId, connection: Connection) -> None:
        """A connection stands."""
        if connection.is_open and self.connections.get(peer) is connection and not self.is_closed:
            self._standing[peer] = connection
            self._host.peer.connected(peer, "", False, False)

    def lost(self, peer: PeerId, connection: Connection, reason: str) -> None:
        """A connection is lost."""
        if self.connections.get(peer) is connection:
            del self.connections[peer]
        for question in [question for question, over in self._questions.items() if over is connection]:
            if not question.done():
                question.set_exception(RequestError("disconnected"))
        if self._standing.get(peer) is connection:
            del self._standing[peer]
            self._host.peer.disconnected(peer, reason)
