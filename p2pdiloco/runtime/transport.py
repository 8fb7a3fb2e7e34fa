"""Connections between peers: dialling, accepting, and one connection kept for each pair.

Rules of this file:
1. One TLS connection per pair of peers. If both dial at once, the one dialled by the smaller peer id stays and the
   other finishes what it has begun. A peer that was started anew (``Hello.life``) replaces its old connection.
2. The handler hears ``connected`` and ``disconnected`` in turns for each peer, whatever happens to connections below.
3. ``send`` never waits. What does not fit is refused at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Hashable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from p2pdiloco.protocol.identifiers import PeerId
from p2pdiloco.runtime import addresses, congestion, logs, sockets
from p2pdiloco.runtime.addresses import Address
from p2pdiloco.runtime.budgets import Budgets, UpBudget
from p2pdiloco.runtime.connection import Connection
from p2pdiloco.runtime.handler import TransportHandler
from p2pdiloco.runtime.identity import Identity, verify
from p2pdiloco.runtime.lane_keeping import LaneKeeper
from p2pdiloco.runtime.limits import ConnectionLimits, TransportLimits
from p2pdiloco.runtime.requests import Answer, RequestError, RequestRefused, Response
from p2pdiloco.runtime.sockets import DialError, PeerRefused
from p2pdiloco.runtime.strangers import Strangers
from p2pdiloco.runtime.tasks import Tasks
from p2pdiloco.runtime.tls import TlsContexts, remote_fingerprint
from p2pdiloco.runtime.traffic import Traffic
from p2pdiloco.wire.blocks import Blocks
from p2pdiloco.wire.frames import Parting
from p2pdiloco.wire.handshake import MAGIC, NONCE_BYTES, Handshake, Hello, Role

__all__ = [
    "Answer",
    "ConnectionLimits",
    "DialError",
    "PeerRefused",
    "RequestError",
    "RequestRefused",
    "Response",
    "Traffic",
    "Transport",
    "TransportHandler",
    "TransportLimits",
]

log = logs.get("transport")


class Transport:
    """All connections of this process. ``async with Transport(...) as transport``.

    listen: a multiaddr (``/ip4/0.0.0.0/tcp/0``), or "" not to listen (an observer).
    run: the run's id, or "" while it is not known. version: the protocol's.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        listen: str,
        run: str,
        version: int,
        handler: TransportHandler,
        limits: TransportLimits | None = None,
    ) -> None:
        self._identity = identity
        self._listen = addresses.parse(listen) if listen else None
        self._run = run
        self._version = version
        self._handler = handler
        self._limits = limits or TransportLimits()
        self._life = os.urandom(16)
        self._tls = TlsContexts()
        self._tasks = Tasks()
        self._blocks = Blocks(limit_bytes=self._limits.reused_bytes)
        self._all: set[Connection] = set()
        """Every connection that is not lost yet, unproved and retiring ones included."""
        self._budgets = Budgets(self._limits, self._all)
        self._strangers = Strangers(self._new_connection, tls=self._tls, limits=self._limits, tasks=self._tasks)
        self._stack = AsyncExitStack()
        self._listener: socket.socket | None = None
        self._connections: dict[PeerId, Connection] = {}
        """The one that serves, per peer."""
        self._lane_keeper = LaneKeeper(
            self._all,
            dial=self._strangers.dial,
            rate=lambda: self._budgets.chosen_bytes_per_s,
            limits=self._limits,
            tasks=self._tasks,
        )
        self._past = Traffic()
        """Of connections that are gone."""
        self._attempt = 0
        self._is_leaving = False
        self._congestion = congestion.Congestion(self._limits.congestion)

    # -- life --------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            OSError: the listen address is taken or not ours.
            ValueError: it is a name.
        """
        if self._listen is not None:
            self._listener = sockets.listen(self._listen)
        await self._stack.enter_async_context(self._tasks)
        self._tasks.spawn(self._budgets.measure(), name="measure the link")
        if self._listener is not None:
            self._tasks.spawn(self._strangers.accept_all(self._listener), name="accept")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say goodbye to all, flush, close; bounded by ``part_s``."""
        self._is_leaving = True
        await self.close_all("the peer is leaving")
        await self._stack.aclose()
        if self._listener is not None:
            self._listener.close()

    async def close_all(self, reason: str) -> None:
        """Part from every peer: flush for at most ``part_s`` seconds, then cut."""
        doomed = list(self._all)
        for connection in doomed:
            if connection.primary is not connection:
                continue  # Lanes end with their primary.
            if connection.is_open:
                connection.part(Parting.LEAVING, reason)
            else:
                connection.abort(reason)
        if not doomed:
            return
        await asyncio.wait([connection.gone for connection in doomed], timeout=self._limits.connection.part_s + 1.0)
        for connection in doomed:
            connection.abort(reason)

    async def set_run(self, run: str) -> None:
        """A joiner has learned its run: part from all peers, to be dialled again as a member of ``run``."""
        self._run = run
        await self.close_all("it has learned its run and dials again")

    # -- for the user ------------------------------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        """Ours."""
        return self._identity.peer_id

    def listen_addresses(self) -> list[str]:
        """Multiaddrs with our peer id; for a wildcard one per address of this machine, loopback last."""
        if self._listener is None:
            return []
        found = sockets.local_addresses(self._listener)
        return [f"{address}/p2p/{self.peer_id}" for address in found]

    def peers(self) -> list[PeerId]:
        """The peers that can be sent to."""
        return [peer for peer, connection in self._connections.items() if connection.is_open]

    def address_of(self, peer: PeerId) -> str | None:
        """The multiaddr of the other end of the connection."""
        connection = self._connections.get(peer)
        return str(connection.address) if connection is not None else None

    def queued_bytes(self, peer: PeerId) -> int:
        """Bytes that wait to be sent to ``peer``, beyond what the kernel holds."""
        connection = self._connections.get(peer)
        return connection.queued_bytes if connection is not None else 0

    def traffic_of(self, peer: PeerId) -> Traffic | None:
        """Bytes on the present connection to ``peer`` and its lanes."""
        primary = self._connections.get(peer)
        if primary is None:
            return None
        total = Traffic()
        for connection in self._lane_keeper.members(primary):
            total.add(connection.traffic)
        return total

    def lanes(self, peer: PeerId) -> int:
        """Connections to ``peer`` over which payloads are spread; 0: not connected."""
        primary = self._connections.get(peer)
        return primary.lanes.count if primary is not None else 0

    def traffic(self) -> Traffic:
        """Bytes on all connections since the start."""
        total = Traffic()
        total.add(self._past)
        for connection in self._all:
            total.add(connection.traffic)
        return total

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
                return await self._strangers.dial(target)
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
        connection = self._connections.get(peer)
        if connection is None:
            return False
        view = memoryview(payload).cast("B") if payload is not None else None
        return connection.send(body, view, priority, topic)

    async def request(self, peer: PeerId, body: bytes, *, timeout_s: float, max_payload: int = 0) -> Response:
        """Ask ``peer``; an answer may carry up to ``max_payload`` bytes.

        Raises:
            RequestRefused: the peer says no, in its words (at most 1 KiB).
            RequestError: not connected, disconnected, timed out, too large.
            ValueError: ``body`` is longer than 1 MiB.
        """
        connection = self._connections.get(peer)
        if connection is None:
            raise RequestError("not connected")
        return await connection.request(body, timeout_s=timeout_s, max_payload=max_payload)

    def disconnect(self, peer: PeerId, reason: str) -> None:
        """Part from ``peer``: what is queued is flushed for ``part_s`` seconds; it is told ``reason``."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.part(Parting.LEAVING, reason)

    def set_budget(self, up_bytes_per_s: UpBudget, down_bytes_per_s: float | None) -> None:
        """Bytes per second over all connections from now on, as in TransportLimits; None: no limit."""
        self._budgets.set(up_bytes_per_s, down_bytes_per_s)

    @property
    def up_bytes_per_s(self) -> float | None:
        """The up budget in force, set or learned; None: no limit."""
        return self._budgets.shaper.bytes_per_s

    def pace(self, peer: PeerId, bytes_per_s: float | None) -> None:
        """Limit what is sent to ``peer`` beside the budget; None lifts it. Lasts until it disconnects."""
        if peer in self._connections:
            self._budgets.shaper.set_cap(peer, bytes_per_s)

    def congestion(self) -> dict[str, int]:
        """How many connections use which congestion control, as the kernel says."""
        return congestion.count(connection.path() for connection in self._all)

    # -- making connections ------------------------------------------------------------------------------------------

    def _new_connection(self, role: Role, address: Address, lane: int, bond: bytes) -> Connection:
        connection = Connection(
            role=role,
            address=address,
            owner=self,
            handshake=lambda channel: self._handshake(role, channel, address.peer, lane, bond),
            limits=self._limits.connection,
            blocks=self._blocks,
            shaper=self._budgets.shaper,
            crediting=self._budgets.crediting,
            tasks=self._tasks,
        )
        self._all.add(connection)
        connection.gone.add_done_callback(lambda _: self._forget(connection))
        return connection

    def _handshake(
        self, role: Role, channel: ssl.SSLObject, expected: PeerId | None, lane: int, bond: bytes
    ) -> Handshake:
        self._attempt += 1
        hello = Hello(
            magic=MAGIC,
            version=self._version,
            run=self._run,
            peer=self.peer_id,
            nonce=os.urandom(NONCE_BYTES),
            life=self._life,
            attempt=self._attempt,
            lane=lane,
            bond=bond,
        )
        fingerprint = self._tls.fingerprint if role is Role.LISTENER else remote_fingerprint(channel)
        return Handshake(role, hello, fingerprint, sign=self._identity.sign, verify=verify, expected=expected)

    def _forget(self, connection: Connection) -> None:
        if connection in self._all:
            self._all.discard(connection)
            self._past.add(connection.traffic)

    # -- what connections tell (ConnectionOwner) ---------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        peer = connection.peer
        old = self._connections.get(peer)
        if self._is_leaving:
            connection.part(Parting.LEAVING, "the peer is leaving")
        elif connection.lane:
            self._lane_keeper.bind(connection)
        elif old is None:
            self._install(connection)
        elif not old.is_open or _life_of(old) != _life_of(connection):
            self._remove(old, "the peer came back with a new connection")
            old.abort("the peer came back with a new connection")
            self._install(connection)
        elif self._rank(connection) > self._rank(old):
            self._connections[peer] = connection
            self._lane_keeper.keep(connection, lambda: self._connections.get(connection.peer) is connection)
            old.retire()
        else:
            connection.retire()

    def closed(self, connection: Connection, reason: str) -> None:
        self._remove(connection, reason)

    def message(self, connection: Connection, body: bytes, payload: memoryview | None) -> asyncio.Future[Any] | None:
        return self._handler.message(connection.peer, body, payload)

    def admit(self, connection: Connection, body: bytes, size: int) -> bool:
        return self._handler.admit(connection.peer, body, size)

    async def answer(self, connection: Connection, body: bytes) -> Answer:
        return await self._handler.answer(connection.peer, body)

    def _install(self, connection: Connection) -> None:
        if len(self._connections) >= self._limits.connections:
            connection.part(Parting.LEAVING, f"{len(self._connections)} peers are connected already")
            return
        peer, address = connection.peer, str(connection.address)
        is_inbound = connection.role is Role.LISTENER
        is_observer = connection.remote is not None and not connection.remote.run
        self._connections[peer] = connection
        self._congestion.note(connection.path())
        self._lane_keeper.keep(connection, lambda: self._connections.get(connection.peer) is connection)
        self._say(connection)("connected", peer=peer, address=address, inbound=is_inbound, observer=is_observer)
        self._handler.connected(peer, address, is_observer, is_inbound)

    def _remove(self, connection: Connection, reason: str) -> None:
        if self._connections.get(connection.peer) is connection:
            del self._connections[connection.peer]
            self._say(connection)("disconnected", peer=connection.peer, reason=reason)
            self._handler.disconnected(connection.peer, reason)

    def _say(self, connection: Connection) -> Callable[..., None]:
        """Observers come and go by the dozen: what is about them is for debugging."""
        is_observed = not self._run or (connection.remote is not None and not connection.remote.run)
        return log.debug if is_observed else log.info

    def _rank(self, connection: Connection) -> tuple[bool, int]:
        """Both ends compute the same: dialled by the smaller id wins; of one dialler's connections the latest."""
        is_ours = connection.role is Role.DIALLER
        dialler = connection.local if is_ours else connection.remote
        assert dialler is not None
        return dialler.peer == min(self.peer_id, connection.peer), dialler.attempt


def _life_of(connection: Connection) -> bytes:
    assert connection.remote is not None
    return connection.remote.life
