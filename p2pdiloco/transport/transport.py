"""The transport: an endpoint (net/endpoint.py, where everything is decided) on asyncio's sockets.

Rules of this file:
1. What comes from sockets, timers and the user goes into the endpoint; a *turn* then hands out its events and writes
   what it wants to send. There is one timer.
2. A message goes down one way: socket, ``Channel``, endpoint, ``_tell``, handler.
3. ``send`` never waits. What does not fit is refused at once.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol, Self

from p2pdiloco.net import events as ev
from p2pdiloco.net.authorization import Authorizer
from p2pdiloco.net.bandwidth import Traffic
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.endpoint import LEAVING, Endpoint
from p2pdiloco.net.events import Event
from p2pdiloco.net.handshake import NONCE_BYTES, Dialled, Greeter, Hello, Role
from p2pdiloco.net.limits import ConnectionLimits, TransportLimits, UpBudget
from p2pdiloco.net.rate_limit import TURN_BYTES
from p2pdiloco.net.send_queue import Slice
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport import addresses, sockets
from p2pdiloco.transport.addresses import Address
from p2pdiloco.transport.connection_setup import ConnectionSetup
from p2pdiloco.transport.identity import Identity, verify
from p2pdiloco.transport.sockets import DialError, Impostor, Listeners, PeerRefused
from p2pdiloco.transport.tls import TlsContexts, remote_fingerprint
from p2pdiloco.transport.tls_connection import Channel
from p2pdiloco.util import logs
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused, Response

# -- Endpoint driver ---------------------------------------------------------------------------------------------------
# The turns of an endpoint in an event loop: what happened is told, what it wants to send is written, a timer set.


LEAST_WAIT_S = 0.001
"""Event loops count in milliseconds; what waits for less would spin."""


class EndpointDriver:
    """Call ``turn`` after everything that happens to ``endpoint``. ``start`` it within the event loop."""

    def __init__(
        self, endpoint: Endpoint, tell: Callable[[Event], None], write: Callable[[Connection, Slice], None]
    ) -> None:
        self._endpoint = endpoint
        self._tell = tell
        self._write = write
        self._timer: tuple[float, asyncio.Handle] | None = None
        self._is_in_turn = False
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """No turn comes by itself any more."""
        if self._timer is not None:
            self._timer[1].cancel()
            self._timer = None

    def now(self) -> float:
        return self._loop.time()

    def turn(self, bulk_bytes: int = 0) -> None:
        """Hand out what happened and write what is to be written, until there is nothing; then set the timer."""
        if self._is_in_turn:
            return
        self._is_in_turn, endpoint, has_sent = True, self._endpoint, False
        try:
            while True:
                now = self._loop.time()
                for event in endpoint.events(now):
                    self._tell(event)
                if not bulk_bytes and not endpoint.has_control:
                    break
                has_sent = True
                for connection, piece in endpoint.to_send(now, bulk_bytes):
                    self._write(connection, piece)
                bulk_bytes = 0
                if not endpoint.has_events and not endpoint.has_control:
                    break
        finally:
            self._is_in_turn = False
            if has_sent or endpoint.has_new_deadline or endpoint.has_events:
                self._set_timer()

    def turn_soon(self) -> None:
        """A turn with bulk, when the event loop comes round."""
        if not self._is_in_turn:
            self._set(self._loop.time(), self._loop.time())

    def _set_timer(self) -> None:
        now = self._loop.time()
        if self._endpoint.has_events:
            self._set(now, now)  # The user's defect has ended the turn.
        elif self._timer is None or self._timer[0] > now:
            at = self._endpoint.next_deadline()
            if at is not None:
                self._set(at, now)

    def _set(self, at: float, now: float) -> None:
        """One timer: an earlier one stays."""
        if self._timer is not None:
            if self._timer[0] <= at:
                return
            self._timer[1].cancel()
        if at <= now:
            handle = self._loop.call_soon(self._wake)
        else:
            handle = self._loop.call_at(max(at, now + LEAST_WAIT_S), self._wake)
        self._timer = (at, handle)

    def _wake(self) -> None:
        self._timer = None
        self._endpoint.wake(self._loop.time())
        self.turn(TURN_BYTES)


# -- Transport callbacks -----------------------------------------------------------------------------------------------
# What a transport tells and asks its user.


class TransportHandler(Protocol):
    """What a transport tells its user. All but ``answer`` are called on the event loop: be quick, never block."""

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """``peer`` can be sent to. ``address``: its socket's, as a multiaddr; of an inbound one not where it listens.
        ``is_observer``: it named no run (``status``, or a joiner that does not know its run yet)."""

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """``peer`` is gone. What was queued for it is lost."""

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> asyncio.Future[Any] | None:
        """A message came. ``payload`` is the handler's own memory from now on, and writable.

        None: it is taken. A future: it is taken when that is done, however it ends; until then its bytes count against
        what the peer may send (``window_bytes``). It must not depend on more bulk to come from that peer."""

    def admit(self, peer: PeerId, body: bytes, size: int) -> bool:
        """Whether to take the payload of ``size`` bytes that comes with ``body``. Asked before memory is taken."""

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """The answer to a request.

        Raises:
            RequestRefused: the text goes to the asker.
        """


class Observer:
    """A transport's handler that takes no part."""

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """Nothing to do."""

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """Nothing to do."""

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> None:
        """Heartbeats and the like are not for us."""

    def admit(self, peer: PeerId, body: bytes, size: int) -> bool:
        """No payloads."""
        return False

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """Nobody asks an observer."""
        raise RequestRefused("this peer only observes")


