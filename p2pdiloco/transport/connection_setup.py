"""Where sockets wait that were accepted: until they have said what they are, and until it is their turn.

Rules of this file:
1. Nothing is made for a stranger before it has said a whole greeting (a TLS ClientHello): a socket and a line in a
   table are all it costs. Whose turn it is then, net/abuse_limits.py says.
2. Who says nothing, says it in crumbs, or something else, is closed; by the first byte others may take what is no
   connection of ours, and say afterwards whether anything came of it.
3. The kernel wakes us for a whole greeting, not for each byte (SO_RCVLOWAT).
4. A machine of which many were turned away, here or by who took them, is shut out for a while, by the kernel where it
   does that (transport/connection_setup.py). Handshakes that fail shut nobody out: they are paid from a budget
   (net/abuse_limits.py), and a newcomer may share an address with many.
"""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import socket
import ssl
import struct
import sys
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from p2pdiloco.net.abuse_limits import Exclusion, HandshakeQueue, Room, machine_of
from p2pdiloco.net.handshake import ANYBODY, Dialled, HandshakeError, MismatchError, Role
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.timing import TokenBucket
from p2pdiloco.transport import addresses, sockets
from p2pdiloco.transport.addresses import Address
from p2pdiloco.transport.sockets import DialError, Impostor, PeerRefused
from p2pdiloco.transport.tls import TlsContexts
from p2pdiloco.transport.tls_connection import Channel
from p2pdiloco.util import logs
from p2pdiloco.util.tasks import Tasks

# -- Kernel blocklist --------------------------------------------------------------------------------------------------
# Machines that the kernel does not let through to a listening socket: what comes from them is dropped before it is a
# connection, and costs this process nothing.
#
# Rules of this file:
# 1. Linux alone knows how: a classic BPF program on the listener (SO_ATTACH_FILTER; no rights are needed), which looks
#    at the sender's address. Elsewhere, and where the kernel says no, ``close_to`` says so; who accepts closes then.
# 2. What is accepted inherits the program: ``lift`` takes it off.


SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
"""Linux; the socket module has no names for them."""
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
"""BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K"""
NETWORK_HEADER = 0x1_0000_0000 - 0x10_0000
"""SKF_NET_OFF: offsets from here on are the IP header's."""
IPV4_SENDER, IPV6_SENDER = 12, 8
EVERYTHING = 0xFFFF_FFFF

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""


def close_to(listener: socket.socket, machines: Sequence[str]) -> bool:
    """From now on nothing of ``machines`` (``net.admission.machine_of``) arrives at ``listener``, of others all; False:
    the kernel does not do that."""
    if sys.platform != "linux":
        return False
    if not machines:
        lift(listener)
        return True
    wanted = program(listener.family, machines)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in wanted)
    held = ctypes.create_string_buffer(code, len(code))
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(wanted), ctypes.addressof(held))
        )
    except OSError:
        return False
    return True


def lift(raw: socket.socket) -> None:
    """All comes through."""
    with suppress(OSError):  # there is none
        raw.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def program(family: int, machines: Iterable[str]) -> list[Instruction]:
    """What drops the packets of ``machines``; those of another family never come."""
    if family == socket.AF_INET:
        words = [_words(machine) for machine in machines if ":" not in machine]
        found = [(LOAD_WORD, 0, 0, NETWORK_HEADER + IPV4_SENDER)]
        for (address,) in words:
            found += [(JUMP_IF_EQUAL, 0, 1, address), (RETURN, 0, 0, 0)]
    else:
        found = []
        for high, low in (_words(machine) for machine in machines if ":" in machine):
            found += [
                (LOAD_WORD, 0, 0, NETWORK_HEADER + IPV6_SENDER),
                (JUMP_IF_EQUAL, 0, 3, high),
                (LOAD_WORD, 0, 0, NETWORK_HEADER + IPV6_SENDER + 4),
                (JUMP_IF_EQUAL, 0, 1, low),
                (RETURN, 0, 0, 0),
            ]
    return [*found, (RETURN, 0, 0, EVERYTHING)]


def _words(machine: str) -> tuple[int, ...]:
    """Of an IPv4 address one, of an IPv6 line its two."""
    if ":" in machine:
        return struct.unpack(">II", ipaddress.IPv6Address(f"{machine}::").packed[:8])
    return struct.unpack(">I", ipaddress.IPv4Address(machine).packed)


# -- Pre-handshake pool ------------------------------------------------------------------------------------------------
# Where sockets wait that were accepted: until they have said what they are, and until it is their turn.


log = logs.get("transport")

ACCEPT_PAUSE_S = 0.2
"""After the machine ran out of file descriptors."""
AT_ONCE = 64
"""Sockets that are accepted before anything else is done."""
HEAD_BYTES = 5
"""Of a TLS record: kind, version, length."""
HANDSHAKE_RECORD = b"\x16\x03"
RECORD_BYTES = 1 << 14
SIEVE_S = 0.1
"""After a machine is shut out: others go with it."""

