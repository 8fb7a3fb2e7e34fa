"""Set-up of connections: from an accepted or dialled socket to a channel whose peer has proved its identity.

Rules of this file:
1. An accepted socket costs one table entry until its peer has sent a whole greeting (a TLS ClientHello).
   net/abuse_limits.py decides which greeting is answered next.
2. A peer that sends nothing, an incomplete greeting, or something else is closed. Sockets that speak another protocol
   are handed to a taker, by their first byte. The taker reports whether the socket was of use.
3. The kernel wakes this process for a whole greeting, not for each byte (SO_RCVLOWAT).
4. A machine with many sockets turned away recently, here or by a taker, is blocked for a while: by the kernel where
   possible, otherwise after accept. Failed handshakes block no machine, since a newcomer may share its address with
   many others. They have a rate limit instead (net/abuse_limits.py).
5. The endpoint (net/endpoint.py) limits how many peers may prove themselves at a time.
6. A failed dial explains itself in a sentence for people.
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
from p2pdiloco.transport.narrow_paths import NarrowPaths
from p2pdiloco.transport.sockets import DialError, PeerRefused, WrongPeerError
from p2pdiloco.transport.tls import TlsContexts
from p2pdiloco.transport.tls_connection import Channel
from p2pdiloco.util import logs
from p2pdiloco.util.tasks import Tasks

# -- Kernel blocklist --------------------------------------------------------------------------------------------------
# The kernel drops packets of blocked machines before they become a connection, at no cost to this process. The filter
# is a classic BPF program on the listener (SO_ATTACH_FILTER, which needs no privileges). It compares the sender's
# address. Linux only.


SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
"""Linux values; the socket module has no names for them."""
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
"""BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K"""
NETWORK_HEADER = 0x1_0000_0000 - 0x10_0000
"""SKF_NET_OFF: offsets from here on are the IP header's."""
IPV4_SENDER, IPV6_SENDER = 12, 8
EVERYTHING = 0xFFFF_FFFF

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""


def block(listener: socket.socket, machines: Sequence[str]) -> bool:
    """Have the kernel drop packets that ``machines`` (see ``machine_of``) send to ``listener``, and no others.

    Return False if the kernel cannot do that.
    """
    if sys.platform != "linux":
        return False
    if not machines:
        unblock(listener)
        return True
    wanted = filter_program(listener.family, machines)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in wanted)
    held = ctypes.create_string_buffer(code, len(code))
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(wanted), ctypes.addressof(held))
        )
    except OSError:
        return False
    return True


def unblock(raw: socket.socket) -> None:
    """Remove the program from ``raw``. Accepted sockets inherit it from their listener."""
    with suppress(OSError):  # there is none
        raw.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def filter_program(family: int, machines: Iterable[str]) -> list[Instruction]:
    """Return a BPF program that drops the packets of ``machines``. Packets of another family never arrive."""
    if family == socket.AF_INET:
        words = [_address_words(machine) for machine in machines if ":" not in machine]
        found = [(LOAD_WORD, 0, 0, NETWORK_HEADER + IPV4_SENDER)]
        for (address,) in words:
            found += [(JUMP_IF_EQUAL, 0, 1, address), (RETURN, 0, 0, 0)]
    else:
        found = []
        for high, low in (_address_words(machine) for machine in machines if ":" in machine):
            found += [
                (LOAD_WORD, 0, 0, NETWORK_HEADER + IPV6_SENDER),
                (JUMP_IF_EQUAL, 0, 3, high),
                (LOAD_WORD, 0, 0, NETWORK_HEADER + IPV6_SENDER + 4),
                (JUMP_IF_EQUAL, 0, 1, low),
                (RETURN, 0, 0, 0),
            ]
    return [*found, (RETURN, 0, 0, EVERYTHING)]


def _address_words(machine: str) -> tuple[int, ...]:
    """Return the 32-bit words that a program compares: one for an IPv4 address, two for an IPv6 /64."""
    if ":" in machine:
        return struct.unpack(">II", ipaddress.IPv6Address(f"{machine}::").packed[:8])
    return struct.unpack(">I", ipaddress.IPv4Address(machine).packed)