# -- Requests ----------------------------------------------------------------------------------------------------------
# Requests as whoever waits sees them: a question is a future, the answer to another's question is a task.


class Requests:
    """Ours and the others'."""

    def __init__(self, endpoint: Endpoint, pump: EndpointDriver, tasks: Tasks, handler: TransportHandler) -> None:
        self._endpoint = endpoint
        self._pump = pump
        self._tasks = tasks
        self._handler = handler
        self._asked: dict[ev.Question, asyncio.Future[Response]] = {}
        self._answering: dict[ev.Asking, asyncio.Task[None]] = {}

    async def ask(self, peer: PeerId, body: bytes, timeout_s: float, max_payload: int) -> Response:
        """As ``Transport.request``."""
        question = self._endpoint.ask(peer, body, self._pump.now(), timeout_s=timeout_s, max_payload=max_payload)
        answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._asked[question] = answered
        self._pump.turn()
        try:
            return await answered
        finally:
            if self._asked.pop(question, None) is not None:
                self._endpoint.withdraw(question)
                self._pump.turn()

    def tell(self, event: ev.Asked | ev.Withdrawn | ev.Answered | ev.Unanswered) -> None:
        """To whom it concerns."""
        match event:
            case ev.Asked(asking, body):
                task = self._tasks.spawn(self._answer(asking, body), name=f"answer {asking.number}")
                self._answering[asking] = task
                task.add_done_callback(lambda _: self._answering.pop(asking, None))
            case ev.Withdrawn(asking):
                if (running := self._answering.get(asking)) is not None:
                    running.cancel()
            case ev.Answered(question, response):
                if (answered := self._asked.pop(question, None)) is not None and not answered.done():
                    answered.set_result(response)
            case ev.Unanswered(question, error):
                if (answered := self._asked.pop(question, None)) is not None and not answered.done():
                    answered.set_exception(error)

    async def _answer(self, asking: ev.Asking, body: bytes) -> None:
        try:
            self._endpoint.answer(asking, await self._handler.answer(asking.connection.peer, body))
        except RequestRefused as refusal:
            self._endpoint.refuse(asking, str(refusal))
        except Exception:
            self._endpoint.refuse(asking, "an internal error; the peer's log has it")
            raise
        finally:
            self._pump.turn()


# -- Transport ---------------------------------------------------------------------------------------------------------
# The transport: an endpoint (net/endpoint.py, where everything is decided) on asyncio's sockets.


__all__ = [
    "Answer",
    "ConnectionLimits",
    "DialError",
    "Impostor",
    "PeerRefused",
    "RequestError",
    "RequestRefused",
    "Transport",
    "TransportLimits",
]

log = logs.get("transport")


