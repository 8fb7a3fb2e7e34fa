"""Endpoints in virtual time, joined by wires that take time, fill up, and are cut: what tests of net/ run in."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from p2pdiloco.net import multipath
from p2pdiloco.net.bandwidth import Path
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.endpoint import Endpoint
from p2pdiloco.net.events import (
    AnswerReceived,
    Closing,
    Connected,
    ConnectionId,
    Disconnected,
    Ended,
    Event,
    IncomingRequest,
    LaneWanted,
    Message,
    Offered,
    OutgoingRequest,
    PathInfoWanted,
    RequestFailed,
    RequestReceived,
    RequestWithdrawn,
)
from p2pdiloco.net.handshake import Dialled, HandshakeFactory, Role
from p2pdiloco.net.limits import ConnectionLimits, TransportLimits
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.wire.request_reply import Answer

PART = 1000
FINGERPRINT = bytes(32)
PIPE_BYTES = 20_000
"""What a wire holds before its writer is told to pause."""
INBOX_BYTES = 2_000_000
"""More than all that a test sends: what has no room is refused, and does not come."""
STEPS_LIMIT = 300_000
BUSY_SHARE = 0.3
"""Of arrivals, those that are read together with the next."""


@contextmanager
def small_parts() -> Iterator[None]:
    """Parts of PART bytes, so that small payloads make many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multipath, "PART_BYTES", PART)
        patch.setattr(multipath, "PART_BYTES", PART)
        patch.setattr(multipath, "SPREAD_LEAST_BYTES", PART // 2)
        patch.setattr(multipath, "AHEAD_BYTES", 4 * PART)
        yield


def signature(peer: PeerId, data: bytes) -> bytes:
    """Stands for a peer's key: quick, and only of that peer."""
    return hashlib.sha512(peer.encode() + b"\0" + data).digest()


class Wire:
    """One connection: two queues of bytes that are on their way."""

    def __init__(self, world: World, ends: dict[Peer, Connection]) -> None:
        self.ends = ends
        self.is_cut = False
        self._world = world
        self._queued: Counter[Peer] = Counter()
        self._unread: dict[Peer, bytes] = dict.fromkeys(ends, b"")
        """What has arrived of a writer's, and is read with what comes next."""
        self._full: set[Peer] = set()
        """Writers that were told to pause, and to resume no more often than that, as event loops do."""
        self._arrives_at: dict[Peer, float] = dict.fromkeys(ends, 0.0)
        """When the last that was written arrives."""

    def other(self, peer: Peer) -> Peer:
        return next(end for end in self.ends if end is not peer)

    def write(self, peer: Peer, data: bytes) -> None:
        """``peer`` writes: it arrives in pieces of any size, in order, each when it likes."""
        rng, there = self._world.rng, self.other(peer)
        while data and not self.is_cut:
            size = rng.choice([1, 7, 100, 5000, 40_000])
            piece, data = data[:size], data[size:]
            at = max(self._arrives_at[there], self._world.now + rng.expovariate(50.0))
            self._arrives_at[there] = at
            self._queued[peer] += len(piece)
            self._world.at(at, lambda piece=piece: self._arrive(peer, piece))
        if self._queued[peer] > PIPE_BYTES and peer not in self._full:
            self._full.add(peer)
            peer.endpoint.pause_writing(self.ends[peer].id)

    def close(self, peer: Peer, is_flushed: bool) -> None:
        """``peer`` closes its end; what it had written arrives first if ``is_flushed``."""
        if not self.is_cut:
            there = self.other(peer)
            at = self._arrives_at[there] if is_flushed else self._world.now
            self._world.at(max(at, self._world.now), self.cut)

    def cut(self) -> None:
        """Both ends hear of it, what is on its way is lost."""
        if not self.is_cut:
            self.is_cut = True
            for peer, connection in self.ends.items():
                peer.endpoint.handle_connection_lost(connection.id, "cut", self._world.now)
                peer.turn()

    def _arrive(self, peer: Peer, piece: bytes) -> None:
        if self.is_cut:
            return
        there = self.other(peer)
        self._queued[peer] -= len(piece)
        self._unread[peer] += piece
        if self._queued[peer] and self._world.rng.random() < BUSY_SHARE:
            return  # the reader is busy, and more is on its way
        data, self._unread[peer] = self._unread[peer], b""
        self._read(there, memoryview(data))
        if peer in self._full and self._queued[peer] <= PIPE_BYTES // 2 and not self.is_cut:
            self._full.remove(peer)
            peer.endpoint.resume_writing(self.ends[peer].id)
            peer.turn()

    def _read(self, peer: Peer, data: memoryview) -> None:
        """As an event loop does: into the connection's buffer, as much as there is room for."""
        connection = self.ends[peer]
        while len(data):
            buffer = connection.buffer()
            assert len(buffer), "no room: an event loop would read no more"
            count = min(len(buffer), len(data))
            buffer[:count], data = data[:count], data[count:]
            if connection.advance(count):
                peer.turn()


class Peer:
    """An endpoint, and a user of it who writes down what happens."""

    def __init__(self, world: World, name: str, limits: TransportLimits, life: str = "") -> None:
        self.world = world
        self.id = PeerId(name)
        self.wires: dict[ConnectionId, Wire] = {}
        self.messages: list[tuple[bytes, bytes | None]] = []
        self.voices: list[tuple[bytes, bytes]] = []
        """Of each message, the life that was told to be connected last, and the body."""
        self.greeting = b""
        """What it says as soon as somebody is connected."""
        self.connections: list[str] = []
        """"up" and "down", in the order in which they were told."""
        self.ended: list[str] = []
        self.answers: dict[OutgoingRequest, list[object]] = {}
        self.asked: dict[OutgoingRequest, float] = {}
        """When each must have ended."""
        self.admits: Callable[[bytes], bool] = lambda body: True
        self.answering: dict[IncomingRequest, bytes] = {}
        self.holds = 0.0
        """How likely a payload is taken only later."""
        self.life = (life or name).encode().ljust(16, b".")
        nonces = itertools.count()
        self.handshake_factory = HandshakeFactory(
            peer=self.id,
            run="run",
            version=1,
            life=self.life,
            sign=lambda data: signature(self.id, data),
            verify=lambda peer, data, proof: proof == signature(peer, data),
            nonce=lambda: hashlib.sha256(f"{name} {next(nonces)}".encode()).digest(),
        )
        self.endpoint = Endpoint(self.handshake_factory, limits)
        self._life = b""

    def turn(self) -> None:
        """As a driver does after everything that happens."""
        now = self.world.now
        while self.endpoint.has_events or self.endpoint.has_control:
            for event in self.endpoint.events(now):
                self._hear(event)
            self._write(0)
        self.world.plan(self)

    def wake(self) -> None:
        """It is time."""
        self.endpoint.wake(self.world.now)
        self._write(self.world.rng.choice([1, 3000, 100_000]))
        self.turn()

    def _write(self, bulk_bytes: int) -> None:
        for connection, piece in self.endpoint.to_send(self.world.now, bulk_bytes):
            self.wires[connection].write(self, piece.head + bytes(piece.chunk))

    def _hear(self, event: Event) -> None:
        world = self.world
        match event:
            case Message():
                self.messages.append((event.body, None if event.payload is None else bytes(event.payload)))
                self.voices.append((self._life, event.body))
                if event.payload is not None and world.rng.random() < self.holds:
                    hold = self.endpoint.hold_payload(event)
                    world.after(world.rng.random(), lambda: self._release(hold))
            case Offered() if self.admits(event.body):
                self.endpoint.accept_payload(event, event.body)
            case Connected(connection):
                self.connections.append("up")
                came = self.endpoint.connection(connection)
                assert came.remote is not None
                self._life = came.remote.life
                if self.greeting:
                    self.endpoint.send(came.peer, self.greeting, None, 0.0, None)
            case Disconnected():
                self.connections.append("down")
            case RequestReceived(asking, body):
                self.answering[asking] = body
                world.after(world.rng.random(), lambda: self._answer(asking))
            case RequestWithdrawn(asking):
                del self.answering[asking]
            case AnswerReceived(question, response):
                self.answers[question].append(response)
            case RequestFailed(question, error):
                self.answers[question].append(error)
            case LaneWanted():
                world.after(0.01, lambda: world.dial_lane(self, event))
            case PathInfoWanted(connections):
                path = Path("bbr", 0.1, 0.1)
                self.endpoint.handle_path_info(dict.fromkeys(connections, path), world.now)
            case Closing(connection, is_flushed):
                self.wires[connection].close(self, is_flushed)
            case Ended(_, reason):
                assert reason
                self.ended.append(reason)

    def ask(self, other: Peer, body: bytes, timeout_s: float) -> None:
        """A request, if there is a connection."""
        question = self.endpoint.send_request(other.id, body, self.world.now, timeout_s=timeout_s, max_payload=30_000)
        self.answers[question] = []
        self.asked[question] = self.world.now + timeout_s
        self.turn()

    def send(self, other: Peer, body: bytes, payload: bytes | None, priority: float = 0.0) -> bool:
        view = memoryview(payload) if payload is not None else None
        is_queued = self.endpoint.send(other.id, body, view, priority, None)
        self.turn()
        return is_queued

    def _release(self, hold: Any) -> None:
        self.endpoint.release_payload(hold, self.world.now)
        self.turn()

    def _answer(self, asking: IncomingRequest) -> None:
        body = self.answering.pop(asking, None)
        if body == b"no":
            self.endpoint.refuse_request(asking, "no")
        elif body == b"never":
            self.answering[asking] = body
        elif body is not None:
            self.endpoint.send_answer(asking, Answer(body, book(body)))
        self.turn()


def book(body: bytes) -> bytes | None:
    """What a question that is a number is answered with."""
    return random.Random(body).randbytes(int(body)) if body.isdigit() else None


class World:
    """Peers, wires between them, and a clock that jumps to what comes next."""

    def __init__(self, seed: int, *, inbox_bytes: int = INBOX_BYTES, **limits: Any) -> None:
        self.rng = random.Random(seed)
        self.inbox_bytes = inbox_bytes
        self.now = 0.0
        self.wires: list[Wire] = []
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._planned: dict[Peer, float] = {}
        connection = ConnectionLimits(
            inbox_bytes=inbox_bytes, window_bytes=70_000, answers=4, requests=8, answer_s=5.0, handshake_s=10.0
        )
        self.limits = TransportLimits(**{"connection": connection, "lanes": 3, "lane_idle_s": 20.0, **limits})
        self.peers: list[Peer] = []
        self.ann, self.bob = (self.come(name) for name in ("ann", "bob"))

    def come(self, name: str, life: str = "") -> Peer:
        """A peer more; a ``life`` of its own tells it from another process with that name."""
        self.peers.append(Peer(self, name, self.limits, life))
        return self.peers[-1]

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (when, next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def plan(self, peer: Peer) -> None:
        """See to it that ``peer`` wakes when its endpoint wants to."""
        deadline = peer.endpoint.next_deadline()
        if deadline is None:
            return
        at = max(deadline, self.now)
        if self._planned.get(peer, float("inf")) <= at:
            return
        self._planned[peer] = at

        def wake() -> None:
            if self._planned.get(peer) == at:
                del self._planned[peer]
                peer.wake()

        self.at(at, wake)

    def run(self, until: float) -> None:
        """Until nothing is left to happen before that time."""
        for count in itertools.count():
            assert count < STEPS_LIMIT, "time stands still"
            if not self._calls or self._calls[0][0] > until:
                break
            when, _, action = heapq.heappop(self._calls)
            self.now = max(self.now, when)
            action()
            for peer in self.peers:
                check_bounds(peer)
        self.now = until

    def dial(
        self, dialler: Peer, listener: Peer, lane: int = 0, bond: bytes = b"", *, is_relayed: bool = False
    ) -> Wire:
        """TCP and TLS come about at once, the rest in its time."""
        here = dialler.endpoint.add_connection(
            Role.DIALLER, self.now, host="10.0.0.2", dialled=Dialled(listener.id, lane, bond, is_relayed)
        )
        there = listener.endpoint.add_connection(Role.LISTENER, self.now, host="10.0.0.1")
        wire = Wire(self, {dialler: dialler.endpoint.connection(here), listener: listener.endpoint.connection(there)})
        self.wires.append(wire)
        for peer, connection in wire.ends.items():
            peer.wires[connection.id] = wire
        for peer, connection in wire.ends.items():
            peer.endpoint.handle_tls_established(connection.id, FINGERPRINT, self.now)
            peer.turn()
        return wire

    def dial_lane(self, peer: Peer, wanted: LaneWanted) -> None:
        """Some fail."""
        other = peer.wires[wanted.primary].other(peer)
        primary = peer.endpoint.connections.get(wanted.primary)
        is_there = self.rng.random() < 0.8 and primary is not None and not primary.is_ending
        if is_there:
            self.dial(peer, other, wanted.lane, wanted.bond)
        peer.endpoint.handle_lane_dialled(wanted, is_there, self.now)
        peer.turn()

    def meet(self) -> None:
        """Ann dials Bob, and both are connected."""
        self.dial(self.ann, self.bob)
        self.run(self.now + 2.0)
        assert self.bob.id in self.ann.endpoint.serving
        assert self.ann.id in self.bob.endpoint.serving


def check_bounds(peer: Peer) -> None:
    """What a peer can make another hold."""
    for connection in peer.endpoint.connections.values():
        talk = connection.session
        assert talk.inbox.held_bytes <= peer.world.inbox_bytes
        assert talk.lanes.reassembler.held_bytes <= peer.world.inbox_bytes
        assert len(talk.incoming.numbers) <= 4
        assert len(talk.outgoing.numbers) <= 8


def check_quiet(peer: Peer) -> None:
    """Nothing of what is over is left behind."""
    assert not peer.endpoint.has_events
    assert not peer.endpoint.has_control
    for connection in peer.endpoint.connections.values():
        talk = connection.session
        assert talk.is_idle
        assert talk.queued_bytes == 0
        assert talk.inbox.held_bytes == talk.inbox.demand_bytes == talk.lanes.reassembler.held_bytes == 0
    for question, ends in peer.answers.items():
        assert len(ends) == 1, (question.number, ends)
    assert not peer.endpoint._half_open
    assert len(peer.endpoint._accounts) <= len(peer.endpoint.connections)
