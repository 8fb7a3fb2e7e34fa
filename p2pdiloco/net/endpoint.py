"""All connections of one peer, without I/O: which serve, what they carry, who sends next, what is due when.

Whoever drives an endpoint owns the sockets and the clock. It says what happened (``begin``, ``up``, ``receive``,
``lost``, ``pause``, ``resume``, ``saw``, ``send``, ``ask`` ...), and after each such call, and when ``next_deadline``
has come, it goes through ``events`` and ``to_send`` until both are empty, and closes what it is told to close. Two
endpoints in virtual time, with one connection whose bytes take no time:

    now = 0.0
    ends = {ann: ann.begin(Role.DIALLER, now, host="bob"), bob: bob.begin(Role.LISTENER, now, host="ann")}
    for endpoint, connection in ends.items():
        endpoint.up(connection, bytes(32), now)             # TLS is there; both know the listener's certificate
    while now is not None:
        for here, there in ((ann, bob), (bob, ann)):
            here.wake(now)
            for event in here.events(now):
                match event:
                    case Offered():
                        here.accept(event)                  # or not: then the sender is told to stop
                    case Message():
                        print(event.connection.peer, event.body, event.payload)
                    case Closing():
                        here.lost(event.connection, "closed", now)
                        there.lost(ends[there], "the other side closed the connection", now)
            for _, piece in here.to_send(now):
                there.receive(ends[there], piece.head + piece.chunk, now)
        now = earliest(ann.next_deadline(), bob.next_deadline())

(``tests/property/two_endpoints.py`` does that with delays and cuts, ``transport/transport.py`` with asyncio.)

Rules of this file:
1. No I/O here or below: no socket, clock, thread, file or random number. What happens is an event; nobody is called.
2. One connection per pair of peers serves (net/endpoint.py).
3. Nothing waits: what does not fit is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping

from msgspec import Struct

from p2pdiloco.net.abuse_limits import BODY, Room, displaced, machine_of
from p2pdiloco.net.bandwidth import Path, Traffic
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.context import Due, EndpointContext
from p2pdiloco.net.events import (
    Asking,
    Connected,
    Disconnected,
    Ended,
    Event,
    LaneWanted,
    Message,
    Offered,
    Paced,
    Proved,
    Question,
    TwinRefused,
)
from p2pdiloco.net.flow_control import Account
from p2pdiloco.net.frames import Parting
from p2pdiloco.net.handshake import ANYBODY, Dialled, Greeter, Role
from p2pdiloco.net.limits import TransportLimits, UpBudget
from p2pdiloco.net.path_monitor import PathMonitor, bind
from p2pdiloco.net.rate_limit import TURN_BYTES
from p2pdiloco.net.send_queue import Slice
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.wire.request_reply import Answer, RequestError

# -- Incarnations of a peer --------------------------------------------------------------------------------------------
# A peer that is started anew gets a new life (``Hello.life``), which takes the place of the one before. A life that
# comes back after that means two processes with one identity: it is refused while the later one is connected, so that
# the two do not take each other's place for ever.


PEERS = 1024
LIVES = 4
"""Of each peer; more are forgotten, the oldest first."""


class PastIncarnations:
    """See above."""

    def __init__(self) -> None:
        self._past: dict[PeerId, deque[bytes]] = {}
        self._told: dict[PeerId, None] = {}
        """Peers of which it is known that they are two processes."""

    def has(self, peer: PeerId, life: bytes) -> bool:
        """Whether that life is over."""
        return life in self._past.get(peer, ())

    def end(self, peer: PeerId, life: bytes) -> None:
        """Another life takes its place."""
        past = self._past.pop(peer, None) or deque(maxlen=LIVES)
        if life not in past:
            past.append(life)
        self._past[peer] = past
        while len(self._past) > PEERS:
            oldest = next(iter(self._past))
            del self._past[oldest]
            self._told.pop(oldest, None)

    def is_news(self, peer: PeerId) -> bool:
        """Whether a life that is over comes back for the first time."""
        is_news = peer not in self._told
        self._told[peer] = None
        return is_news


# -- Connections by peer -----------------------------------------------------------------------------------------------
# Which connection serves which peer.
# Rules of this file:
# 1. One connection per pair of peers serves. A direct one takes the place of a relayed one; if both dial at once, the
#    one dialled by the smaller peer id stays. The other finishes what it has begun. A peer that was started anew
#    (``Hello.life``) replaces its old connection, and its old life does not come back while the new one is here
#    (net/endpoint.py).
# 2. What is heard of a peer is of the life that serves: another life's connections end when this one's comes, and one
#    that is turned away is not listened to. (Heartbeats of two processes in turns would make both look dead.)
# 3. Connected and Disconnected are told in turns for each peer, whatever happens to connections below.
# 4. Places are bounded; who takes one when all are taken is net/abuse_limits.py's.


LEAVING = "the peer is leaving"
TWIN = "another process with this identity is connected: a copy of the state folder?"


class Peers:
    """See the module's rules. ``places``: peers at once. ``connections``: all that there are, as they come and go."""

    def __init__(self, commons: EndpointContext, places: int, connections: Iterable[Connection]) -> None:
        self.serving: dict[PeerId, Connection] = {}
        self.is_leaving = False
        self._past = PastIncarnations()
        self._commons = commons
        self._places = places
        self._connections = connections

    def proved(self, connection: Connection) -> bool:
        """A connection is there. Whether it serves now."""
        peer, old = connection.peer, self.serving.get(connection.peer)
        if self.is_leaving:
            connection.turn_away(Parting.LEAVING, LEAVING)
        elif self._commons.scores.is_shut_out(peer, self._commons.agenda.now):
            connection.turn_away(Parting.BROKEN, "you sent too much that could not be read; try again in a minute")
        elif connection.greeting.lane:
            bind(connection, [old] if old is not None else [])
        elif old is None:
            return self._install(connection)
        elif _life_of(old) != _life_of(connection):
            if not (old.is_open and self._past.has(peer, _life_of(connection))):
                self._past.end(peer, _life_of(old))
                return self._replace(old, connection)
            if self._past.is_news(peer):
                self._commons.agenda.tell(TwinRefused(connection, old))
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
        self.gone(old, reason)
        old.abort(reason)
        return self._install(connection)

    def gone(self, connection: Connection, reason: str) -> None:
        """A connection serves no longer."""
        if connection.is_proved and self.serving.get(connection.peer) is connection:
            del self.serving[connection.peer]
            self._commons.agenda.tell(Disconnected(connection, reason))

    def _install(self, connection: Connection) -> bool:
        if len(self.serving) >= self._places:
            places = {other: (machine_of(other.host), other.heard_at) for other in self.serving.values()}
            out = displaced(places, machine_of(connection.host))
            if out is None:
                connection.turn_away(Parting.LEAVING, f"{len(self.serving)} peers are connected already")
                return False
            reason = "it made room: too many peers of its address are connected"
            self.gone(out, reason)
            out.part(Parting.LEAVING, reason)
        for other in [c for c in self._connections if c.is_open and c.peer == connection.peer]:
            if _life_of(other) != _life_of(connection):
                other.abort("another life of the peer is here")
        self.serving[connection.peer] = connection
        self._commons.agenda.tell(Connected(connection))
        return True

    def _rank(self, connection: Connection) -> tuple[bool, bool, int]:
        """Both ends compute the same: direct wins; then dialled by the smaller id; of one dialler's the latest."""
        greeting = connection.greeting
        return (
            not greeting.is_relayed,
            greeting.peer == min(self._commons.greeter.peer, connection.peer),
            greeting.attempt,
        )