class Transport:
    """All connections of this process. ``async with Transport(...).serve(handler) as transport``.

    listen: multiaddrs, or one (``/ip4/0.0.0.0/tcp/0``); "" not to listen (an observer).
    run: the run's id, or "" while it is not known. version: the protocol's. door: who is let in; None: everybody.
    observes: it only asks.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        listen: str | Sequence[str],
        run: str,
        version: int,
        limits: TransportLimits | None = None,
        door: Authorizer | None = None,
        observes: bool = False,
    ) -> None:
        self._limits = limits or TransportLimits()
        self._listeners = Listeners(listen)
        self._handler: TransportHandler
        """Set by ``serve``, before anything can come."""
        life = os.urandom(16)
        self.life = life.hex()
        """Tells this process from an earlier or another one with the same identity."""
        self._greeter = Greeter(
            peer=identity.peer_id,
            run=run,
            version=version,
            life=life,
            sign=identity.sign,
            verify=verify,
            nonce=lambda: os.urandom(NONCE_BYTES),
            door=door,
            observes=observes,
        )
        self._endpoint = Endpoint(self._greeter, self._limits)
        self._pump = EndpointDriver(
            self._endpoint, self._tell, lambda connection, piece: self._channels[connection].write(piece)
        )
        self._tls = TlsContexts()
        self._tasks = Tasks()
        self.strangers = ConnectionSetup(
            self._new_channel,
            self._give_up,
            tls=self._tls,
            limits=self._limits,
            tasks=self._tasks,
        )
        self._channels: dict[Connection, Channel] = {}
        self._requests: Requests
        self._congestion = sockets.Congestion(self._limits.congestion)

    # -- life --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def serve(self, handler: TransportHandler) -> AsyncIterator[Self]:
        """Listen, and pass what comes to ``handler``. At the end say goodbye to all, flush, close, within ``part_s``.

        Raises:
            OSError: a listen address is taken or not ours.
            ValueError: it is a name.
        """
        self._handler = handler
        self._requests = Requests(self._endpoint, self._pump, self._tasks, handler)
        self._listeners.open()
        self._pump.start()
        try:
            async with self._tasks:
                for listener in self._listeners:
                    accept = partial(self.strangers.accept_all, listener)
                    self._tasks.keep(accept, name=f"accept at {listener.getsockname()}")
                try:
                    yield self
                finally:
                    await self._part()
        finally:
            self._pump.stop()
            self._listeners.close()

    async def _part(self) -> None:
        doomed = list(self._channels.values())
        self._endpoint.leave(LEAVING, self._pump.now())
        self._pump.turn()
        if doomed:
            await asyncio.wait([channel.gone for channel in doomed], timeout=self._limits.connection.part_s + 1.0)
        for channel in list(self._channels.values()):
            self._endpoint.abort(channel.connection, LEAVING, self._pump.now())
        self._pump.turn()

    # -- for the user ------------------------------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        """Ours."""
        return self._greeter.peer

    @property
    def troubles(self) -> dict[str, str]:
        """Of what accepts; see ``Tasks``."""
        return self._tasks.troubles

    def life_of(self, peer: PeerId) -> str | None:
        """That of the process at the other end, if there is one."""
        connection = self._endpoint.serving.get(peer)
        return None if connection is None or connection.remote is None else connection.remote.life.hex()

    def channel_of(self, peer: PeerId) -> Channel | None:
        """The one that serves ``peer``."""
        connection = self._endpoint.serving.get(peer)
        return None if connection is None or not connection.is_open else self._channels.get(connection)

    def listen_addresses(self) -> list[str]:
        """Multiaddrs with our peer id; for a wildcard one per address of this machine, loopback last."""
        return [f"{address}/p2p/{self.peer_id}" for address in self._listeners.addresses()]

    def peers(self) -> list[PeerId]:
        """The peers that can be sent to."""
        return [peer for peer, connection in self._endpoint.serving.items() if connection.is_open]

    def queued_bytes(self, peer: PeerId) -> int:
        """Bytes that wait to be sent to ``peer``, beyond what the kernel holds."""
        connection = self._endpoint.serving.get(peer)
        return connection.conversation.queued_bytes if connection is not None else 0

    def lanes(self, peer: PeerId) -> int:
        """Connections to ``peer`` over which payloads are spread; 0: not connected."""
        connection = self._endpoint.serving.get(peer)
        return len(connection.conversation.lanes.members) if connection is not None else 0

    def traffic(self) -> Traffic:
        """Bytes on all connections since the start."""
        return self._endpoint.traffic()

    async def dial(self, address: str, timeout_s: float = 10.0) -> PeerId:
        """Connect to the peer at ``address``; if the address names a peer that is connected already, that is enough.

        Raises:
            ValueError: ``address`` is not a multiaddr that we can use.
            PeerRefused: the other side refused us; its reason.
            DialError: anything else: unknown host, refused, timed out, not a peer, another peer, ourselves.
        """
        target = addresses.parse(address)
        if target.peer is not None and target.peer in self.peers():
            return target.peer
        if target.peer == self.peer_id:
            raise DialError(f"{address} is this peer itself")
        try:
            async with asyncio.timeout(timeout_s):
                return await self.strangers.dial(target)
        except TimeoutError:
            raise DialError(f"{target}: no answer within {timeout_s:g} s") from None

    def send(
        self,
        peer: PeerId,
        body: bytes,
        payload: bytes | bytearray | memoryview | None = None,
        priority: float = 0.0,
        topic: Hashable | None = None,
    ) -> bool:
        """Queue a message; control (no payload) overtakes bulk, and lower ``priority`` goes first among payloads.
        A payload with a ``topic`` replaces an earlier one of the same topic that has not begun to go out.

        ``payload`` is shared until it is sent: do not change it. Messages without payload keep their order while one
        connection lasts; those with payloads arrive as they are complete.
        Returns False if the peer is not connected or its outbox is full.

        Raises:
            ValueError: ``body`` is longer than 1 MiB.
        """
        view = memoryview(payload).cast("B") if payload is not None else None
        is_queued = self._endpoint.send(peer, body, view, priority, topic)
        if view is None:
            self._pump.turn()
        else:
            self._pump.turn_soon()  # Bulk goes in a turn of its own anyway.
        return is_queued

    async def request(self, peer: PeerId, body: bytes, *, timeout_s: float, max_payload: int = 0) -> Response:
        """Ask ``peer``; an answer may carry up to ``max_payload`` bytes.

        Raises:
            RequestRefused: the peer says no, in its words (at most 1 KiB).
            RequestError: not connected, disconnected, timed out, too large.
            ValueError: ``body`` is longer than 1 MiB.
        """
        return await self._requests.ask(peer, body, timeout_s, max_payload)

    def disconnect(self, peer: PeerId, reason: str) -> None:
        """Part from ``peer``: what is queued is flushed for ``part_s`` seconds; it is told ``reason``."""
        self._endpoint.part(peer, reason, self._pump.now())
        self._pump.turn()

    def hang_up(self, peer: PeerId, reason: str) -> None:
        """End the connection with ``peer`` at once; what waits to be sent is lost."""
        if (connection := self._endpoint.serving.get(peer)) is not None:
            self._endpoint.abort(connection, reason, self._pump.now())
            self._pump.turn()

    def blame(self, peer: PeerId) -> None:
        """``peer`` sent a body that cannot be read. Too many of them, and it is cut off for a while."""
        self._endpoint.blame(peer, self._pump.now())
        self._pump.turn()

    def set_budget(self, up_bytes_per_s: UpBudget, down_bytes_per_s: float | None) -> None:
        """Bytes per second over all connections from now on, as in TransportLimits; None: no limit."""
        self._endpoint.set_budget(up_bytes_per_s, down_bytes_per_s, self._pump.now())
        self._pump.turn()

    @property
    def up_bytes_per_s(self) -> float | None:
        """The up budget in force, set or learned; None: no limit."""
        return self._endpoint.up_bytes_per_s

    @property
    def line_bytes_per_s(self) -> float | None:
        """What the link carries upwards, told or learned; infinite: all connections stay on this machine; None: not
        known."""
        return self._endpoint.line_bytes_per_s

    def pace(self, peer: PeerId, bytes_per_s: float | None) -> None:
        """Limit what is sent to ``peer`` beside the budget; None lifts it. Lasts until it disconnects."""
        self._endpoint.set_cap(peer, bytes_per_s, self._pump.now())
        self._pump.turn()

    def congestion(self) -> dict[str, int]:
        """How many connections use which congestion control, as the kernel says."""
        return sockets.count(channel.path() for channel in self._channels.values())

    # -- what happens at sockets (Driver) ----------------------------------------------------------------------------

    def made(self, channel: Channel) -> None:
        """The channel is encrypted."""
        assert channel.transport is not None
        if channel.connection.is_over:
            channel.transport.abort()
            return
        try:
            if channel.connection.role is Role.LISTENER:
                fingerprint = self._tls.fingerprint
            else:
                fingerprint = remote_fingerprint(channel.transport.get_extra_info("ssl_object"))
        except ssl.SSLError as error:
            self._endpoint.abort(channel.connection, str(error), self._pump.now())
        else:
            self._endpoint.up(channel.connection, fingerprint, self._pump.now())
        self._pump.turn()

    def read(self) -> None:
        """Bytes came that are to be looked at."""
        self._pump.turn()

    def writable(self, channel: Channel, is_writable: bool) -> None:
        """The kernel takes more, or is slow."""
        if not is_writable:
            self._endpoint.pause(channel.connection)
            return
        self._endpoint.resume(channel.connection)
        self._pump.turn()

    def lost(self, channel: Channel, reason: str, error: Exception | None = None) -> None:
        """The socket is closed."""
        self.strangers.lost(channel, error)
        self._endpoint.lost(channel.connection, reason, self._pump.now())
        self._pump.turn()

    def _new_channel(self, role: Role, host: str, address: Address, dialled: Dialled) -> Channel:
        now = self._pump.now()
        connection = self._endpoint.begin(role, now, host=host, dialled=dialled)
        channel = self._channels[connection] = Channel(connection, address, self)
        self._pump.turn()
        return channel

    def _give_up(self, channel: Channel, reason: str) -> None:
        """Whoever opened it is done with it: if it is not proved, nothing came of it."""
        if channel.transport is None:
            self.lost(channel, reason)
        elif not channel.connection.is_proved and not channel.connection.is_ending:
            self._endpoint.abort(channel.connection, reason, self._pump.now())
            self._pump.turn()

    # -- what the endpoint tells -----------------------------------------------------------------------------------

    def _tell(self, event: ev.Event) -> None:
        """To whom it concerns."""
        match event:
            case ev.Message():
                taken = self._handler.message(event.connection.peer, event.body, event.payload)
                if taken is not None:
                    self._hold(event, taken)
            case ev.Offered():
                if self._handler.admit(event.connection.peer, event.body, event.size):
                    self._endpoint.accept(event)
            case ev.Asked() | ev.Withdrawn() | ev.Answered() | ev.Unanswered():
                self._requests.tell(event)
            case ev.Connected(connection):
                self._connected(self._channels[connection])
            case ev.Disconnected(connection, reason):
                self._say(connection)("disconnected", peer=connection.peer, reason=reason)
                self._handler.disconnected(connection.peer, reason)
            case ev.TwinRefused(connection, kept):
                where = {"kept": str(self._channels[kept].address), "refused": str(self._channels[connection].address)}
                log.warning("two processes have one identity: a copied state folder?", peer=connection.peer, **where)
            case ev.LaneWanted():
                self._tasks.spawn(self._dial_lane(event), name=f"lane of {event.primary.peer}")
            case ev.LookWanted(connections):
                found = {connection: self._channels[connection].path() for connection in connections}
                self._endpoint.saw({connection: path for connection, path in found.items() if path}, self._pump.now())
            case ev.Learned(bytes_per_s):
                log.info("measured what the link up carries", mbit_per_s=round(bytes_per_s * 8 / 1e6, 1))
            case ev.Ended(connection):
                self._channels.pop(connection).tell(event)
            case _:
                self._channels[event.connection].tell(event)

    def _connected(self, channel: Channel) -> None:
        connection, peer, address = channel.connection, channel.connection.peer, str(channel.address)
        inbound = connection.role is Role.LISTENER
        is_observer = _observes(connection.remote)
        self._congestion.note(channel.path())
        by = {"by": "relay" if connection.greeting.is_relayed else "punching"} if channel.is_met else {}
        self._say(connection)("connected", peer=peer, address=address, inbound=inbound, observer=is_observer, **by)
        self._handler.connected(peer, address, is_observer, inbound)

    def _say(self, connection: Connection) -> Callable[..., None]:
        """Observers come and go by the dozen, and who joins is one of them first: that is for debugging."""
        observes = not self._greeter.run or self._greeter.observes
        return log.debug if observes or _observes(connection.remote) else log.info

    def _hold(self, message: ev.Message, taken: asyncio.Future[Any]) -> None:
        hold = self._endpoint.hold(message)

        def release(_: object) -> None:
            self._endpoint.release(hold, self._pump.now())
            self._pump.turn()

        taken.add_done_callback(release)

    async def _dial_lane(self, wanted: ev.LaneWanted) -> None:
        is_there = False
        try:
            async with asyncio.timeout(self._limits.connection.handshake_s):
                await self.strangers.dial_lane(self._channels[wanted.primary], wanted.lane, wanted.bond)
            is_there = True
        except (KeyError, DialError, OSError) as error:
            log.info("a lane could not be dialled", peer=wanted.primary.peer, reason=str(error))
        finally:
            self._endpoint.lane_dialled(wanted, is_there, self._pump.now())
            self._pump.turn()


def _observes(hello: Hello | None) -> bool:
    """It only asks, or does not know its run yet."""
    return hello is not None and (hello.observes or not (hello.run or hello.tag))