# -- Pre-handshake pool ------------------------------------------------------------------------------------------------
# Accepted sockets wait here until they have sent a whole greeting, and then for their turn.


log = logs.get("transport")

ACCEPT_PAUSE_S = 0.2
"""Pause after this machine ran out of file descriptors."""
ACCEPTS_AT_ONCE = 64
"""Number of sockets to accept before the event loop continues."""
HEAD_BYTES = 5
"""Head of a TLS record: kind, version, length."""
HANDSHAKE_RECORD = b"\x16\x03"
RECORD_BYTES = 1 << 14
BLOCKLIST_S = 0.1
"""Time from a machine's last failure to its block, so that one program blocks several machines."""

Taker = Callable[[socket.socket], Awaitable[bool]]
"""Serves and closes a socket that speaks another protocol. Returns False if the socket was of no use."""


class Met(NamedTuple):
    """A socket connected by hole punching or a relay, and the address that it stands for."""

    raw: socket.socket
    address: Address
    is_relayed: bool


class PendingSocket(msgspec.Struct, eq=False):
    """An accepted socket whose peer has not proved its identity."""

    raw: socket.socket
    host: str
    since: float
    wanted_bytes: int = 0
    """The kernel reports this socket once so many bytes have arrived; 0: the socket is not watched."""