def _life_of(connection: Connection) -> bytes:
    assert connection.remote is not None
    return connection.remote.life


# -- Endpoint ----------------------------------------------------------------------------------------------------------
# All connections of one peer, without I/O: which serve, what they carry, who sends next, what is due when.


class Hold(Struct, frozen=True):
    """A payload that the user has not taken yet: bytes that the accounts bear."""

    accounts: tuple[Account, ...]
    bytes_each: int


class Endpoint:
    """See the module's docstring. ``now``: seconds on any clock that never goes back."""

    def __init__(self, greeter: Greeter, limits: TransportLimits) -> None:
        self._limits = limits
        self._commons = EndpointContext.of(greeter, limits)
        self._agenda = self._commons.agenda
        self.connections: dict[Connection, None] = {}
        """Every one that has not ended, unproved and retiring ones included."""
        self._strangers: Room[Connection] = Room(limits.handshakes)
        """Accepted and not proved."""
        self._peers = Peers(self._commons, limits.connections, self.connections)
        self._watch = PathMonitor(self._commons, limits, self.connections)
        self._accounts: dict[Account, Connection] = {}
        self._told_deadline: float | None = None
        """The earliest of ``EventQueue.deadlines`` when ``next_deadline`` was called last."""
        self._past = Traffic()
        """Of connections that have ended."""

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def serving(self) -> Mapping[PeerId, Connection]:
        """The connection that serves each peer. It may be parting."""
        return self._peers.serving

    @property
    def up_bytes_per_s(self) -> float | None:
        """The up budget in force, set or learned; None: no limit."""
        return self._commons.shaper.bytes_per_s

    @property
    def line_bytes_per_s(self) -> float | None:
        """What the link carries upwards; see ``PathMonitor``."""
        return self._watch.line_bytes_per_s

    def traffic(self) -> Traffic:
        """Bytes on all connections since the start."""
        total = Traffic()
        total.add(self._past)
        for connection in self.connections:
            total.add(connection.conversation.traffic)
        return total

    # -- connections -------------------------------------------------------------------------------------------------

    def begin(self, role: Role, now: float, *, host: str, dialled: Dialled = ANYBODY) -> Connection:
        """A connection to the numeric address ``host`` is there, not encrypted yet."""
        self._agenda.now = now
        connection = Connection(self._commons, role=role, host=host, dialled=dialled)
        self.connections[connection] = None
        if role is Role.LISTENER:
            out = self._strangers.enter(connection, machine_of(host))
            if out is not None:
                out.abort("it made room for a newcomer: it took long to prove itself")
        return connection

    def up(self, connection: Connection, fingerprint: bytes, now: float) -> None:
        """TLS is there, with the listener's certificate of this SHA-256 ``fingerprint``."""
        self._agenda.now = now
        connection.up(fingerprint)

    def receive(self, connection: Connection, data: bytes, now: float) -> None:
        """``data`` came. (Who can read into ``connection.buffer()`` and say ``connection.advance()`` saves a copy.)"""
        self._agenda.now = now
        connection.receive(data)

    def lost(self, connection: Connection, reason: str, now: float) -> None:
        """The socket is closed, by whomever."""
        self._agenda.now = now
        if connection in self.connections:
            connection.lost(reason)
            self._past.add(connection.conversation.traffic)
            del self.connections[connection]
            self._agenda.unread.pop(connection, None)
            self._strangers.leave(connection)
            if connection.conversation.account is not None:
                self._accounts.pop(connection.conversation.account, None)

    def abort(self, connection: Connection, reason: str, now: float) -> None:
        """Close it at once, whatever it is doing."""
        self._agenda.now = now
        connection.abort(reason)

    def pause(self, connection: Connection) -> None:
        """The socket takes no more."""
        connection.is_paused = True

    def resume(self, connection: Connection) -> None:
        """The socket takes more."""
        connection.is_paused = False
        self._agenda.touch(connection)

    def saw(self, paths: Mapping[Connection, Path], now: float) -> None:
        """What the kernel knows of the connections that LookWanted named."""
        self._agenda.now = now
        self._watch.saw(paths)
        self._pace()

    def lane_dialled(self, wanted: LaneWanted, is_there: bool, now: float) -> None:
        """A lane that was wanted is proved, or failed."""
        self._agenda.now = now
        self._watch.lane_dialled(wanted.primary, is_there)

    def leave(self, reason: str, now: float) -> None:
        """Part from every peer, and from those that come."""
        self._agenda.now = now
        self._peers.is_leaving = True
        for connection in list(self.connections):
            if connection.primary is not connection:
                continue  # Lanes end with their primary.
            if connection.is_open:
                connection.part(Parting.LEAVING, reason)
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

    def ask(self, peer: PeerId, body: bytes, now: float, *, timeout_s: float, max_payload: int) -> Question:
        """Queue a request; Answered or Unanswered will come.

        Raises:
            RequestError: not connected, or no room.
            ValueError: ``body`` is longer than 1 MiB.
        """
        self._agenda.now = now
        connection = self.serving.get(peer)
        if connection is None or not connection.is_open:
            raise RequestError("not connected")
        return connection.conversation.ask(body, timeout_s, max_payload)

    def withdraw(self, question: Question) -> None:
        """The answer is not wanted any more; neither Answered nor Unanswered will come."""
        question.connection.conversation.withdraw(question.number)

    def answer(self, asking: Asking, answer: Answer) -> None:
        """The answer to the peer's request."""
        asking.connection.conversation.answer(asking.number, answer)

    def refuse(self, asking: Asking, text: str) -> None:
        """There is no answer; the peer is told why."""
        asking.connection.conversation.refuse(asking.number, text)

    def accept(self, offer: Offered) -> None:
        """Take the payload that is to come."""
        offer.receiver.accept(offer)

    def hold(self, message: Message) -> Hold:
        """The user has not taken the message's payload yet: its bytes count against what the peer may send."""
        lanes = message.connection.conversation.lanes.members
        accounts = tuple(account for lane in lanes if (account := lane.conversation.account) is not None)
        hold = Hold(accounts, len(message.payload or b"") // max(1, len(accounts)))
        for account in accounts:
            account.untaken += hold.bytes_each
        return hold

    def release(self, hold: Hold, now: float) -> None:
        """The user has taken the payload of ``hold``: its bytes no longer count against the peer."""
        self._agenda.now = now
        for account in hold.accounts:
            account.untaken -= hold.bytes_each
            self._tell_credit(self._commons.grants.progressed(account, now))

    def blame(self, peer: PeerId, now: float) -> None:
        """``peer`` sent a body that cannot be read. Too many, and it is cut off."""
        self._agenda.now = now
        connection = self.serving.get(peer)
        if self._commons.scores.blame(peer, BODY, now) and connection is not None:
            connection.break_off("too much that cannot be read")

    def part(self, peer: PeerId, reason: str, now: float) -> None:
        """Part from ``peer``: what is queued is flushed for ``part_s`` seconds; it is told ``reason``."""
        self._agenda.now = now
        if (connection := self.serving.get(peer)) is not None:
            connection.part(Parting.LEAVING, reason)

    def set_budget(self, up: UpBudget, down: float | None, now: float) -> None:
        """Bytes per second over all connections from now on; None: no limit."""
        self._agenda.now = now
        self._tell_credit(self._commons.grants.set_budget(down, now))
        self._watch.set_budget(up)
        self._pace()

    def set_cap(self, peer: PeerId, bytes_per_s: float | None, now: float) -> None:
        """Limit what is sent to ``peer`` beside the budget; None lifts it. Lasts until it disconnects."""
        if peer in self.serving:
            self._commons.shaper.set_cap(peer, bytes_per_s, now)
            self._pace()

    # -- driving -----------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When ``wake`` is to be called at the latest; in the past: at once. None: not before something happens."""
        first = self._told_deadline = self._agenda.deadlines.next()
        commons = self._commons
        bulk_at, credit_at = commons.shaper.next_at(), commons.grants.due_at
        if bulk_at is not None and (first is None or bulk_at < first):
            first = bulk_at
        return credit_at if credit_at is not None and (first is None or credit_at < first) else first

    @property
    def has_new_deadline(self) -> bool:
        """``next_deadline`` may be sooner than it was; ``to_send`` may make it so, too."""
        return self._agenda.deadlines.next() != self._told_deadline or self._commons.grants.due_at is not None

    def wake(self, now: float) -> None:
        """Time has passed."""
        self._agenda.now = now
        while (key := self._agenda.deadlines.pop_due(now)) is not None:
            self._due(key)
        due_at = self._commons.grants.due_at
        if due_at is not None and due_at <= now:
            self._tell_credit(self._commons.grants.grant(now))

    def events(self, now: float) -> Iterator[Event]:
        """What happened, one after the other: what follows an event in the bytes that came is looked at after it."""
        agenda = self._agenda
        agenda.now = now
        while True:
            while agenda.events:
                event = agenda.events.popleft()
                if isinstance(event, (Proved, Ended)):
                    self._note(event)
                yield event
            if not agenda.unread:
                return
            connection = next(iter(agenda.unread))
            if not connection.step():
                agenda.unread.pop(connection, None)
                self._credit(connection)

    def to_send(self, now: float, bulk_bytes: int = TURN_BYTES) -> Iterator[tuple[Connection, Slice]]:
        """What is to be written now: all control that waits, then about ``bulk_bytes`` of bulk."""
        agenda, shaper = self._agenda, self._commons.shaper
        agenda.now = now
        written = 0
        while True:
            while agenda.touched:
                connection = next(iter(agenda.touched))
                del agenda.touched[connection]
                connection.settle()
                if connection.is_over:
                    continue
                talk = connection.conversation
                talk.refill()
                while not connection.is_paused and (control := talk.next_control()) is not None:
                    yield connection, control
                    shaper.wrote_control(connection, len(control.head), agenda.now)
                if talk.has_waiting_bulk:
                    shaper.ready(connection)
                elif talk.outbox.is_empty:
                    connection.settle()
            if written >= bulk_bytes or (choice := shaper.next(agenda.now)) is None:
                return
            connection, most = choice
            piece = None if connection.is_paused else connection.conversation.next_bulk(most)
            if piece is None:
                shaper.cannot(connection)
                continue
            yield connection, piece
            count = len(piece.head) + len(piece.chunk)
            shaper.wrote(connection, count, agenda.now)
            if shaper.has_news:
                self._pace()
            written += count
            if not connection.conversation.outbox.has_bulk:
                agenda.touch(connection)  # a GOODBYE may have waited for it

    @property
    def has_events(self) -> bool:
        """``events`` has something."""
        return bool(self._agenda.unread or self._agenda.events)

    @property
    def has_control(self) -> bool:
        """``to_send`` may have something beside bulk."""
        return bool(self._agenda.touched)

    def _pace(self) -> None:
        for connection, rate in self._commons.shaper.news().items():
            self._agenda.tell(Paced(connection, rate))

    def _note(self, event: Proved | Ended) -> None:
        """What the endpoint itself has to do with an event."""
        match event:
            case Proved(connection):
                self._strangers.leave(connection)
                self._pace()
                if connection.is_open and self._peers.proved(connection):
                    self._watch.serves(connection)
                account = connection.conversation.account
                if account is not None and not connection.is_over:
                    self._accounts[account] = connection
                    self._tell_credit(self._commons.grants.open(account, self._agenda.now))
            case Ended(connection, reason):
                self._peers.gone(connection, reason)
                self._watch.forget(connection)

    def _due(self, key: Hashable) -> None:
        match key:
            case (Due.LIFE, Connection() as connection):
                connection.overdue()
            case (Due.QUESTION, Connection() as connection, int() as number):
                connection.conversation.time_out(number)
            case (Due.ASKING, Connection() as connection, int() as number):
                connection.conversation.answer_overdue(number)
            case Due.LOOK:
                self._watch.look()

    def _credit(self, connection: Connection) -> None:
        """Bytes came: the sender may send more."""
        account, inbox = connection.conversation.account, connection.conversation.inbox
        news = (inbox.arrived_bytes, inbox.demand_bytes)
        if account is None or news == (account.received, account.demand):
            return
        account.received, account.demand = news
        self._tell_credit(self._commons.grants.progressed(account, self._agenda.now))

    def _tell_credit(self, grown: list[Account]) -> None:
        for account in grown:
            if (connection := self._accounts.get(account)) is not None and not connection.is_over:
                connection.conversation.tell_credit()
