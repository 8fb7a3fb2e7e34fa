"""Dialling and accepting: from a socket to a channel whose other side is proved.

Rules of this file:
1. Who is accepted waits in an anteroom until it has greeted; how many may prove themselves at a time is the
   endpoint's business (net/endpoint.py). One log line for each that fails, of at most LINES_A_MINUTE; the next
   minute's first line tells how many had none.
2. A dial that fails says why, in a sentence for people.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Container

import msgspec

from p2pdiloco.net.handshake import ANYBODY, Dialled, HandshakeError, MismatchError, Role
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.runtime import addresses, logs, sockets
from p2pdiloco.runtime.addresses import Address
from p2pdiloco.runtime.anteroom import Anteroom, Taker
from p2pdiloco.runtime.channel import Channel
from p2pdiloco.runtime.lines import Met
from p2pdiloco.runtime.sockets import DialError, Impostor, PeerRefused
from p2pdiloco.runtime.tasks import Tasks
from p2pdiloco.runtime.tls import TlsContexts

log = logs.get("transport")

LINES_A_MINUTE = 20
NARROW_LIMIT = 256
TRIED_ADDRESSES = 4
"""Of the addresses that a name resolves to."""

NewChannel = Callable[[Role, str, Address, Dialled], Channel]
"""(our role, the other machine's numeric address, where we met it, what we want) -> a channel that is not made yet."""
GiveUp = Callable[[Channel, str], None]
"""Nothing came of this channel."""


Again = Callable[[PeerId, Dialled], Awaitable[PeerId]]
"""Makes a further direct connection to a peer that was met at a meeting point."""


class Strangers:
    """See the module's rules. ``others``: by the first byte of what is no connection (a meeting point's lines, the
    directory's daemon); ``again``: of whoever meets peers; none at first."""

    def __init__(
        self,
        new_channel: NewChannel,
        give_up: GiveUp,
        *,
        tls: TlsContexts,
        limits: TransportLimits,
        tasks: Tasks,
    ) -> None:
        self._new_channel = new_channel
        self._give_up = give_up
        self._tls = tls
        self._congestion = limits.congestion
        self._close_s = limits.connection.part_s
        self.others: dict[bytes, Taker] = {}
        self._anteroom = Anteroom(self._accept, self._tell, takers=self.others, limits=limits, tasks=tasks)
        self.again: Again | None = None
        self._minute = float("-inf")
        self._failures = 0
        """In this minute."""
        self.narrow: dict[str, None] = {}
        """Hosts to which long packets vanish."""
        self._listeners: list[socket.socket] = []

    async def dial(self, target: Address, lane: int = 0, bond: bytes = b"") -> PeerId:
        """Connect and prove each other; as a ``lane`` of the connection that ``bond`` names, or in its own right.
        The caller gives the deadline.

        Raises:
            PeerRefused: the other side refused us; its reason.
            Impostor: somebody else answers there, or is in between.
            DialError: anything else.
        """
        raw = await connect(target, congestion=self._congestion, narrow=self.narrow)
        channel = self._new_channel(Role.DIALLER, _host_of(raw), target, Dialled(target.peer, lane, bond))
        return await self._proved(channel, raw)

    async def adopt(self, role: Role, met: Met, wanted: Dialled) -> PeerId:
        """As ``dial``, on a socket that is connected already. For the listener of the two ``wanted`` says nothing."""
        dialled = wanted._replace(is_relayed=met.is_relayed) if role is Role.DIALLER else ANYBODY
        channel = self._new_channel(role, _host_of(met.raw), met.address, dialled)
        channel.is_met = True
        return await self._proved(channel, met.raw)

    async def dial_lane(self, channel: Channel, lane: int, bond: bytes) -> None:
        """A further connection beside ``channel``, whose primary it is; raises as ``dial``."""
        peer = channel.connection.peer
        if not channel.is_met:
            await self.dial(msgspec.structs.replace(channel.address, peer=peer), lane, bond)
        elif self.again is None or channel.connection.greeting.is_relayed:
            raise DialError("a relay carries one connection of a pair")
        else:
            await self.again(peer, Dialled(peer, lane, bond))

    async def _proved(self, channel: Channel, raw: socket.socket) -> PeerId:
        target = channel.address
        try:
            return await self._prove(channel, raw)
        except MismatchError as error:
            raise PeerRefused(f"{target}: {error}") from error
        except HandshakeError as error:
            raise Impostor(f"{target}: {error}") from error
        except TimeoutError:
            raise
        except OSError as error:
            raise DialError(f"{target}: {sockets.explain(error, target)}") from error

    async def accept_all(self, listener: socket.socket) -> None:
        """Accept, until cancelled."""
        if listener not in self._listeners:
            self._listeners.append(listener)
        await self._anteroom.serve(listener)

    def lost(self, channel: Channel, error: Exception | None) -> None:
        """A socket is closed. If what we sent was acknowledged no more, on what was a good connection shortly before,
        the way loses what is long (a tunnel with a smaller MTU, and nobody tells): segments are shorter from now on."""
        if not isinstance(error, TimeoutError):
            return
        connection, now = channel.connection, asyncio.get_running_loop().time()
        is_heard = now - connection.heard_at < sockets.DEAD_AFTER_S / 2
        if not connection.is_proved or not (is_heard or now - channel.began_at < 2 * sockets.DEAD_AFTER_S):
            return
        if connection.role is Role.LISTENER:
            for listener in self._listeners:
                sockets.shorten(listener)
        self.narrow[connection.host] = None
        if len(self.narrow) > NARROW_LIMIT:
            del self.narrow[next(iter(self.narrow))]
        log.warning(
            "nothing that was sent to a peer was acknowledged: long packets may vanish on the way; from now on "
            f"segments have {sockets.SHORT_BYTES} bytes",
            peer=connection.peer,
            address=str(channel.address),
        )

    async def _accept(self, raw: socket.socket) -> bool:
        """Who greets; whether it is let in."""
        try:
            address = addresses.of_socket(*raw.getpeername()[:2])
        except OSError:
            raw.close()  # It has gone already.
            return False
        sockets.tune(raw, congestion=self._congestion)
        channel = self._new_channel(Role.LISTENER, address.host, address, ANYBODY)
        try:
            await self._prove(channel, raw)
        except (OSError, HandshakeError) as error:
            self._tell(address.host, _reason_of(error))
            return False
        return True

    def _tell(self, host: str, reason: str) -> None:
        now, untold = asyncio.get_running_loop().time(), 0
        if now - self._minute >= 60.0:
            untold = max(0, self._failures - LINES_A_MINUTE)
            self._minute, self._failures = now, 0
        self._failures += 1
        if self._failures <= LINES_A_MINUTE:
            log.warning("dropped a stranger", host=host, reason=reason, **({"and_before": untold} if untold else {}))

    async def _prove(self, channel: Channel, raw: socket.socket) -> PeerId:
        """Encrypt ``raw``, and wait until the other side has proved itself. The endpoint has the deadline.

        Raises:
            OSError: TLS failed, or the connection was lost or closed.
            HandshakeError: it has not.
        """
        loop = asyncio.get_running_loop()
        context = self._tls.server if channel.connection.role is Role.LISTENER else self._tls.client
        making = (
            loop.connect_accepted_socket(lambda: channel, raw, ssl=context, ssl_shutdown_timeout=self._close_s)
            if channel.connection.role is Role.LISTENER
            else loop.create_connection(
                lambda: channel, sock=raw, ssl=context, server_hostname="", ssl_shutdown_timeout=self._close_s
            )
        )
        channel.opening = opening = loop.create_task(making, name="encrypt")
        why = "the dial failed" if channel.connection.role is Role.DIALLER else "the handshake failed"
        try:
            await asyncio.wait([opening])
            if opening.cancelled():
                raise TimeoutError(channel.connection.reason)
            opening.result()
            return await asyncio.shield(channel.proved)
        except (OSError, HandshakeError) as error:
            why = str(error)
            raise
        finally:
            if not opening.done():
                opening.cancel()
                await asyncio.wait([opening])
                if not opening.cancelled():
                    opening.exception()  # nobody else asks how it ended
            if channel.transport is None:
                raw.close()
            self._give_up(channel, why)


async def connect(address: Address, *, congestion: str, narrow: Container[str] = ()) -> socket.socket:
    """A connected, tuned, non-blocking socket; with short segments to the ``narrow`` hosts. The caller gives the
    deadline.

    Raises:
        DialError: unknown host, refused, unreachable; the text says which.
    """
    loop = asyncio.get_running_loop()
    family = socket.AF_INET if address.family in ("ip4", "dns4") else socket.AF_UNSPEC
    try:
        found = await loop.getaddrinfo(address.host, address.port, family=family, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DialError(f"{address.host} cannot be resolved: {error.strerror}") from error
    failure: OSError | None = None
    for resolved_family, kind, protocol, _, target in found[:TRIED_ADDRESSES]:
        connection = socket.socket(resolved_family, kind, protocol)
        try:
            connection.setblocking(False)
            sockets.tune(connection, congestion=congestion)
            if target[0] in narrow:
                sockets.shorten(connection)
            await loop.sock_connect(connection, target)
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise DialError(sockets.explain(failure, address) if failure else f"{address.host} has no address") from failure


def _host_of(raw: socket.socket) -> str:
    try:
        return str(raw.getpeername()[0])
    except OSError:
        return ""  # It has gone already, as the next step will say.


def _reason_of(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not our TLS ({error.reason})"
    return str(error) or type(error).__name__