class HandshakePool:
    """Accepted sockets, until their greeting is answered; see the module's rules.

    let_in: does the handshake with a peer that has greeted, and closes the socket on failure; returns its success.
    turned_away: called with the host of each socket that is closed here, and the reason.
    takers: serve sockets of other protocols, by their first byte.
    """

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
        self._silent: Room[PendingSocket] = Room(limits.silent)
        self._reception: HandshakeQueue[PendingSocket] = HandshakeQueue(
            per_s=limits.failures_per_s, at_once=limits.failures_at_once, places=limits.silent
        )
        self._exclusion = Exclusion(failures=limits.shut_out_after, time_s=limits.shut_out_s)
        self._blocklist_timer: asyncio.TimerHandle | None = None
        """Timer for the next change of the blocklist."""
        self._shut_out = 0
        """Number of machines on the blocklist."""
        self._listeners: set[socket.socket] = set()
        self._cannot_accept = False
        """The last attempt to accept a connection failed. Keeps the log to one warning per outage."""
        self._turn: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        self._listeners.add(listener)
        self._update_blocklist()
        self._resume(listener)
        try:
            await loop.create_future()
        finally:
            self._listeners.discard(listener)
            loop.remove_reader(listener.fileno())
            self._close_all()

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                raw, where = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                if not self._cannot_accept:
                    log.warning("cannot accept; trying again until it is possible", error=str(error))
                self._cannot_accept = True
                loop.remove_reader(listener.fileno())
                loop.call_later(ACCEPT_PAUSE_S, self._resume, listener)
                return
            self._cannot_accept = False
            machine, now = machine_of(where[0]), loop.time()
            if self._blocklist_timer is not None:
                unblock(raw)
            if self._exclusion.has(machine, now):
                raw.close()
                continue
            raw.setblocking(False)
            pending = PendingSocket(raw, where[0], now)
            out = self._silent.enter(pending, machine)
            if out is not None:
                self._turn_away(out, "it made room for a newcomer: it took too long to send a greeting")
            if self._sweep is None:
                self._sweep = loop.call_later(self._wait_s, self._drop_slow)
            self._inspect(pending)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _inspect(self, pending: PendingSocket) -> None:
        """Decide what to do with a socket, from the bytes received so far."""
        try:
            said = pending.raw.recv(HEAD_BYTES, socket.MSG_PEEK)
            taker = self._takers.get(said[:1])
            if not said:
                self._turn_away(pending, "it closed the connection without sending anything")
            elif pending.wanted_bytes == HEAD_BYTES > len(said):
                self._turn_away(pending, "it closed the connection within its greeting")
            elif taker is not None:
                self._silent.leave(pending)
                self._stop_watching(pending)
                self._tasks.spawn(self._hand_over(taker, pending), name="take one")
            elif not said.startswith(HANDSHAKE_RECORD[: len(said)]):
                self._turn_away(pending, "it does not speak our TLS")
            elif len(said) < HEAD_BYTES:
                self._wait_for_bytes(pending, HEAD_BYTES)
            elif (length := HEAD_BYTES + int.from_bytes(said[3:5], "big")) > HEAD_BYTES + RECORD_BYTES:
                self._turn_away(pending, "it does not speak our TLS")
            elif len(pending.raw.recv(length, socket.MSG_PEEK)) == length:
                self._queue_handshake(pending)
            elif pending.wanted_bytes == length:
                self._turn_away(pending, "it closed the connection within its greeting")
            else:
                self._wait_for_bytes(pending, length)
        except BlockingIOError:
            self._wait_for_bytes(pending, 1)
        except OSError as error:
            self._turn_away(pending, str(error))

    def _wait_for_bytes(self, pending: PendingSocket, wanted_bytes: int) -> None:
        if wanted_bytes > 1:
            pending.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted_bytes)
        if not pending.wanted_bytes:
            asyncio.get_running_loop().add_reader(pending.raw.fileno(), self._inspect, pending)
        pending.wanted_bytes = wanted_bytes

    def _stop_watching(self, pending: PendingSocket) -> None:
        if pending.wanted_bytes:
            pending.wanted_bytes = 0
            asyncio.get_running_loop().remove_reader(pending.raw.fileno())

    def _queue_handshake(self, pending: PendingSocket) -> None:
        self._silent.leave(pending)
        self._stop_watching(pending)
        out = self._reception.room.enter(pending, machine_of(pending.host))
        if out is not None:
            self._turn_away(out, "it made room for a newcomer: too many handshakes wait")
        self._answer_next()

    def _answer_next(self) -> None:
        """Answer the greetings that the rate limit allows now."""
        loop = asyncio.get_running_loop()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        while (pending := self._reception.next(loop.time())) is not None:
            self._tasks.spawn(self._answer(pending), name="accept one")
        due_s = self._reception.due(loop.time())
        if due_s is not None:
            self._turn = loop.call_later(due_s, self._answer_next)

    async def _answer(self, pending: PendingSocket) -> None:
        with suppress(OSError):
            pending.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        is_proved = False
        try:
            is_proved = await self._let_in(pending.raw)
        finally:
            now = asyncio.get_running_loop().time()
            self._reception.ended(machine_of(pending.host), now, is_proved=is_proved)
        self._answer_next()

    async def _hand_over(self, taker: Taker, pending: PendingSocket) -> None:
        if not await taker(pending.raw):
            self._count_failure(pending)

    def _drop_slow(self) -> None:
        loop = asyncio.get_running_loop()
        too_long = loop.time() - self._wait_s
        for room, why in (
            (self._silent, f"it sent no whole greeting within {self._wait_s:.0f} s"),
            (self._reception.room, "too many handshakes wait"),
        ):
            for pending in [pending for pending in room.holders if pending.since <= too_long]:
                self._turn_away(pending, why)
        since = [pending.since for room in (self._silent, self._reception.room) for pending in room.holders]
        self._sweep = loop.call_at(min(since) + self._wait_s, self._drop_slow) if since else None

    def _turn_away(self, pending: PendingSocket, why: str) -> None:
        self._silent.leave(pending)
        self._reception.room.leave(pending)
        self._stop_watching(pending)
        pending.raw.close()
        self._turned_away(pending.host, why)
        self._count_failure(pending)

    def _count_failure(self, pending: PendingSocket) -> None:
        loop, machine = asyncio.get_running_loop(), machine_of(pending.host)
        if self._exclusion.failed(machine, loop.time()):
            soon = loop.time() + BLOCKLIST_S
            if self._blocklist_timer is not None and self._blocklist_timer.when() > soon:
                self._blocklist_timer.cancel()
                self._blocklist_timer = None
            self._blocklist_timer = self._blocklist_timer or loop.call_at(soon, self._update_blocklist)

    def _update_blocklist(self) -> None:
        loop = asyncio.get_running_loop()
        machines = self._exclusion.machines(loop.time())
        by_kernel = [block(listener, machines) for listener in self._listeners]
        if len(machines) > self._shut_out:
            log.warning(
                "machines are blocked for a while: their connections sent nothing valid",
                number=len(machines),
                last=machines[-1],
                by="the kernel" if all(by_kernel) else "this process",
            )
        self._shut_out = len(machines)
        ends = self._exclusion.ends()
        self._blocklist_timer = None if ends is None else loop.call_at(ends, self._update_blocklist)

    def _close_all(self) -> None:
        for timer in (self._turn, self._sweep, self._blocklist_timer):
            if timer is not None:
                timer.cancel()
        self._turn = self._sweep = self._blocklist_timer = None
        for room in (self._silent, self._reception.room):
            for pending in list(room.holders):
                room.leave(pending)
                self._stop_watching(pending)
                pending.raw.close()


