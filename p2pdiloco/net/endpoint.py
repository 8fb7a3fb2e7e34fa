"""All connections of one peer, without I/O: which serve, what they carry, who sends next, what is due when.

Whoever drives an endpoint owns the sockets and the clock. It says what happened (``add_connection``,
``handle_tls_established``, ``receive_data``, ``handle_connection_lost``, ``send``, ``send_request`` ...). After each
such call, and when ``next_deadline`` has come, it goes through ``events`` and ``to_send`` until both are empty, and
closes what it is told to close. Two endpoints in virtual time, with one connection whose bytes take no time:

    now = 0.0
    ends = {
        ann: ann.add_connection(Role.DIALLER, now, host="bob"),
        bob: bob.add_connection(Role.LISTENER, now, host="ann"),
    }
    for endpoint, connection in ends.items():
        endpoint.handle_tls_established(connection, bytes(32), now)     # both know the listener's certificate
    while now is not None:
        for here, there in ((ann, bob), (bob, ann)):
            here.wake(now)
            for event in here.events(now):
                match event:
                    case Offered():
                        here.accept_payload(event, event.body)      # or not: then the sender is told to stop
                    case Message():
                        print(here.connection(event.connection).peer, event.body, event.payload)
                    case Closing():
                        here.handle_connection_lost(event.connection, "closed", now)
                        there.handle_connection_lost(ends[there], "the other side closed the connection", now)
            for _, piece in here.to_send(now):
                there.receive_data(ends[there], piece.head + piece.chunk, now)
        now = earliest(ann.next_deadline(), bob.next_deadline())

(``tests/property/two_endpoints.py`` does that with delays and cuts, ``transport/transport.py`` with asyncio.)
Connections are named by ids, as streams are in QUIC libraries. ``Endpoint.connection`` gives the connection of an id,
to read its state, until its event Ended was handed out; what is said of one that has ended is ignored.

Rules of this file:
1. No I/O here or below: no socket, clock, thread, file or random number. What happens is an event; nobody is called.
2. Nothing waits: what does not fit is refused.
3. Connections do not know each other: what concerns several (lanes, duplicates) is done here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from p2pdiloco.net.abuse_limits import BODY, FRAMES, Room, displaced, machine_of
from p2pdiloco.net.bandwidth import Path, Traffic
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.context import Due, EndpointContext
from p2pdiloco.net.events import (
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
    Paced,
    Proved,
    TwinRefused,
)
from p2pdiloco.net.flow_control import Account
from p2pdiloco.net.frames import FrameError, Parting
from p2pdiloco.net.handshake import ANYBODY, Dialled, Greeter, Role
from p2pdiloco.net.limits import TransportLimits, UpBudget
from p2pdiloco.net.path_monitor import PathMonitor
from p2pdiloco.net.send_queue import Slice
from p2pdiloco.net.traffic_shaping import TURN_BYTES
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.wire.request_reply import Answer, RequestError

# -- Incarnations of a peer --------------------------------------------------------------------------------------------
# A peer that is started anew has a new life (``Hello.life``), which replaces the one before. If a life comes back after
# that, two processes have one identity. It is refused while the later one is connected, so that the two do not replace
# each other for ever.


PEERS = 1024
LIVES = 4
"""Ended lives of each peer that are remembered, the latest ones."""


class PastIncarnations:
    """Lives of peers that have ended."""

    def __init__(self) -> None:
        self._past: dict[PeerId, deque[bytes]] = {}
        self._told: dict[PeerId, None] = {}
        """Peers of which a conflict was reported."""

    def has_ended(self, peer: PeerId, life: bytes) -> bool:
        """Whether a life of ``peer`` has ended."""
        return life in self._past.get(peer, ())

    def record_end(self, peer: PeerId, life: bytes) -> None:
        """Note that another life of ``peer`` replaces this one."""
        past = self._past.pop(peer, None) or deque(maxlen=LIVES)
        if life not in past:
            past.append(life)
        self._past[peer] = past
        while len(self._past) > PEERS:
            oldest = next(iter(self._past))
            del self._past[oldest]
            self._told.pop(oldest, None)

    def note_conflict(self, peer: PeerId) -> bool:
        """Note that an ended life of ``peer`` has come back; whether it is the first time."""
        is_news = peer not in self._told
        self._told[peer] = None
        return is_news


# -- Connections by peer -----------------------------------------------------------------------------------------------
# 1. One connection per pair of peers serves. A direct one replaces a relayed one. If both dial at once, the one dialled
#    by the smaller peer id stays; the other finishes what it has begun. A peer that was started anew replaces its old
#    connection, and its old life does not come back while the new one is connected (``PastIncarnations``).
# 2. Only the life that serves is heard: connections of another life end when this one's begins, and one that is turned
#    away is not read. (Heartbeats of two processes in turns would make both look dead.)
# 3. Connected and Disconnected alternate for each peer, whatever happens to connections below.
# 4. Places are bounded; net/abuse_limits.py decides who gets one when all are taken.


LEAVING = "the peer is leaving"
TWIN = "another process with this identity is connected: a copy of the state folder?"


class Peers:
    """The connection that serves each peer; see the rules above.

    ``places``: peers at once. ``connections``: all that there are, as they come and go.
    """

    def __init__(self, context: EndpointContext, places: int, connections: Mapping[ConnectionId, Connection]) -> None:
        self.serving: dict[PeerId, Connection] = {}
        self.is_leaving = False
        self._past = PastIncarnations()
        self._context = context
        self._places = places
        self._connections = connections

    def handle_proved(self, connection: Connection) -> bool:
        """Decide what becomes of a connection whose peer is proved; whether it serves from now on."""
        peer, old = connection.peer, self.serving.get(connection.peer)
        if self.is_leaving:
            connection.turn_away(Parting.LEAVING, LEAVING)
        elif self._context.scores.is_shut_out(peer, self._context.now):
            connection.turn_away(Parting.BROKEN, "you sent too much that could not be read; try again in a minute")
        elif connection.greeting.lane:
            self._bind_lane(connection, old)
        elif old is None:
            return self._serve(connection)
        elif _life_of(old) != _life_of(connection):
            if not (old.is_open and self._past.has_ended(peer, _life_of(connection))):
                self._past.record_end(peer, _life_of(old))
                return self._replace(old, connection)
            if self._past.note_conflict(peer):
                self._context.emit(TwinRefused(connection.id, old.id))
            connection.turn_away(Parting.LEAVING, TWIN)
        elif not old.is_open:
            return self._replace(old, connection)
        elif self._rank(connection) > self._rank(old):
            self.serving[peer] = connection
            old.retire()
            return True
        else:
            connection.retire()
        return False

    def _replace(self, old: Connection, connection: Connection) -> bool:
        reason = "the peer came back with a new connection"
        self.stop_serving(old, reason)
        old.abort(reason)
        return self._serve(connection)

    def stop_serving(self, connection: Connection, reason: str) -> None:
        """Report that the peer is gone, if ``connection`` served it."""
        if connection.is_proved and self.serving.get(connection.peer) is connection:
            del self.serving[connection.peer]
            self._context.emit(Disconnected(connection.id, reason))

    def _serve(self, connection: Connection) -> bool:
        if len(self.serving) >= self._places:
            places = {other: (machine_of(other.host), other.received_at) for other in self.serving.values()}
            out = displaced(places, machine_of(connection.host))
            if out is None:
                connection.turn_away(Parting.LEAVING, f"{len(self.serving)} peers are connected already")
                return False
            reason = "it made room: too many peers of its address are connected"
            self.stop_serving(out, reason)
            out.close(Parting.LEAVING, reason)
        for other in [c for c in self._connections.values() if c.is_open and c.peer == connection.peer]:
            if _life_of(other) != _life_of(connection):
                other.abort("another life of the peer is here")
        self.serving[connection.peer] = connection
        self._context.emit(Connected(connection.id))
        return True

    def _bind_lane(self, lane: Connection, primary: Connection | None) -> None:
        """Bind a lane to the connection whose dialler's nonce it names. A lane of no connection is not read: what the
        other side has sent on it is not acknowledged, and is sent again on another."""
        if (
            primary is None
            or not primary.is_open
            or primary.session.is_lane
            or primary.greeting.nonce != lane.greeting.bond
            or primary.peer != lane.peer
            or primary.role is not lane.role
        ):
            lane.turn_away(Parting.LEAVING, "a lane of a connection that is not here")
        elif not lane.session.become_lane_of(primary.session):
            lane.turn_away(Parting.LEAVING, f"{len(primary.session.lanes.members)} lanes are enough")

    def _rank(self, connection: Connection) -> tuple[bool, bool, int]:
        """Rank a connection among those of one peer, so that both ends keep the same one: a direct one; then one that
        the smaller id dialled; then the latest of one dialler."""
        greeting = connection.greeting
        return (
            not greeting.is_relayed,
            greeting.peer == min(self._context.greeter.peer, connection.peer),
            greeting.attempt,
        )


def _life_of(connection: Connection) -> bytes:
    assert connection.remote is not None
    return connection.remote.life


# -- Endpoint ----------------------------------------------------------------------------------------------------------


class Hold(Struct, frozen=True):
    """A payload that the user has not taken yet: its bytes, divided among the accounts of the pair's lanes."""

    accounts: tuple[Account, ...]
    bytes_each: int


