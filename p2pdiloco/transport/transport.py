"""Transport: an endpoint (net/endpoint.py, which makes all decisions) on asyncio's sockets.

Rules of this file:
1. Input from sockets, timers and the user goes into the endpoint. A *turn* (``_turn``) then hands out its events and
   writes its output. There is one timer.
2. A message takes one path: socket, ``Channel``, endpoint, ``_handle_event``, handler.
3. ``send`` never waits. Data without room is refused at once.
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
from p2pdiloco.net.authorization import Authorizer, OpenAuthorizer
from p2pdiloco.net.bandwidth import Traffic
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.endpoint import LEAVING, Endpoint
from p2pdiloco.net.events import ConnectionId
from p2pdiloco.net.handshake import NONCE_BYTES, Dialled, HandshakeFactory, Hello, Role
from p2pdiloco.net.limits import ConnectionLimits, TransportLimits, UpBudget
from p2pdiloco.net.traffic_shaping import TURN_BYTES
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport import addresses, port_memory, sockets
from p2pdiloco.transport.addresses import Address
from p2pdiloco.transport.connection_setup import ConnectionSetup
from p2pdiloco.transport.identity import Identity, verify
from p2pdiloco.transport.narrow_paths import NarrowPaths
from p2pdiloco.transport.sockets import DialError, Listeners, PeerRefused, WrongPeerError
from p2pdiloco.transport.tls import TlsContexts, remote_fingerprint
from p2pdiloco.transport.tls_connection import Channel
from p2pdiloco.util import logs
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.control_messages import decode_as, encode
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused, Response

LEAST_WAIT_S = 0.001
"""Minimum wait. Event loops count in milliseconds, so shorter waits would spin."""

# -- Transport callbacks -----------------------------------------------------------------------------------------------


class TransportHandler(Protocol):
    """Callbacks of a transport. All but ``answer`` run on the event loop and must not block."""

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """Called when ``peer`` is connected and messages can be sent to it.

        ``address`` is its socket's, as a multiaddr; a peer that dialled this one listens elsewhere. ``is_observer``: it
        takes no part in the run (``status``, or a joiner that does not know its run yet).
        """

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """Called when ``peer`` is disconnected. Queued data for it is lost."""

    def message(self, peer: PeerId, body: Any, payload: memoryview | None) -> asyncio.Future[Any] | None:
        """Called with a message: its bytes, or, with a payload, the result of ``admit``.

        ``payload`` is writable and belongs to the handler from now on. Return None if the handler has taken it. If the
        result is a future, the payload is taken when that is done, however it ends. Until then its bytes count against
        the peer's credit (``window_bytes``). The future must not depend on further bulk data from that peer.
        """

    def admit(self, peer: PeerId, body: bytes, size: int) -> object | None:
        """Decide whether to accept the payload of ``size`` bytes that comes with ``body``, before memory is allocated.

        Return the ``body`` for ``message``, such as the decoded message; None to refuse the payload.
        """

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """Answer a request.

        Raises:
            RequestRefused: the text is sent to the requester.
        """


class Observer:
    """Handler of a transport that takes no part in a run: it ignores messages and refuses the rest."""

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """Nothing to do."""

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """Nothing to do."""

    def message(self, peer: PeerId, body: Any, payload: memoryview | None) -> None:
        """Nothing to do: heartbeats and similar messages are for members."""

    def admit(self, peer: PeerId, body: bytes, size: int) -> object | None:
        """Refuse all payloads."""
        return None

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """Refuse all requests."""
        raise RequestRefused("this peer only observes")


# -- Transport ---------------------------------------------------------------------------------------------------------


__all__ = [
    "Answer",
    "ConnectionLimits",
    "DialError",
    "PeerRefused",
    "RequestError",
    "RequestRefused",
    "Transport",
    "TransportLimits",
    "WrongPeerError",
]

log = logs.get("transport")

RequestKind = TypeVar("RequestKind", bound=msgspec.Struct)


class Transport:
    """All connections of this process: ``async with Transport(...).serve(handler) as transport``.

    listen: multiaddrs, or one (``/ip4/0.0.0.0/tcp/0``); "" not to listen (an observer).
    run: the run's id, or "" while it is not known.
    version: version of the wire protocol.
    authorizer: decides which peers are admitted; None: all.
    observes: this process only sends requests.
    port_file: file in which the ports are kept for the next start; None: they are not kept.
    narrow_paths: hosts to which segments must be short; None: none is known yet.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        listen: str | Sequence[str],
        run: str,
        version: int,
        limits: TransportLimits | None = None,
        authorizer: Authorizer | None = None,
        observes: bool = False,
        port_file: Path | None = None,
        narrow_paths: NarrowPaths | None = None,
    ) -> None:
        self.peer_id = identity.peer_id
        self._limits = limits or TransportLimits()
        self._listen = listen
        self._listeners = Listeners(listen)
        self._port_file = port_file
        self._handler: TransportHandler
        """Set by ``serve``, before any event can occur."""
        life = os.urandom(16)
        self.life = life.hex()
        """Random id of this process, which tells it from an earlier or another one with the same identity."""
        self._handshake_factory = HandshakeFactory(
            peer=identity.peer_id,
            run=run,
            version=version,
            life=life,
            sign=identity.sign,
            verify=verify,
            nonce=lambda: os.urandom(NONCE_BYTES),
            authorizer=authorizer or OpenAuthorizer(),
            observes=observes,
        )
        self._endpoint = Endpoint(self._handshake_factory, self._limits)
        self._tls = TlsContexts()
        self._tasks = Tasks()
        self.troubles = self._tasks.troubles
        """Failures of the accepting tasks; see ``Tasks``."""
        self.setup = ConnectionSetup(
            self._new_channel,
            self._abandon,
            tls=self._tls,
            limits=self._limits,
            tasks=self._tasks,
            narrow_paths=narrow_paths or NarrowPaths(),
        )
        self._channels: dict[ConnectionId, Channel] = {}
        self._requests: dict[ev.OutgoingRequest, asyncio.Future[Response]] = {}
        """This peer's requests that wait for an answer."""
        self._answers: dict[ev.IncomingRequest, asyncio.Task[None]] = {}
        """Tasks that answer requests of other peers."""
        self._answerers: dict[bytes, Callable[[PeerId, bytes], Awaitable[Answer]]] = {}
        """Functions that answer requests instead of the handler, by the encoded tags of the requests' kinds."""
        self._disconnect_callbacks: list[Callable[[PeerId, str], None]] = []
        self._congestion = sockets.Congestion(self._limits.congestion)
        self._loop: asyncio.AbstractEventLoop
        self._timer: tuple[float, asyncio.Handle] | None = None
        """Time and handle of the next timed turn."""
        self._is_in_turn = False

    # -- life cycle --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def serve(self, handler: TransportHandler) -> AsyncIterator[Self]:
        """Listen, and pass events to ``handler``. At the end say goodbye to all, flush and close within ``part_s``.

        Raises:
            OSError: a listen address is in use, or not this machine's.
            ValueError: a listen address has a name.
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

    def life_of(self, peer: PeerId) -> str | None:
        """Return the id of the process at the other end; None if ``peer`` is not connected."""
        connection = self._endpoint.serving.get(peer)
        return None if connection is None or connection.remote is None else connection.remote.life.hex()

    def channel_of(self, peer: PeerId) -> Channel | None:
        """Return the channel that serves ``peer``; None if it is not connected."""
        connection = self._endpoint.serving.get(peer)
        return None if connection is None or not connection.is_open else self._channels.get(connection.id)

    def listen_addresses(self) -> list[str]:
        """Return multiaddrs with this peer's id; for a wildcard one for each address of the machine, loopback last."""
        return [f"{address}/p2p/{self.peer_id}" for address in self._listeners.addresses()]

    def peers(self) -> list[PeerId]:
        """Return the peers to which messages can be sent."""
        return [peer for peer, connection in self._endpoint.serving.items() if connection.is_open]

    def queued_bytes(self, peer: PeerId) -> int:
        """Return the bytes that wait to be sent to ``peer``, beyond those in the kernel."""
        connection = self._endpoint.serving.get(peer)
        return connection.session.queued_bytes if connection is not None else 0

    def lanes(self, peer: PeerId) -> int:
        """Return the number of connections to ``peer`` that carry payloads; 0 if it is not connected."""
        connection = self._endpoint.serving.get(peer)
        return len(connection.session.lanes.members) if connection is not None else 0

    def traffic(self) -> Traffic:
        """Return the bytes on all connections since the start."""
        return self._endpoint.traffic()

    def waiting_payloads(self) -> tuple[bool, bool]:
        """Return whether payloads wait to be sent, and to be received; see ``Endpoint``."""
        return self._endpoint.waiting_payloads()

    async def dial(self, address: str, timeout_s: float = 10.0) -> PeerId:
        """Connect to the peer at ``address``, unless the address names a peer that is connected already.

        Raises:
            ValueError: ``address`` is not a usable multiaddr.
            PeerRefused: the other side refused this peer; the text is its reason.
            DialError: any other failure: unknown host, refused, timed out, not a peer, another peer, this peer itself.
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
        """Queue a message. Return False if the peer is not connected or its outbox is full.

        Control messages (without payload) overtake bulk data. Among payloads, lower ``priority`` goes first. A payload
        with a ``topic`` replaces an earlier one of the same topic that has not begun to be sent.

        ``payload`` is shared until it is sent: do not modify it. Messages without payload keep their order while one
        connection lasts. Messages with payloads arrive as they are complete.

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
        """Send a request and return the response, which may carry a payload of up to ``max_payload`` bytes.

        Raises:
            RequestRefused: the peer refused; the text (at most 1 KiB) is its reason.
            RequestError: not connected, disconnected, timed out, or too large.
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
        """Have ``answer`` answer requests of ``kind``, a tagged struct, instead of the handler.

        Malformed requests are refused.
        """

        async def answer_encoded(peer: PeerId, body: bytes) -> Answer:
            try:
                request = decode_as(body, kind)
            except ValueError as error:
                raise RequestRefused(f"malformed request: {error}") from error
            return await answer(peer, request)

        self._answerers[encode(kind.__struct_config__.tag)] = answer_encoded

    def add_disconnect_callback(self, callback: Callable[[PeerId, str], None]) -> None:
        """Call ``callback`` with each disconnected peer and the reason, after the handler."""
        self._disconnect_callbacks.append(callback)

    def disconnect(self, peer: PeerId, reason: str) -> None:
        """Disconnect ``peer``: flush queued data for at most ``part_s`` seconds, and tell it ``reason``."""
        self._endpoint.disconnect(peer, reason, self._loop.time())
        self._turn()

    def hang_up(self, peer: PeerId, reason: str) -> None:
        """Close the connection to ``peer`` at once; queued data is lost."""
        if (connection := self._endpoint.serving.get(peer)) is not None:
            self._endpoint.abort(connection.id, reason, self._loop.time())
            self._turn()

    def blame(self, peer: PeerId, *, is_forged: bool = False) -> None:
        """Report that ``peer`` sent a malformed or forged body. After too many of them it is blocked for a while."""
        self._endpoint.blame(peer, self._loop.time(), is_forged=is_forged)
        self._turn()

    def is_shut_out(self, peer: PeerId) -> bool:
        """Return whether ``peer`` is blocked for what it sent."""
        return self._endpoint.is_shut_out(peer, self._loop.time())

    def set_budget(self, up_bytes_per_s: UpBudget, down_bytes_per_s: float | None) -> None:
        """Set the rates over all connections in bytes per second, as in TransportLimits; None: no limit."""
        self._endpoint.set_budget(up_bytes_per_s, down_bytes_per_s, self._loop.time())
        self._turn()

    @property
    def up_bytes_per_s(self) -> float | None:
        """Current upload budget, set or learned; None: no limit."""
        return self._endpoint.up_bytes_per_s

    @property
    def line_bytes_per_s(self) -> float | None:
        """Upload rate of the link, set by the user or measured; None if unknown.

        It is infinite if all connections are within this machine.
        """
        return self._endpoint.line_bytes_per_s

    # -- callbacks of the channels (ChannelDriver) -------------------------------------------------------------------

    def on_connected(self, channel: Channel) -> None:
        """Begin the peers' handshake, since TLS is established."""
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
        """Parse received bytes."""
        self._turn()

    def on_writable(self, channel: Channel, is_writable: bool) -> None:
        """Stop or resume writing to a channel."""
        if not is_writable:
            self._endpoint.pause_writing(channel.connection.id)
            return
        self._endpoint.resume_writing(channel.connection.id)
        self._turn()

    def on_long_packets(self, channel: Channel) -> None:
        """Remember that the path takes long packets."""
        self.setup.narrow_paths.prove(channel.connection.host)

    def on_lost(self, channel: Channel, reason: str, error: Exception | None = None) -> None:
        """Report a closed socket to the endpoint."""
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
        """Close a channel whose set-up has ended without a proved peer."""
        if channel.transport is None:
            self.on_lost(channel, reason)
        elif not channel.connection.is_proved and not channel.connection.is_ending:
            self._endpoint.abort(channel.connection.id, reason, self._loop.time())
            self._turn()

    # -- turns -------------------------------------------------------------------------------------------------------

    def _turn(self, bulk_bytes: int = 0) -> None:
        """Hand out events and write output until there is none, then set the timer.

        Called after every input to the endpoint.
        """
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
        """Schedule a turn with bulk data for the next iteration of the event loop."""
        if not self._is_in_turn:
            self._turn_at(self._loop.time(), self._loop.time())

    def _set_timer(self) -> None:
        now = self._loop.time()
        if self._endpoint.has_events:
            self._turn_at(now, now)  # an exception in a handler has ended the turn
        elif self._timer is None or self._timer[0] > now:
            at = self._endpoint.next_deadline()
            if at is not None:
                self._turn_at(at, now)

    def _turn_at(self, at: float, now: float) -> None:
        """Schedule a turn with bulk data; an earlier timer stays."""
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
                log.info("measured the upload rate of the link", mbit_per_s=round(bytes_per_s * 8 / 1e6, 1))
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
        """Return the log function for a connection.

        Observers connect often, and every joiner begins as one. They are logged at debug level only.
        """
        observes = not self._handshake_factory.run or self._handshake_factory.observes
        return log.debug if observes or _observes(connection.remote) else log.info

    async def _answer(self, request: ev.IncomingRequest, peer: PeerId, body: bytes) -> None:
        # In a struct encoded as an array, the tag follows the array's header, which has one byte.
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
    """Return whether a peer takes no part in a run, or does not know its run yet."""
    return hello is not None and (hello.observes or not (hello.run or hello.tag))