Taker = Callable[[socket.socket], Awaitable[bool]]
"""Takes, and closes, a socket on which somebody speaks another protocol; whether anything came of it."""


class Met(NamedTuple):
    """A connected socket, and the address that it stands for."""

    raw: socket.socket
    address: Address
    is_relayed: bool


class Visitor:
    """A socket that waits."""

    def __init__(self, raw: socket.socket, host: str, since: float) -> None:
        self.raw = raw
        self.host = host
        self.since = since
        self.wanted_bytes = 0
        """Of which the kernel tells; 0: it is not asked."""


class HandshakePool:
    """See the module's rules. ``let_in``: proves who greets, closes the socket if nothing comes of it, and returns
    whether something has. ``turned_away``: is told of each that is closed here: its host and why. ``takers``: by the
    first byte of what is no connection."""

    def __init__(
        self,
        let_in: Callable[[socket.socket], Awaitable[bool]],
        turned_away: Callable[[str, str], None],
        *,
        takers: dict[bytes, Taker],
        limits: TransportLimits,
        tasks: Tasks,
    ) -> None:
        self._let_in = let_in
        self._turned_away = turned_away
        self._takers = takers
        self._wait_s = limits.connection.handshake_s
        self._tasks = tasks
        self._silent: Room[Visitor] = Room(limits.silent)
        self._reception: HandshakeQueue[Visitor] = HandshakeQueue(
            per_s=limits.failures_per_s, at_once=limits.failures_at_once, places=limits.silent
        )
        self._exclusion = Exclusion(failures=limits.shut_out_after, time_s=limits.shut_out_s)
        self._sieving: asyncio.TimerHandle | None = None
        """When machines are shut out, or heard again."""
        self._shut_out = 0
        """Machines, when last that was done."""
        self._listeners: set[socket.socket] = set()
        self._turn: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Accept, until cancelled."""
        loop = asyncio.get_running_loop()
        self._listeners.add(listener)
        self._sieve()
        self._resume(listener)
        try:
            await loop.create_future()
        finally:
            self._listeners.discard(listener)
            loop.remove_reader(listener.fileno())
            self._empty()

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(AT_ONCE):
            try:
                raw, where = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                log.warning("cannot accept", error=str(error))
                loop.remove_reader(listener.fileno())
                loop.call_later(ACCEPT_PAUSE_S, self._resume, listener)
                return
            machine, now = machine_of(where[0]), loop.time()
            if self._sieving is not None:
                lift(raw)
            if self._exclusion.has(machine, now):
                raw.close()
                continue
            raw.setblocking(False)
            visitor = Visitor(raw, where[0], now)
            out = self._silent.enter(visitor, machine)
            if out is not None:
                self._turn_away(out, "it made room for a newcomer: it took long to say what it is")
            if self._sweep is None:
                self._sweep = loop.call_later(self._wait_s, self._look_for_the_slow)
            self._look(visitor)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _look(self, visitor: Visitor) -> None:
        """At what it has said so far."""
        try:
            said = visitor.raw.recv(HEAD_BYTES, socket.MSG_PEEK)
            taker = self._takers.get(said[:1])
            if not said:
                self._turn_away(visitor, "it went without a word")
            elif visitor.wanted_bytes == HEAD_BYTES > len(said):
                self._turn_away(visitor, "it went in the middle of its greeting")
            elif taker is not None:
                self._silent.leave(visitor)
                self._unwatch(visitor)
                self._tasks.spawn(self._give(taker, visitor), name="take one")
            elif not said.startswith(HANDSHAKE_RECORD[: len(said)]):
                self._turn_away(visitor, "what it says is not our TLS")
            elif len(said) < HEAD_BYTES:
                self._await(visitor, HEAD_BYTES)
            elif (length := HEAD_BYTES + int.from_bytes(said[3:5], "big")) > HEAD_BYTES + RECORD_BYTES:
                self._turn_away(visitor, "what it says is not our TLS")
            elif len(visitor.raw.recv(length, socket.MSG_PEEK)) == length:
                self._greets(visitor)
            elif visitor.wanted_bytes == length:
                self._turn_away(visitor, "it went in the middle of its greeting")
            else:
                self._await(visitor, length)
        except BlockingIOError:
            self._await(visitor, 1)
        except OSError as error:
            self._turn_away(visitor, str(error))

    def _await(self, visitor: Visitor, wanted_bytes: int) -> None:
        if wanted_bytes > 1:
            visitor.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted_bytes)
        if not visitor.wanted_bytes:
            asyncio.get_running_loop().add_reader(visitor.raw.fileno(), self._look, visitor)
        visitor.wanted_bytes = wanted_bytes

    def _unwatch(self, visitor: Visitor) -> None:
        if visitor.wanted_bytes:
            visitor.wanted_bytes = 0
            asyncio.get_running_loop().remove_reader(visitor.raw.fileno())

    def _greets(self, visitor: Visitor) -> None:
        self._silent.leave(visitor)
        self._unwatch(visitor)
        out = self._reception.room.enter(visitor, machine_of(visitor.host))
        if out is not None:
            self._turn_away(out, "it made room for a newcomer: too many greet at once")
        self._next()

    def _next(self) -> None:
        """Answer whose turn it is."""
        loop = asyncio.get_running_loop()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        while (visitor := self._reception.next(loop.time())) is not None:
            self._tasks.spawn(self._answer(visitor), name="accept one")
        due_s = self._reception.due(loop.time())
        if due_s is not None:
            self._turn = loop.call_later(due_s, self._next)

    async def _answer(self, visitor: Visitor) -> None:
        with suppress(OSError):
            visitor.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        is_proved = False
        try:
            is_proved = await self._let_in(visitor.raw)
        finally:
            now = asyncio.get_running_loop().time()
            self._reception.ended(machine_of(visitor.host), now, is_proved=is_proved)
        self._next()

    async def _give(self, taker: Taker, visitor: Visitor) -> None:
        if not await taker(visitor.raw):
            self._came_to_nothing(visitor)

    def _look_for_the_slow(self) -> None:
        loop = asyncio.get_running_loop()
        too_long = loop.time() - self._wait_s
        for room, why in (
            (self._silent, f"it said nothing whole for {self._wait_s:.0f} s"),
            (self._reception.room, "too many greet at once"),
        ):
            for visitor in [visitor for visitor in room.holders if visitor.since <= too_long]:
                self._turn_away(visitor, why)
        since = [visitor.since for room in (self._silent, self._reception.room) for visitor in room.holders]
        self._sweep = loop.call_at(min(since) + self._wait_s, self._look_for_the_slow) if since else None

    def _turn_away(self, visitor: Visitor, why: str) -> None:
        self._silent.leave(visitor)
        self._reception.room.leave(visitor)
        self._unwatch(visitor)
        visitor.raw.close()
        self._turned_away(visitor.host, why)
        self._came_to_nothing(visitor)

    def _came_to_nothing(self, visitor: Visitor) -> None:
        loop, machine = asyncio.get_running_loop(), machine_of(visitor.host)
        if self._exclusion.failed(machine, loop.time()):
            soon = loop.time() + SIEVE_S
            if self._sieving is not None and self._sieving.when() > soon:
                self._sieving.cancel()
                self._sieving = None
            self._sieving = self._sieving or loop.call_at(soon, self._sieve)

    def _sieve(self) -> None:
        """Shut out who is to be, and have who was be heard again."""
        loop = asyncio.get_running_loop()
        machines = self._exclusion.machines(loop.time())
        by_kernel = [close_to(listener, machines) for listener in self._listeners]
        if len(machines) > self._shut_out:
            log.warning(
                "machines are not heard for a while: what came from them said nothing",
                number=len(machines),
                last=machines[-1],
                by="the kernel" if all(by_kernel) else "us, one by one",
            )
        self._shut_out = len(machines)
        ends = self._exclusion.ends()
        self._sieving = None if ends is None else loop.call_at(ends, self._sieve)

    def _empty(self) -> None:
        for timer in (self._turn, self._sweep, self._sieving):
            if timer is not None:
                timer.cancel()
        self._turn = self._sweep = self._sieving = None
        for room in (self._silent, self._reception.room):
            for visitor in list(room.holders):
                room.leave(visitor)
                self._unwatch(visitor)
                visitor.raw.close()


# -- Connection set-up -------------------------------------------------------------------------------------------------
# Dialling and accepting: from a socket to a channel whose other side is proved.
# Rules of this file:
# 1. Who is accepted waits in an anteroom until it has greeted; how many may prove themselves at a time is the
#    endpoint's business (net/endpoint.py). One log line for each that fails, LINE_BURST at most and then
#    LINES_PER_S; the next line tells how many had none.
# 2. A dial that fails says why, in a sentence for people.


LINE_BURST, LINES_PER_S = 20, 10 / 60
NARROW_LIMIT = 256
TRIED_ADDRESSES = 4
"""Of the addresses that a name resolves to."""

NewChannel = Callable[[Role, str, Address, Dialled], Channel]
"""(our role, the other machine's numeric address, where we met it, what we want) -> a channel that is not made yet."""
GiveUp = Callable[[Channel, str], None]
"""Nothing came of this channel."""


Again = Callable[[PeerId, Dialled], Awaitable[PeerId]]
"""Makes a further direct connection to a peer that was met at a meeting point."""


class ConnectionSetup:
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
        self._anteroom = HandshakePool(self._accept, self._tell, takers=self.others, limits=limits, tasks=tasks)
        self.again: Again | None = None
        self._lines = TokenBucket(burst=LINE_BURST, per_s=LINES_PER_S)
        self._untold = 0
        """Failures since the last line."""
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
        if not self._lines.take(asyncio.get_running_loop().time()):
            self._untold += 1
            return
        before = {"and_before": self._untold} if self._untold else {}
        self._untold = 0
        log.warning("dropped a stranger", host=host, reason=reason, **before)

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