class Endpoint:
    """All connections of one peer; see the module's docstring. ``now``: seconds on any clock that never goes back."""

    def __init__(self, greeter: Greeter, limits: TransportLimits) -> None:
        self._limits = limits
        self._context = EndpointContext(greeter, limits)
        self._ids = itertools.count()
        self.connections: dict[ConnectionId, Connection] = {}
        """Every one whose event Ended was not handed out, unproved and retiring ones included."""
        self._half_open: Room[ConnectionId] = Room(limits.handshakes)
        """Accepted connections whose peers have not proved themselves."""
        self._peers = Peers(self._context, limits.connections, self.connections)
        self._path_monitor = PathMonitor(self._context, limits, self.connections)
        self._accounts: dict[Account, Connection] = {}
        self._next_deadline: float | None = None
        """The earliest of the context's deadlines when ``next_deadline`` was called last."""
        self._past_traffic = Traffic()
        """Bytes on connections that have ended."""

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def serving(self) -> Mapping[PeerId, Connection]:
        """The connection that serves each peer. It may be closing."""
        return self._peers.serving

    @property
    def up_bytes_per_s(self) -> float | None:
        """The up budget in force, set or learned; None: no limit."""
        return self._context.shaper.bytes_per_s

    @property
    def line_bytes_per_s(self) -> float | None:
        """What the link carries upwards; see ``PathMonitor``."""
        return self._path_monitor.line_bytes_per_s

    def connection(self, connection: ConnectionId) -> Connection:
        """The connection of an id, to read its state. Raises KeyError once its event Ended was handed out."""
        return self.connections[connection]

    def traffic(self) -> Traffic:
        """Bytes on all connections since the start."""
        total = Traffic()
        total.add(self._past_traffic)
        for connection in self.connections.values():
            total.add(connection.session.traffic)
        return total

    # -- connections -------------------------------------------------------------------------------------------------

    def add_connection(self, role: Role, now: float, *, host: str, dialled: Dialled = ANYBODY) -> ConnectionId:
        """Add a connection to the numeric address ``host``, which is not encrypted yet; its id."""
        self._context.now = now
        connection = ConnectionId(next(self._ids))
        self.connections[connection] = Connection(connection, self._context, role=role, host=host, dialled=dialled)
        if role is Role.LISTENER:
            out = self._half_open.enter(connection, machine_of(host))
            if out is not None:
                self.connections[out].abort("it made room for a newcomer: it took long to prove itself")
        return connection

    def handle_tls_established(self, connection: ConnectionId, fingerprint: bytes, now: float) -> None:
        """TLS is established. ``fingerprint``: SHA-256 of the listener's certificate."""
        self._context.now = now
        if (found := self.connections.get(connection)) is not None:
            found.handle_tls_established(fingerprint)

    def receive_data(self, connection: ConnectionId, data: bytes, now: float) -> None:
        """Take received data. (A driver that reads into the connection's ``buffer()`` and calls ``advance()`` saves a
        copy.)"""
        self._context.now = now
        if (found := self.connections.get(connection)) is not None:
            found.receive_data(data)

    def handle_connection_lost(self, connection: ConnectionId, reason: str, now: float) -> None:
        """The connection's socket is closed, by either side."""
        self._context.now = now
        found = self.connections.get(connection)
        if found is None or found.is_lost:
            return
        found.handle_lost(reason)
        session = found.session
        for lane in [] if session.is_lane else session.lanes.members:
            if lane is not session:
                self.connections[lane.connection].abort(f"its primary connection ended: {found.reason}")
        self._context.unread.pop(connection, None)
        self._half_open.leave(connection)
        if session.account is not None:
            self._accounts.pop(session.account, None)
        self._peers.stop_serving(found, found.reason)
        self._path_monitor.remove(connection)
        self._context.emit(Ended(connection, found.reason))

    def abort(self, connection: ConnectionId, reason: str, now: float) -> None:
        """Close a connection at once; what is queued is lost."""
        self._context.now = now
        if (found := self.connections.get(connection)) is not None:
            found.abort(reason)

    def pause_writing(self, connection: ConnectionId) -> None:
        """The connection's socket takes no more at present."""
        if (found := self.connections.get(connection)) is not None:
            found.is_paused = True

    def resume_writing(self, connection: ConnectionId) -> None:
        """The connection's socket takes more again."""
        if (found := self.connections.get(connection)) is not None:
            found.is_paused = False
            self._context.touch(connection)

    def handle_path_info(self, paths: Mapping[ConnectionId, Path], now: float) -> None:
        """Take what the kernel knows of the connections that PathInfoWanted named."""
        self._context.now = now
        self._path_monitor.handle_paths(paths)
        self._emit_pacing()

    def handle_lane_dialled(self, wanted: LaneWanted, is_there: bool, now: float) -> None:
        """The dial of a lane that was wanted has ended."""
        self._context.now = now
        self._path_monitor.handle_lane_dialled(wanted.primary, is_there)

    def leave(self, reason: str, now: float) -> None:
        """Close all connections in order, and those that come from now on."""
        self._context.now = now
        self._peers.is_leaving = True
        for connection in self.connections.values():
            if connection.session.is_lane:
                continue  # Lanes end with their primary.
            if connection.is_open:
                connection.close(Parting.LEAVING, reason)
            else:
                connection.abort(reason)

    # -- for the user ------------------------------------------------------------------------------------------------

    def send(
        self, peer: PeerId, body: bytes, payload: memoryview | None, priority: float, topic: Hashable | None
    ) -> bool:
        """Queue a message; False: not connected, or no room.

        Raises:
            ValueError: ``body`` is longer than 1 MiB.
        """
        connection = self.serving.get(peer)
        return connection is not None and connection.send(body, payload, priority, topic)

    def send_request(
        self, peer: PeerId, body: bytes, now: float, *, timeout_s: float, max_payload: int
    ) -> OutgoingRequest:
        """Queue a request; AnswerReceived or RequestFailed will come.

        Raises:
            RequestError: not connected, or no room.
            ValueError: ``body`` is longer than 1 MiB.
        """
        self._context.now = now
        connection = self.serving.get(peer)
        if connection is None or not connection.is_open:
            raise RequestError("not connected")
        return connection.session.send_request(body, timeout_s, max_payload)

    def withdraw_request(self, request: OutgoingRequest) -> None:
        """Withdraw a request of ours; neither AnswerReceived nor RequestFailed will come."""
        if (connection := self.connections.get(request.connection)) is not None:
            connection.session.withdraw_request(request.number)

    def send_answer(self, request: IncomingRequest, answer: Answer) -> None:
        """Answer a request of the peer's."""
        if (connection := self.connections.get(request.connection)) is not None:
            connection.session.send_answer(request.number, answer)

    def refuse_request(self, request: IncomingRequest, text: str) -> None:
        """Refuse a request of the peer's, for a reason."""
        if (connection := self.connections.get(request.connection)) is not None:
            connection.session.refuse_request(request.number, text)

    def accept_payload(self, offer: Offered, body: Any) -> None:
        """Take the payload that was offered. Its ``Message`` will have ``body``, such as the decoded ``offer.body``."""
        self.connections[offer.receiver].session.accept_offer(offer, body)

    def hold_payload(self, message: Message) -> Hold:
        """The user has not taken the message's payload yet: its bytes count against what the peer may send."""
        lanes = self.connections[message.connection].session.lanes.members
        accounts = tuple(lane.account for lane in lanes if lane.account is not None)
        hold = Hold(accounts, len(message.payload or b"") // max(1, len(accounts)))
        for account in accounts:
            account.untaken += hold.bytes_each
        return hold

    def release_payload(self, hold: Hold, now: float) -> None:
        """The user has taken the payload of ``hold``: its bytes no longer count against the peer."""
        self._context.now = now
        for account in hold.accounts:
            account.untaken -= hold.bytes_each
            self._send_credit(self._context.grants.update(account, now))

    def blame(self, peer: PeerId, now: float) -> None:
        """Report that ``peer`` sent a malformed body. Too many of them cut it off."""
        self._context.now = now
        connection = self.serving.get(peer)
        if self._context.scores.blame(peer, BODY, now) and connection is not None:
            connection.break_off("too much that cannot be read")

    def disconnect(self, peer: PeerId, reason: str, now: float) -> None:
        """Disconnect ``peer``: flush what is queued, for ``part_s`` seconds at most, and tell it ``reason``."""
        self._context.now = now
        if (connection := self.serving.get(peer)) is not None:
            connection.close(Parting.LEAVING, reason)

    def set_budget(self, up: UpBudget, down: float | None, now: float) -> None:
        """Set how many bytes per second all connections may send and receive; None: no limit."""
        self._context.now = now
        self._send_credit(self._context.grants.set_budget(down, now))
        self._path_monitor.set_budget(up)
        self._emit_pacing()

    def set_cap(self, peer: PeerId, bytes_per_s: float | None, now: float) -> None:
        """Limit what is sent to ``peer`` beside the budget; None lifts it. Lasts until it disconnects."""
        if peer in self.serving:
            self._context.shaper.set_cap(peer, bytes_per_s, now)
            self._emit_pacing()

    # -- driving -----------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When ``wake`` is to be called at the latest; in the past: at once. None: not before something happens."""
        first, context = self._context.deadlines.next(), self._context
        self._next_deadline = first
        bulk_at, credit_at = context.shaper.next_at(), context.grants.due_at
        if bulk_at is not None and (first is None or bulk_at < first):
            first = bulk_at
        return credit_at if credit_at is not None and (first is None or credit_at < first) else first

    @property
    def has_new_deadline(self) -> bool:
        """Whether ``next_deadline`` may be sooner than it was. (``to_send`` may make it sooner, too.)"""
        return self._context.deadlines.next() != self._next_deadline or self._context.grants.due_at is not None

    def wake(self, now: float) -> None:
        """Do what is due. Call it when ``next_deadline`` has come."""
        self._context.now = now
        while (key := self._context.deadlines.pop_due(now)) is not None:
            self._handle_deadline(key)
        due_at = self._context.grants.due_at
        if due_at is not None and due_at <= now:
            self._send_credit(self._context.grants.grant(now))

    def events(self, now: float) -> Iterator[Event]:
        """Events in order. Received bytes are parsed lazily: those behind an event, after it was handled."""
        context = self._context
        context.now = now
        while True:
            while context.events:
                event = context.events.popleft()
                if isinstance(event, (Proved, Ended)):
                    self._handle_lifecycle(event)
                yield event
            if not context.unread:
                return
            connection = self.connections[next(iter(context.unread))]
            if not self._handle_next_frame(connection):
                context.unread.pop(connection.id, None)
                self._update_account(connection)

    def to_send(self, now: float, bulk_bytes: int = TURN_BYTES) -> Iterator[tuple[ConnectionId, Slice]]:
        """Bytes to be written now, and on which connection: all control, then about ``bulk_bytes`` of bulk."""
        context, shaper = self._context, self._context.shaper
        context.now = now
        written = 0
        while True:
            while context.touched:
                touched = next(iter(context.touched))
                del context.touched[touched]
                if (connection := self.connections.get(touched)) is None:
                    continue
                connection.advance_closing()
                if connection.is_over:
                    continue
                session = connection.session
                session.refill()
                while not connection.is_paused and (control := session.next_control()) is not None:
                    yield connection.id, control
                    shaper.wrote_control(connection.id, len(control.head), context.now)
                if session.has_waiting_bulk:
                    shaper.ready(connection.id)
                elif session.outbox.is_empty:
                    connection.advance_closing()
            if written >= bulk_bytes or (choice := shaper.next(context.now)) is None:
                return
            chosen, most = choice
            connection = self.connections[chosen]
            piece = None if connection.is_paused else connection.session.next_bulk(most)
            if piece is None:
                shaper.cannot(chosen)
                continue
            yield chosen, piece
            count = len(piece.head) + len(piece.chunk)
            shaper.wrote(chosen, count, context.now)
            if shaper.has_news:
                self._emit_pacing()
            written += count
            if not connection.session.outbox.has_bulk:
                context.touch(chosen)  # a GOODBYE may have waited for it

    @property
    def has_events(self) -> bool:
        """Whether ``events`` has something."""
        return bool(self._context.unread or self._context.events)

    @property
    def has_control(self) -> bool:
        """Whether ``to_send`` may have something beside bulk."""
        return bool(self._context.touched)

    def _emit_pacing(self) -> None:
        for connection, rate in self._context.shaper.news().items():
            self._context.emit(Paced(connection, rate))

    def _handle_next_frame(self, connection: Connection) -> bool:
        """Handle the next frame of a connection; whether there is another. A peer that breaks the format is cut off; a
        lane takes its primary with it."""
        try:
            return connection.handle_next_frame()
        except FrameError as error:
            if connection.is_proved:
                self._context.scores.blame(connection.peer, FRAMES, self._context.now)
            for broken in dict.fromkeys((connection.id, connection.session.primary.connection)):
                self.connections[broken].break_off(f"broken frames: {error}")
            return connection.has_unread

    def _handle_lifecycle(self, event: Proved | Ended) -> None:
        """Do what the endpoint itself has to do at an event."""
        connection = self.connections[event.connection]
        match event:
            case Proved():
                self._half_open.leave(connection.id)
                self._emit_pacing()
                if connection.is_open and self._peers.handle_proved(connection):
                    self._path_monitor.add_serving(connection)
                account = connection.session.account
                if account is not None and not connection.is_over:
                    self._accounts[account] = connection
                    self._send_credit(self._context.grants.open(account, self._context.now))
            case Ended():
                self._past_traffic.add(connection.session.traffic)
                del self.connections[connection.id]

    def _handle_deadline(self, key: Hashable) -> None:
        match key:
            case (Due.CONNECTION, int() as connection):
                self.connections[ConnectionId(connection)].handle_deadline()
            case (Due.REQUEST, int() as connection, int() as number):
                self.connections[ConnectionId(connection)].session.expire_request(number)
            case (Due.ANSWER, int() as connection, int() as number):
                self.connections[ConnectionId(connection)].session.expire_answer(number)
            case Due.PATH_INFO:
                self._path_monitor.request_paths()

    def _update_account(self, connection: Connection) -> None:
        """Count received bytes in the connection's account, and grant its sender more."""
        account, inbox = connection.session.account, connection.session.inbox
        news = (inbox.arrived_bytes, inbox.demand_bytes)
        if account is None or news == (account.received, account.demand):
            return
        account.received, account.demand = news
        self._send_credit(self._context.grants.update(account, self._context.now))

    def _send_credit(self, grown: list[Account]) -> None:
        for account in grown:
            if (connection := self._accounts.get(account)) is not None and not connection.is_over:
                connection.session.send_credit()
