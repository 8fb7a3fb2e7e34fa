"""The transport: an endpoint (net/endpoint.py, where everything is decided) on asyncio's sockets.

Rules of this file:
1. What comes from sockets, timers and the user goes into the endpoint; a *turn* (``_turn``) then hands out its events
   and writes what it wants to send. There is one timer.
2. A message goes down one way: socket, ``Channel``, endpoint, ``_handle_event``, handler.
3. ``send`` never waits. What does not fit is refused at once.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import msgspec

from p2pdiloco.net import events as ev
from p2pdiloco.net.authorization import Authorizer
from p2pdiloco.net.bandwidth import Traffic
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.endpoint import LEAVING, Endpoint
from p2pdiloco.net.events import ConnectionId
from p2pdiloco.net.handshake import NONCE_BYTES, Dialled, Greeter, Hello, Role
from p2pdiloco.net.limits import ConnectionLimits, TransportLimits, UpBudget
from p2pdiloco.net.traffic_shaping import TURN_BYTES
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport import addresses, port_memory, sockets
from p2pdiloco.transport.addresses import Address
from p2pdiloco.transport.connection_setup import ConnectionSetup, DialMet
from p2pdiloco.transport.identity import Identity, verify
from p2pdiloco.transport.sockets import DialError, Impostor, Listeners, PeerRefused
from p2pdiloco.transport.tls import TlsContexts, remote_fingerprint
from p2pdiloco.transport.tls_connection import Channel
from p2pdiloco.util import logs
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.control_messages import decode_as, encode
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused, Response

LEAST_WAIT_S = 0.001
"""Event loops count in milliseconds; what waits for less would spin."""

# -- Transport callbacks -----------------------------------------------------------------------------------------------


class TransportHandler(Protocol):
    """Callbacks of a transport. All but ``answer`` are called on the event loop: be quick, never block."""

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """``peer`` can be sent to.

        ``address`` is its socket's, as a multiaddr; a peer that dialled us listens elsewhere. ``is_observer``: it takes
        no part (``status``, or a joiner that does not know its run yet)."""

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """``peer`` is gone. What was queued for it is lost."""

    def message(self, peer: PeerId, body: Any, payload: memoryview | None) -> asyncio.Future[Any] | None:
        """A message came: its bytes, or, with a payload, what ``admit`` has made of them. ``payload`` is the handler's
        own memory from now on, and writable.

        None: it is taken. A future: it is taken when that is done, however it ends; until then its bytes count against
        what the peer may send (``window_bytes``). It must not depend on more bulk to come from that peer."""

    def admit(self, peer: PeerId, body: bytes, size: int) -> object | None:
        """Decide whether to take the payload of ``size`` bytes that comes with ``body``, before memory is allocated.

        Returns what ``message`` is to get as ``body``, such as the decoded message; None: the payload is not taken."""

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """Answer a request.

        Raises:
            RequestRefused: the text goes to the asker.
        """


class Observer:
    """A handler for a transport that takes no part in a run: it ignores messages and refuses the rest."""

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """Nothing to do."""

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """Nothing to do."""

    def message(self, peer: PeerId, body: Any, payload: memoryview | None) -> None:
        """Nothing to do: heartbeats and the like are for members."""

    def admit(self, peer: PeerId, body: bytes, size: int) -> object | None:
        """Take no payloads."""
        return None

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """Refuse."""
        raise RequestRefused("this peer only observes")


# -- Transport ---------------------------------------------------------------------------------------------------------


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

RequestKind = TypeVar("RequestKind", bound=msgspec.Struct)


class Transport:
    """All connections of this process. ``async with Transport(...).serve(handler) as transport``.

    listen: multiaddrs, or one (``/ip4/0.0.0.0/tcp/0``); "" not to listen (an observer).
    run: the run's id, or "" while it is not known. version: the protocol's. door: who is let in; None: everybody.
    observes: it only asks.
    port_file: keeps the ports for the next life of this peer; None: they are not kept.
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
        port_file: Path | None = None,
    ) -> None:
        self._limits = limits or TransportLimits()
        self._listen = listen
        self._listeners = Listeners(listen)
        self._port_file = port_file
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
        self._tls = TlsContexts()
        self._tasks = Tasks()
        self.setup = ConnectionSetup(
            self._new_channel,
            self._abandon,
            tls=self._tls,
            limits=self._limits,
            tasks=self._tasks,
        )
        self._channels: dict[ConnectionId, Channel] = {}
        self._requests: dict[ev.OutgoingRequest, asyncio.Future[Response]] = {}
        """Our requests that wait for an answer."""
        self._answers: dict[ev.IncomingRequest, asyncio.Task[None]] = {}
        """Tasks that answer the peers' requests."""
        self._answerers: dict[bytes, Callable[[PeerId, bytes], Awaitable[Answer]]] = {}
        """Functions that answer requests instead of the handler, by the encoded tags of the requests' kinds."""
        self._disconnect_callbacks: list[Callable[[PeerId, str], None]] = []
        self._congestion = sockets.Congestion(self._limits.congestion)
        self._loop: asyncio.AbstractEventLoop
        self._timer: tuple[float, asyncio.Handle] | None = None
        """When the next turn comes by itself."""
        self._is_in_turn = False

    # -- life --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def serve(self, handler: TransportHandler) -> AsyncIterator[Self]:
        """Listen, and pass what comes to ``handler``. At the end say goodbye to all, flush, close, within ``part_s``.

        Raises:
            OSError: a listen address is taken or not ours.
            ValueError: it is a name.
        """
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        if self._port_file is not None:
            self._listeners = Listeners(await asyncio.to_thread(port_memory.again, self._listen, self._port_file))
        self._listeners.open()
        try:
            if self._port_file is not None:
                await asyncio.to_thread(port_memory.remember, self.listen_addresses(), self._port_file)
            async with self._tasks:
                for listener in self._listeners:
                    accept = partial(self.setup.accept_all, listener)
                    self._tasks.keep(accept, name=f"accept at {listener.getsockname()}")
                try:
                    yield self
                finally:
                    await self._part()
        finally:
            if self._timer is not None:
                self._timer[1].cancel()
                self._timer = None
            self._listeners.close()

    async def _part(self) -> None:
        doomed = list(self._channels.values())
        self._endpoint.leave(LEAVING, self._loop.time())
        self._turn()
        if doomed:
            await asyncio.wait([channel.gone for channel in doomed], timeout=self._limits.connection.part_s + 1.0)
        for channel in list(self._channels.values()):
            self._endpoint.abort(channel.connection.id, LEAVING, self._loop.time())
        self._turn()

    # -- for the user ------------------------------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        """This peer's id."""
        return self._greeter.peer

    @property
    def troubles(self) -> dict[str, str]:
        """Failures of the tasks that accept; see ``Tasks``."""
        return self._tasks.troubles

    def life_of(self, peer: PeerId) -> str | None:
        """The life of the process at the other end; None: ``peer`` is not connected."""
        connection = self._endpoint.serving.get(peer)
        return None if connection is None or connection.remote is None else connection.remote.life.hex()

    def channel_of(self, peer: PeerId) -> Channel | None:
        """The channel of the connection that serves ``peer``; None: it is not connected."""
        connection = self._endpoint.serving.get(peer)
        return None if connection is None or not connection.is_open else self._channels.get(connection.id)

    def listen_addresses(self) -> list[str]:
        """Multiaddrs with our peer id; for a wildcard one per address of this machine, loopback last."""
        return [f"{address}/p2p/{self.peer_id}" for address in self._listeners.addresses()]

    def peers(self) -> list[PeerId]:
        """The peers that can be sent to."""
        return [peer for peer, connection in self._endpoint.serving.items() if connection.is_open]

    def queued_bytes(self, peer: PeerId) -> int:
        """Bytes that wait to be sent to ``peer``, beyond what the kernel holds."""
        connection = self._endpoint.serving.get(peer)
        return connection.session.queued_bytes if connection is not None else 0

    def lanes(self, peer: PeerId) -> int:
        """Connections to ``peer`` over which payloads are spread; 0: not connected."""
        connection = self._endpoint.serving.get(peer)
        return len(connection.session.lanes.members) if connection is not None else 0

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
                return await self.setup.dial(target)
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
            self._turn()
        else:
            self._turn_soon()  # Bulk goes in a turn of its own anyway.
        return is_queued

    async def request(self, peer: PeerId, body: bytes, *, timeout_s: float, max_payload: int = 0) -> Response:
        """Ask ``peer``; an answer may carry up to ``max_payload`` bytes.

        Raises:
            RequestRefused: the peer says no, in its words (at most 1 KiB).
            RequestError: not connected, disconnected, timed out, too large.
            ValueError: ``body`` is longer than 1 MiB.
        """
        asked = self._endpoint.send_request(peer, body, self._loop.time(), timeout_s=timeout_s, max_payload=max_payload)
        answered: asyncio.Future[Response] = self._loop.create_future()
        self._requests[asked] = answered
        self._turn()
        try:
            return await answered
        finally:
            if self._requests.pop(asked, None) is not None:
                self._endpoint.withdraw_request(asked)
                self._turn()

    def answer_requests(
        self, kind: type[RequestKind], answer: Callable[[PeerId, RequestKind], Awaitable[Answer]]
    ) -> None:
        """Have ``answer`` answer requests of ``kind``, a tagged struct, instead of the handler. Those that are
        malformed are refused."""

        async def answer_encoded(peer: PeerId, body: bytes) -> Answer:
            try:
                request = decode_as(body, kind)
            except ValueError as error:
                raise RequestRefused(f"malformed request: {error}") from error
            return await answer(peer, request)

        self._answerers[encode(kind.__struct_config__.tag)] = answer_encoded

    def redial_met_peers(self, dial: DialMet) -> None:
        """Have ``dial`` make further connections to peers that were met at a rendezvous server."""
        self.setup.dial_met = dial

    def add_disconnect_callback(self, callback: Callable[[PeerId, str], None]) -> None:
        """Call ``callback`` with each peer that is gone and the reason, after the handler."""
        self._disconnect_callbacks.append(callback)

    def disconnect(self, peer: PeerId, reason: str) -> None:
        """Disconnect ``peer``: flush what is queued, for ``part_s`` seconds at most, and tell it ``reason``."""
        self._endpoint.disconnect(peer, reason, self._loop.time())
        self._turn()

    def hang_up(self, peer: PeerId, reason: str) -> None:
        """End the connection with ``peer`` at once; what waits to be sent is lost."""
        if (connection := self._endpoint.serving.get(peer)) is not None:
            self._endpoint.abort(connection.id, reason, self._loop.time())
            self._turn()

    def blame(self, peer: PeerId) -> None:
        """Report that ``peer`` sent a malformed body. Too many of them cut it off for a while."""
        self._endpoint.blame(peer, self._loop.time())
        self._turn()

    def set_budget(self, up_bytes_per_s: UpBudget, down_bytes_per_s: float | None) -> None:
        """Bytes per second over all connections from now on, as in TransportLimits; None: no limit."""
        self._endpoint.set_budget(up_bytes_per_s, down_bytes_per_s, self._loop.time())
        self._turn()

    @property
    def up_bytes_per_s(self) -> float | None:
        """The up budget in force, set or learned; None: no limit."""
        return self._endpoint.up_bytes_per_s

    @property
    def line_bytes_per_s(self) -> float | None:
        """What the link carries upwards, as the user says or as measured; None: not known. Infinite: all connections
        stay on this machine."""
        return self._endpoint.line_bytes_per_s

    def set_cap(self, peer: PeerId, bytes_per_s: float | None) -> None:
        """Limit what is sent to ``peer`` beside the budget; None lifts it. Lasts until it disconnects."""
        self._endpoint.set_cap(peer, bytes_per_s, self._loop.time())
        self._turn()

    def congestion(self) -> dict[str, int]:
        """How many connections use which congestion control, as the kernel says."""
        return sockets.count(channel.path() for channel in self._channels.values())

    # -- events of the channels (ChannelDriver) ----------------------------------------------------------------------

    def on_connected(self, channel: Channel) -> None:
        """TLS is established: the handshake of the peers can begin."""
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
            self._endpoint.abort(channel.connection.id, str(error), self._loop.time())
        else:
            self._endpoint.handle_tls_established(channel.connection.id, fingerprint, self._loop.time())
        self._turn()

    def on_data(self) -> None:
        """Received bytes are to be parsed."""
        self._turn()

    def on_writable(self, channel: Channel, is_writable: bool) -> None:
        """The kernel takes more bytes, or takes no more at present."""
        if not is_writable:
            self._endpoint.pause_writing(channel.connection.id)
            return
        self._endpoint.resume_writing(channel.connection.id)
        self._turn()

    def on_lost(self, channel: Channel, reason: str, error: Exception | None = None) -> None:
        """The socket is closed."""
        self.setup.check_path_mtu(channel, error)
        self._endpoint.handle_connection_lost(channel.connection.id, reason, self._loop.time())
        self._turn()

    def _new_channel(self, role: Role, host: str, address: Address, dialled: Dialled) -> Channel:
        now = self._loop.time()
        connection = self._endpoint.add_connection(role, now, host=host, dialled=dialled)
        channel = self._channels[connection] = Channel(self._endpoint.connection(connection), address, self)
        self._turn()
        return channel

    def _abandon(self, channel: Channel, reason: str) -> None:
        """Close a channel whose set-up has ended, unless its peer is proved."""
        if channel.transport is None:
            self.on_lost(channel, reason)
        elif not channel.connection.is_proved and not channel.connection.is_ending:
            self._endpoint.abort(channel.connection.id, reason, self._loop.time())
            self._turn()

    # -- turns -------------------------------------------------------------------------------------------------------

    def _turn(self, bulk_bytes: int = 0) -> None:
        """Hand out what happened and write what is to be written, until there is nothing; then set the timer. Called
        after everything that happens to the endpoint."""
        if self._is_in_turn:
            return
        self._is_in_turn, endpoint, has_sent = True, self._endpoint, False
        try:
            while True:
                now = self._loop.time()
                for event in endpoint.events(now):
                    self._handle_event(event)
                if not bulk_bytes and not endpoint.has_control:
                    break
                has_sent = True
                for connection, piece in endpoint.to_send(now, bulk_bytes):
                    self._channels[connection].write(piece)
                bulk_bytes = 0
                if not endpoint.has_events and not endpoint.has_control:
                    break
        finally:
            self._is_in_turn = False
            if has_sent or endpoint.has_new_deadline or endpoint.has_events:
                self._set_timer()

    def _turn_soon(self) -> None:
        """A turn with bulk, when the event loop comes round."""
        if not self._is_in_turn:
            self._turn_at(self._loop.time(), self._loop.time())

    def _set_timer(self) -> None:
        now = self._loop.time()
        if self._endpoint.has_events:
            self._turn_at(now, now)  # The user's defect has ended the turn.
        elif self._timer is None or self._timer[0] > now:
            at = self._endpoint.next_deadline()
            if at is not None:
                self._turn_at(at, now)

    def _turn_at(self, at: float, now: float) -> None:
        """A turn with bulk at a time; an earlier timer stays."""
        if self._timer is not None:
            if self._timer[0] <= at:
                return
            self._timer[1].cancel()
        if at <= now:
            handle = self._loop.call_soon(self._on_timer)
        else:
            handle = self._loop.call_at(max(at, now + LEAST_WAIT_S), self._on_timer)
        self._timer = (at, handle)

    def _on_timer(self) -> None:
        self._timer = None
        self._endpoint.wake(self._loop.time())
        self._turn(TURN_BYTES)

    # -- events of the endpoint --------------------------------------------------------------------------------------

    def _handle_event(self, event: ev.Event) -> None:
        """Pass an event on to the handler, to whoever waits for an answer, or to the connection's channel."""
        match event:
            case ev.Message():
                taken = self._handler.message(
                    self._endpoint.connection(event.connection).peer, event.body, event.payload
                )
                if taken is not None:
                    self._hold_until_taken(event, taken)
            case ev.Offered():
                peer = self._endpoint.connection(event.connection).peer
                if (content := self._handler.admit(peer, event.body, event.size)) is not None:
                    self._endpoint.accept_payload(event, content)
            case ev.RequestReceived(request, body):
                peer = self._endpoint.connection(request.connection).peer
                task = self._tasks.spawn(self._answer(request, peer, body), name=f"answer {request.number}")
                self._answers[request] = task
                task.add_done_callback(lambda _: self._answers.pop(request, None))
            case ev.RequestWithdrawn(request):
                if (running := self._answers.get(request)) is not None:
                    running.cancel()
            case ev.AnswerReceived(asked, response):
                if (answered := self._requests.pop(asked, None)) is not None and not answered.done():
                    answered.set_result(response)
            case ev.RequestFailed(asked, error):
                if (answered := self._requests.pop(asked, None)) is not None and not answered.done():
                    answered.set_exception(error)
            case ev.Connected(connection):
                self._handle_connected(self._channels[connection])
            case ev.Disconnected(connection, reason):
                gone = self._endpoint.connection(connection)
                self._logger(gone)("disconnected", peer=gone.peer, reason=reason)
                for callback in (self._handler.disconnected, *self._disconnect_callbacks):
                    callback(gone.peer, reason)
            case ev.TwinRefused(connection, kept):
                where = {"kept": str(self._channels[kept].address), "refused": str(self._channels[connection].address)}
                peer = self._endpoint.connection(connection).peer
                log.warning("two processes have one identity: a copied state folder?", peer=peer, **where)
            case ev.LaneWanted():
                peer = self._endpoint.connection(event.primary).peer
                self._tasks.spawn(self._dial_lane(event, peer), name=f"lane of {peer}")
            case ev.PathInfoWanted(connections):
                found = {connection: self._channels[connection].path() for connection in connections}
                self._endpoint.handle_path_info(
                    {connection: path for connection, path in found.items() if path}, self._loop.time()
                )
            case ev.UplinkMeasured(bytes_per_s):
                log.info("measured what the link up carries", mbit_per_s=round(bytes_per_s * 8 / 1e6, 1))
            case ev.Ended(connection):
                self._channels.pop(connection).handle_event(event)
            case _:
                self._channels[event.connection].handle_event(event)

    def _handle_connected(self, channel: Channel) -> None:
        connection, peer, address = channel.connection, channel.connection.peer, str(channel.address)
        inbound = connection.role is Role.LISTENER
        is_observer = _observes(connection.remote)
        self._congestion.note(channel.path())
        by = {"by": "relay" if connection.greeting.is_relayed else "punching"} if channel.is_met else {}
        self._logger(connection)("connected", peer=peer, address=address, inbound=inbound, observer=is_observer, **by)
        self._handler.connected(peer, address, is_observer, inbound)

    def _logger(self, connection: Connection) -> Callable[..., None]:
        """Observers come and go by the dozen, and every joiner begins as one: those are logged for debugging only."""
        observes = not self._greeter.run or self._greeter.observes
        return log.debug if observes or _observes(connection.remote) else log.info

    async def _answer(self, request: ev.IncomingRequest, peer: PeerId, body: bytes) -> None:
        # The tag of a struct that is encoded as an array follows the array's header, which has one byte.
        found = (answer for tag, answer in self._answerers.items() if body.startswith(tag, 1))
        try:
            self._endpoint.send_answer(request, await next(found, self._handler.answer)(peer, body))
        except RequestRefused as refusal:
            self._endpoint.refuse_request(request, str(refusal))
        except Exception:
            self._endpoint.refuse_request(request, "an internal error; the peer's log has it")
            raise
        finally:
            self._turn()

    def _hold_until_taken(self, message: ev.Message, taken: asyncio.Future[Any]) -> None:
        hold = self._endpoint.hold_payload(message)

        def release(_: object) -> None:
            self._endpoint.release_payload(hold, self._loop.time())
            self._turn()

        taken.add_done_callback(release)

    async def _dial_lane(self, wanted: ev.LaneWanted, peer: PeerId) -> None:
        is_there = False
        try:
            async with asyncio.timeout(self._limits.connection.handshake_s):
                await self.setup.dial_lane(self._channels[wanted.primary], wanted.lane, wanted.bond)
            is_there = True
        except (KeyError, DialError, OSError) as error:
            log.info("a lane could not be dialled", peer=peer, reason=str(error))
        finally:
            self._endpoint.handle_lane_dialled(wanted, is_there, self._loop.time())
            self._turn()


def _observes(hello: Hello | None) -> bool:
    """Whether a peer takes no part, or does not know its run yet."""
    return hello is not None and (hello.observes or not (hello.run or hello.tag))
