"""All connections of one peer, without I/O: which of them serve, what they carry, and what is due when.

The driver of an endpoint owns the sockets and the clock. It reports what happened (``add_connection``,
``handle_tls_established``, ``receive_data``, ``handle_connection_lost``, ``send``, ``send_request`` ...). After each
such call, and when ``next_deadline`` has come, it goes through ``events`` and ``to_send`` until both are empty, and
closes connections as requested. Two endpoints in virtual time, with one connection whose bytes take no time:

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
Connections are named by ids, as streams are in QUIC libraries. ``Endpoint.connection`` returns the connection of an id,
to read its state, until its event Ended was handed out. Calls about a connection that has ended are ignored.

Rules of this file:
1. No I/O here or below: no socket, clock, thread, file or random number. Results are events; there are no callbacks.
2. Nothing blocks: data without room is refused.
3. Connections do not know each other. The endpoint does what concerns several of them (lanes, duplicates).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from p2pdiloco.net.abuse_limits import BODY, FORGED, FRAMES, Room, displaced, machine_of
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
from p2pdiloco.net.frames import FrameError, GoodbyeCode
from p2pdiloco.net.handshake import ANYBODY, Dialled, HandshakeFactory, Role
from p2pdiloco.net.limits import TransportLimits, UpBudget
from p2pdiloco.net.path_monitor import PathMonitor
from p2pdiloco.net.send_queue import Slice
from p2pdiloco.net.traffic_shaping import TURN_BYTES
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.wire.request_reply import Answer, RequestError

# -- Incarnations of a peer --------------------------------------------------------------------------------------------
# Each start of a peer has a new incarnation (``Hello.life``), which replaces the earlier one. If an earlier one comes
# back, two processes use one identity. It is refused while the later one is connected, so that the two do not replace
# each other for ever.


PEERS = 1024
LIVES = 4
"""Maximum number of ended incarnations that are remembered of each peer; the latest stay."""


class PastIncarnations:
    """Ended incarnations of peers."""

    def __init__(self) -> None:
        self._past: dict[PeerId, deque[bytes]] = {}
        self._told: dict[PeerId, None] = {}
        """Peers whose conflict was reported."""

    def has_ended(self, peer: PeerId, life: bytes) -> bool:
        """Return whether an incarnation of ``peer`` has ended."""
        return life in self._past.get(peer, ())

    def record_end(self, peer: PeerId, life: bytes) -> None:
        """Record that another incarnation of ``peer`` replaces this one."""
        past = self._past.pop(peer, None) or deque(maxlen=LIVES)
        if life not in past:
            past.append(life)
        self._past[peer] = past
        while len(self._past) > PEERS:
            oldest = next(iter(self._past))
            del self._past[oldest]
            self._told.pop(oldest, None)

    def note_conflict(self, peer: PeerId) -> bool:
        """Record that an ended incarnation of ``peer`` has come back. Return whether it is the first time."""
        is_news = peer not in self._told
        self._told[peer] = None
        return is_news


# -- Connections by peer -----------------------------------------------------------------------------------------------
# 1. One connection per pair of peers serves. A direct one replaces a relayed one. If both dial at once, the one dialled
#    by the smaller peer id stays, and the other finishes what it has begun. A peer that was restarted replaces its old
#    connection. Its old incarnation is refused while the new one is connected (``PastIncarnations``).
# 2. Only the serving incarnation is read. Connections of another one end when it begins to serve, and a connection that
#    is turned away is not read. (Alternating heartbeats of two processes would make both look dead.)
# 3. Connected and Disconnected alternate for each peer, whatever happens to connections below.
# 4. Places are bounded; net/abuse_limits.py decides which peer gets one when all are taken.


LEAVING = "the peer is leaving"
TWIN = "another process with this identity is connected: a copy of the state folder?"


class Peers:
    """The connection that serves each peer, by the rules above.

    ``places`` is the maximum number of peers; ``connections`` is the endpoint's table of all connections.
    """

    def __init__(self, context: EndpointContext, places: int, connections: Mapping[ConnectionId, Connection]) -> None:
        self.serving: dict[PeerId, Connection] = {}
        self.is_leaving = False
        self._past = PastIncarnations()
        self._context = context
        self._places = places
        self._connections = connections

    def handle_proved(self, connection: Connection) -> bool:
        """Decide the role of a connection whose peer is proved. Return whether it serves from now on."""
        peer, old = connection.peer, self.serving.get(connection.peer)
        if self.is_leaving:
            connection.turn_away(GoodbyeCode.LEAVING, LEAVING)
        elif self._context.scores.is_shut_out(peer, self._context.now):
            connection.turn_away(
                GoodbyeCode.BROKEN, "you sent too much data that could not be parsed; try again in a minute"
            )
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
            connection.turn_away(GoodbyeCode.LEAVING, TWIN)
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
        """Report the peer's disconnection, if ``connection`` served it."""
        if connection.is_proved and self.serving.get(connection.peer) is connection:
            del self.serving[connection.peer]
            self._context.emit(Disconnected(connection.id, reason))

    def _serve(self, connection: Connection) -> bool:
        if len(self.serving) >= self._places:
            places = {other: (machine_of(other.host), other.received_at) for other in self.serving.values()}
            out = displaced(places, machine_of(connection.host))
            if out is None:
                connection.turn_away(GoodbyeCode.LEAVING, f"{len(self.serving)} peers are connected already")
                return False
            reason = "it made room: too many peers of its address are connected"
            self.stop_serving(out, reason)
            out.close(GoodbyeCode.LEAVING, reason)
        for other in [c for c in self._connections.values() if c.is_open and c.peer == connection.peer]:
            if _life_of(other) != _life_of(connection):
                other.abort("another process of the peer is connected")
        self.serving[connection.peer] = connection
        self._context.emit(Connected(connection.id))
        return True

    def _bind_lane(self, lane: Connection, primary: Connection | None) -> None:
        """Bind a lane to the primary connection whose dialler's nonce it names.

        A lane without a primary is not read. Data sent on it is not acknowledged, and is sent again on another.
        """
        if (
            primary is None
            or not primary.is_open
            or primary.session.is_lane
            or primary.greeting.nonce != lane.greeting.bond
            or primary.peer != lane.peer
            or primary.role is not lane.role
        ):
            lane.turn_away(GoodbyeCode.LEAVING, "the primary connection of this lane does not exist")
        elif not lane.session.become_lane_of(primary.session):
            lane.turn_away(GoodbyeCode.LEAVING, f"{len(primary.session.lanes.members)} lanes are enough")

    def _rank(self, connection: Connection) -> tuple[bool, bool, int]:
        """Return the rank of a connection among those of one peer; both ends keep the highest.

        A direct connection comes first; then one dialled by the smaller peer id; then the latest of one dialler.
        """
        greeting = connection.greeting
        return (
            not greeting.is_relayed,
            greeting.peer == min(self._context.handshake_factory.peer, connection.peer),
            greeting.attempt,
        )