# -- Connection set-up -------------------------------------------------------------------------------------------------


LINE_BURST, LINES_PER_S = 20, 10 / 60
TRIED_ADDRESSES = 4
"""Maximum number of addresses of a name that are tried."""

NewChannel = Callable[[Role, str, Address, Dialled], Channel]
"""Makes a channel without a socket from the own role, the other machine's numeric address, the dialled address, and the
parameters of the connection."""
Abandon = Callable[[Channel, str], None]
"""Gives up a channel, for a reason."""
DialMet = Callable[[PeerId, Dialled], Awaitable[PeerId]]
"""Makes another direct connection to a peer that was met at a rendezvous server."""


class ConnectionSetup:
    """Dials and accepts connections for a transport; see the module's rules.

    takers: serve sockets of other protocols (rendezvous channels, the directory's daemon), by their first byte.
    dial_met: set by the rendezvous client, if there is one.
    """

    def __init__(
        self,
        new_channel: NewChannel,
        abandon: Abandon,
        *,
        tls: TlsContexts,
        limits: TransportLimits,
        tasks: Tasks,
        narrow_paths: NarrowPaths,
    ) -> None:
        self._new_channel = new_channel
        self._abandon = abandon
        self._tls = tls
        self._congestion = limits.congestion
        self._close_s = limits.connection.part_s
        self.takers: dict[bytes, Taker] = {}
        self._pool = HandshakePool(self._accept, self._log_failure, takers=self.takers, limits=limits, tasks=tasks)
        self.dial_met: DialMet | None = None
        self._lines = TokenBucket(burst=LINE_BURST, per_s=LINES_PER_S)
        self._untold = 0
        """Failed handshakes since the last log line."""
        self.narrow_paths = narrow_paths
        self._listeners: list[socket.socket] = []

    async def dial(self, target: Address, lane: int = 0, bond: bytes = b"") -> PeerId:
        """Connect to ``target`` and do the handshake. The caller sets the deadline.

        With ``lane``, the connection becomes a lane of the primary connection that ``bond`` names.

        Raises:
            PeerRefused: the other side refused this peer; the text is its reason.
            WrongPeerError: another peer answers there, or somebody is in between.
            DialError: any other failure.
        """
        raw = await connect(target, congestion=self._congestion, narrow=self.narrow_paths)
        channel = self._new_channel(Role.DIALLER, _host_of(raw), target, Dialled(target.peer, lane, bond))
        return await self._open(channel, raw)

    async def adopt(self, role: Role, met: Met, wanted: Dialled) -> PeerId:
        """Do the handshake, as ``dial`` does, on a connected socket.

        ``wanted`` is ignored on the listener's side.
        """
        dialled = wanted._replace(is_relayed=met.is_relayed) if role is Role.DIALLER else ANYBODY
        channel = self._new_channel(role, _host_of(met.raw), met.address, dialled)
        channel.is_met = True
        return await self._open(channel, met.raw)

    async def dial_lane(self, channel: Channel, lane: int, bond: bytes) -> None:
        """Dial another connection beside ``channel``, its primary. Raises as ``dial`` does."""
        peer = channel.connection.peer
        if not channel.is_met:
            await self.dial(msgspec.structs.replace(channel.address, peer=peer), lane, bond)
        elif self.dial_met is None or channel.connection.greeting.is_relayed:
            raise DialError("a relay carries only one connection between two peers")
        else:
            await self.dial_met(peer, Dialled(peer, lane, bond))

    async def _open(self, channel: Channel, raw: socket.socket) -> PeerId:
        target = channel.address
        try:
            return await self._shake_hands(channel, raw)
        except MismatchError as error:
            raise PeerRefused(f"{target}: {error}") from error
        except HandshakeError as error:
            raise WrongPeerError(f"{target}: {error}") from error
        except TimeoutError:
            raise
        except OSError as error:
            raise DialError(f"{target}: {sockets.explain(error, target)}") from error

    async def accept_all(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        if listener not in self._listeners:
            self._listeners.append(listener)
        if self.narrow_paths.is_everywhere:
            sockets.shorten(listener)
        await self._pool.serve(listener)

    def check_path_mtu(self, channel: Channel, error: Exception | None) -> None:
        """Check whether a lost connection failed because its path loses long packets.

        This is assumed if the peer was heard shortly before, but acknowledged none of the long packets. The cause is
        usually a tunnel with a smaller MTU that sends no ICMP. New connections then use shorter segments. If one has
        come before, also on another connection, or round trips are long, a full queue, loss or an outage is the cause.
        """
        if not isinstance(error, TimeoutError) or not channel.may_lose_long_packets:
            return
        connection, now = channel.connection, asyncio.get_running_loop().time()
        is_heard = now - connection.received_at < sockets.DEAD_AFTER_S / 2
        if not connection.is_proved or not (is_heard or now - channel.began_at < 2 * sockets.DEAD_AFTER_S):
            return
        if not self.narrow_paths.add(connection.host):
            return
        if connection.role is Role.LISTENER:
            for listener in self._listeners:
                sockets.shorten(listener)
        log.warning(
            "a peer acknowledged no long packet: its path may lose long packets; from now on "
            f"segments have {sockets.SHORT_BYTES} bytes",
            peer=connection.peer,
            address=str(channel.address),
        )

    async def _accept(self, raw: socket.socket) -> bool:
        """Do the handshake with a peer that has greeted. Return whether it is admitted."""
        try:
            address = addresses.of_socket(*raw.getpeername()[:2])
        except OSError:
            raw.close()  # the other side has closed it already
            return False
        sockets.tune(raw, congestion=self._congestion)
        channel = self._new_channel(Role.LISTENER, address.host, address, ANYBODY)
        try:
            await self._shake_hands(channel, raw)
        except (OSError, HandshakeError) as error:
            self._log_failure(address.host, _reason_of(error))
            return False
        return True

    def _log_failure(self, host: str, reason: str) -> None:
        if not self._lines.take(asyncio.get_running_loop().time()):
            self._untold += 1
            return
        before = {"and_before": self._untold} if self._untold else {}
        self._untold = 0
        log.warning("dropped a stranger", host=host, reason=reason, **before)

    async def _shake_hands(self, channel: Channel, raw: socket.socket) -> PeerId:
        """Do TLS and the handshake on ``raw``. The endpoint has the deadline.

        Raises OSError if TLS failed or the connection was lost, HandshakeError if the other side proved nothing."""
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
                opening.exception()  # marks it as retrieved: nobody else does, if this task was cancelled meanwhile
            if channel.transport is None:
                raw.close()
            self._abandon(channel, why)


async def connect(address: Address, *, congestion: str, narrow: Container[str] = ()) -> socket.socket:
    """Return a connected, tuned, non-blocking socket. The caller sets the deadline.

    Connections to ``narrow`` hosts use short segments.

    Raises:
        DialError: the host is unknown, refuses or cannot be reached; the text says which.
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
        return ""  # the other side has closed it already; the next step reports that


def _reason_of(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"it does not speak our TLS ({error.reason})"
    return str(error) or type(error).__name__