def _life_of(connection: Connection) -> bytes:
    assert connection.remote is not None
    return connection.remote.life


# -- Endpoint ----------------------------------------------------------------------------------------------------------


class Hold(Struct, frozen=True):
    """A payload that the user has not taken yet. Its bytes are divided among the accounts of the pair's lanes."""

    accounts: tuple[Account, ...]
    bytes_each: int


class Endpoint:
    """All connections of one peer; see the module. ``now`` is in seconds, on any monotonic clock."""

    def __init__(self, handshake_factory: HandshakeFactory, limits: TransportLimits) -> None:
        self._limits = limits
        self._context = EndpointContext(handshake_factory, limits)
        self._ids = itertools.count()
        self.connections: dict[ConnectionId, Connection] = {}
        """All connections whose Ended was not handed out yet, including unproved and retiring ones."""
        self._half_open: Room[ConnectionId] = Room(limits.handshakes)
        """Accepted connections whose peers have not proved themselves yet."""
        self._peers = Peers(self._context, limits.connections, self.connections)
        self.serving: Mapping[PeerId, Connection] = self._peers.serving
        """The connection that serves each peer. It may be closing."""
        self._path_monitor = PathMonitor(self._context, limits, self.connections)
        self._accounts: dict[Account, Connection] = {}
        self._next_deadline: float | None = None
        """Earliest deadline of the context at the last call of ``next_deadline``."""
        self._past_traffic = Traffic()
        """Bytes on connections that have ended."""

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def up_bytes_per_s(self) -> float | None:
        """Current upload budget, set or learned; None: no limit."""
        return self._context.shaper.bytes_per_s

    @property
    def line_bytes_per_s(self) -> float | None:
        """Upload rate of the link; see ``PathMonitor``."""
        return self._path_monitor.line_bytes_per_s

    def connection(self, connection: ConnectionId) -> Connection:
        """Return the connection of an id. Raises KeyError once its Ended was handed out."""
        return self.connections[connection]

    def traffic(self) -> Traffic:
        """Return the bytes on all connections since the start."""
        total = Traffic()
        total.add(self._past_traffic)
        for connection in self.connections.values():
            total.add(connection.session.traffic)
        return total

    def waiting_payloads(self) -> tuple[bool, bool]:
        """Return whether payloads wait that only the link or the budget holds back, and whether announced ones are on
        their way to this peer."""
        connections = self.connections.values()
        accounts = [one.session.account for one in connections]
        return any(one.has_waiting_bulk for one in connections), any(one is not None and one.demand for one in accounts)

    # -- connections -------------------------------------------------------------------------------------------------

    def add_connection(self, role: Role, now: float, *, host: str, dialled: Dialled = ANYBODY) -> ConnectionId:
        """Add a connection to or from the numeric address ``host``, before TLS. Return its id."""
        self._context.now = now
        connection = ConnectionId(next(self._ids))
        self.connections[connection] = Connection(connection, self._context, role=role, host=host, dialled=dialled)
        if role is Role.LISTENER:
            out = self._half_open.enter(connection, machine_of(host))
            if out is not None:
                self.connections[out].abort("it made room for a newcomer: it took too long to prove itself")
        return connection

    def handle_tls_established(self, connection: ConnectionId, fingerprint: bytes, now: float) -> None:
        """Report that TLS is established. ``fingerprint`` is the SHA-256 of the listener's certificate."""
        self._context.now = now
        if (found := self.connections.get(connection)) is not None:
            found.handle_tls_established(fingerprint)

    def receive_data(self, connection: ConnectionId, data: bytes, now: float) -> None:
        """Take received data. A driver that reads into the connection's ``buffer()`` and calls ``advance()`` saves a
        copy.
        """
        self._context.now = now
        if (found := self.connections.get(connection)) is not None:
            found.receive_data(data)

    def handle_connection_lost(self, connection: ConnectionId, reason: str, now: float) -> None:
        """Report that the connection's socket was closed, by either side."""
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
        """Close a connection at once; queued data is lost."""
        self._context.now = now
        if (found := self.connections.get(connection)) is not None:
            found.abort(reason)

    def pause_writing(self, connection: ConnectionId) -> None:
        """Report that the connection's socket accepts no more data at present."""
        if (found := self.connections.get(connection)) is not None:
            found.is_paused = True

    def resume_writing(self, connection: ConnectionId) -> None:
        """Report that the connection's socket accepts data again."""
        if (found := self.connections.get(connection)) is not None:
            found.is_paused = False
            self._context.touch(connection)

    def handle_path_info(self, paths: Mapping[ConnectionId, Path], now: float) -> None:
        """Take the kernel's measurements of the connections that PathInfoWanted named."""
        self._context.now = now
        self._path_monitor.handle_paths(paths)
        self._emit_pacing()

    def handle_lane_dialled(self, wanted: LaneWanted, is_there: bool, now: float) -> None:
        """Report the result of dialling a lane that LaneWanted asked for."""
        self._context.now = now
        self._path_monitor.handle_lane_dialled(wanted.primary, is_there)

    def leave(self, reason: str, now: float) -> None:
        """Close all connections in order, and refuse new ones."""
        self._context.now = now
        self._peers.is_leaving = True
        for connection in self.connections.values():
            if connection.session.is_lane:
                continue  # Lanes end with their primary.
            if connection.is_open:
                connection.close(GoodbyeCode.LEAVING, reason)
            else:
                connection.abort(reason)

    # -- for the user ------------------------------------------------------------------------------------------------

    def send(
        self, peer: PeerId, body: bytes, payload: memoryview | None, priority: float, topic: Hashable | None
    ) -> bool:
        """Queue a message. Return False if the peer is not connected or there is no room.

        Raises:
            ValueError: ``body`` is longer than 1 MiB.
        """
        connection = self.serving.get(peer)
        return connection is not None and connection.send(body, payload, priority, topic)

    def send_request(
        self, peer: PeerId, body: bytes, now: float, *, timeout_s: float, max_payload: int
    ) -> OutgoingRequest:
        """Queue a request. Its result is AnswerReceived or RequestFailed.

        Raises:
            RequestError: the peer is not connected, or there is no room.
            ValueError: ``body`` is longer than 1 MiB.
        """
        self._context.now = now
        connection = self.serving.get(peer)
        if connection is None or not connection.is_open:
            raise RequestError("not connected")
        return connection.session.send_request(body, timeout_s, max_payload)

    def withdraw_request(self, request: OutgoingRequest) -> None:
        """Cancel a request of this peer. Neither AnswerReceived nor RequestFailed will come."""
        if (connection := self.connections.get(request.connection)) is not None:
            connection.session.withdraw_request(request.number)

    def send_answer(self, request: IncomingRequest, answer: Answer) -> None:
        """Answer a request of the other peer."""
        if (connection := self.connections.get(request.connection)) is not None:
            connection.session.send_answer(request.number, answer)

    def refuse_request(self, request: IncomingRequest, text: str) -> None:
        """Refuse a request of the other peer; ``text`` is the reason."""
        if (connection := self.connections.get(request.connection)) is not None:
            connection.session.refuse_request(request.number, text)

    def accept_payload(self, offer: Offered, body: Any) -> None:
        """Accept an offered payload. Its ``Message`` will have ``body``, such as the decoded ``offer.body``."""
        self.connections[offer.receiver].session.accept_offer(offer, body)

    def hold_payload(self, message: Message) -> Hold:
        """Count the message's payload against the peer's credit until ``release_payload``."""
        lanes = self.connections[message.connection].session.lanes.members
        accounts = tuple(lane.account for lane in lanes if lane.account is not None)
        hold = Hold(accounts, len(message.payload or b"") // max(1, len(accounts)))
        for account in accounts:
            account.untaken += hold.bytes_each
        return hold

    def release_payload(self, hold: Hold, now: float) -> None:
        """Release a payload that the user has taken, so that the peer may send more."""
        self._context.now = now
        for account in hold.accounts:
            account.untaken -= hold.bytes_each
            self._send_credit(self._context.grants.update(account, now))

    def blame(self, peer: PeerId, now: float, *, is_forged: bool = False) -> None:
        """Report that ``peer`` sent a malformed or forged body. After too many of them it is disconnected."""
        self._context.now = now
        connection = self.serving.get(peer)
        if self._context.scores.blame(peer, FORGED if is_forged else BODY, now) and connection is not None:
            connection.break_off("too much data that cannot be parsed or is forged")

    def is_shut_out(self, peer: PeerId, now: float) -> bool:
        """Return whether ``peer`` is blocked for what it sent."""
        return self._context.scores.is_shut_out(peer, now)

    def disconnect(self, peer: PeerId, reason: str, now: float) -> None:
        """Disconnect ``peer``: flush queued data for at most ``part_s`` seconds, and tell it ``reason``."""
        self._context.now = now
        if (connection := self.serving.get(peer)) is not None:
            connection.close(GoodbyeCode.LEAVING, reason)

    def set_budget(self, up: UpBudget, down: float | None, now: float) -> None:
        """Set the total rates, in bytes per second, at which to send and to receive; None: no limit."""
        self._context.now = now
        self._send_credit(self._context.grants.set_budget(down, now))
        self._path_monitor.set_budget(up)
        self._emit_pacing()

    # -- driving -----------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return the latest time for the next ``wake``. A past time means at once, None that nothing is due."""
        first, context = self._context.deadlines.next(), self._context
        self._next_deadline = first
        bulk_at, credit_at = context.shaper.next_at(), context.grants.due_at
        if bulk_at is not None and (first is None or bulk_at < first):
            first = bulk_at
        return credit_at if credit_at is not None and (first is None or credit_at < first) else first

    @property
    def has_new_deadline(self) -> bool:
        """True if ``next_deadline`` may be earlier than at its last call. (``to_send`` may make it earlier, too.)"""
        return self._context.deadlines.next() != self._next_deadline or self._context.grants.due_at is not None

    def wake(self, now: float) -> None:
        """Do what is due. Call this when ``next_deadline`` has come."""
        self._context.now = now
        while (key := self._context.deadlines.pop_due(now)) is not None:
            self._handle_deadline(key)
        due_at = self._context.grants.due_at
        if due_at is not None and due_at <= now:
            self._send_credit(self._context.grants.grant(now))

    def events(self, now: float) -> Iterator[Event]:
        """Yield events in order. Received bytes are parsed lazily, after the events before them were handled."""
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
        """Yield bytes to write now, with their connection: all control, then about ``bulk_bytes`` of bulk data."""
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
            shaper.wrote(chosen, count, context.now, ends_turn=piece.ends_turn)
            if shaper.has_news:
                self._emit_pacing()
            written += count
            if not connection.session.outbox.has_bulk:
                context.touch(chosen)  # a GOODBYE may have waited for the bulk data

    @property
    def has_events(self) -> bool:
        """True if ``events`` yields something."""
        return bool(self._context.unread or self._context.events)

    @property
    def has_control(self) -> bool:
        """True if ``to_send`` may yield something besides bulk data."""
        return bool(self._context.touched)

    def _emit_pacing(self) -> None:
        for connection, rate in self._context.shaper.news().items():
            self._context.emit(Paced(connection, rate))

    def _handle_next_frame(self, connection: Connection) -> bool:
        """Handle the next frame of a connection. Return whether there is another one.

        A connection that breaks the format is closed; for a lane, its primary is closed, too.
        """
        try:
            return connection.handle_next_frame()
        except FrameError as error:
            if connection.is_proved:
                self._context.scores.blame(connection.peer, FRAMES, self._context.now)
            for broken in dict.fromkeys((connection.id, connection.session.primary.connection)):
                self.connections[broken].break_off(f"broken frames: {error}")
            return connection.has_unread

    def _handle_lifecycle(self, event: Proved | Ended) -> None:
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
        """Update the connection's account with received bytes, and grant its sender more credit."""
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
