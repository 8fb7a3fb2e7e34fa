"""Meeting another peer over a line to a meeting point: a direct connection through both routers, or the line as a
relay.

Rules of this file:
1. TCP hole punching (simultaneous open): both peers dial each other from the port of their line, at the address at
   which the meeting point sees the other. The listener of the two also listens there, since one of the dials may come
   through as a normal connection. The line stays open meanwhile, and with it the router's mapping.
2. What a meeting point says is a hint. One address is dialled, at most PUNCHES times in PUNCH_S seconds, and only if it
   can be a peer's and the caller's budget allows it (``may_dial``).
3. The other end proves its key afterwards, as on any connection (net/handshake.py).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Container
from contextlib import suppress

from p2pdiloco.nat import messages as intro
from p2pdiloco.net.frames import decode_text
from p2pdiloco.net.handshake import Role
from p2pdiloco.transport import addresses, sockets
from p2pdiloco.transport.addresses import Address
from p2pdiloco.transport.connection_setup import Met
from p2pdiloco.transport.sockets import DialError

OPEN_S = 5.0
"""Limit for the connection to the meeting point."""
SEEN_S = 12.0
"""Limit for the line of the other peer to be there."""
PUNCH_S = 2.0
HOPELESS_S = 0.5
"""Used instead if a router changes ports: it may still map them predictably."""
PUNCHES = 12
PUNCH_PAUSE_S = 0.05
RELAY_S = 6.0


MayDial = Callable[[Address], bool]
"""Called once, with the address at which the meeting point sees the other peer."""


async def meet(
    point: Address,
    ticket: bytes,
    role: Role,
    *,
    may_relay: bool,
    congestion: str,
    narrow: Container[str] = (),
    may_dial: MayDial = lambda _: True,
) -> Met:
    """Open a line to ``point`` with ``ticket``, and meet the peer that has the other ticket.

    role: of this peer in the connection that comes about.
    narrow: hosts to which segments are short.

    Raises:
        DialError: no connection came about; the text says why.
    """
    line = await _open(point, congestion, narrow)
    try:
        seen = await _wait_for_other(line, ticket)
        return await _meet_on(
            line, point, seen, role, may_relay=may_relay, congestion=congestion, narrow=narrow, may_dial=may_dial
        )
    except TimeoutError:
        line.close()
        raise DialError(f"meeting point {point}: the other peer did not come in time") from None
    except (OSError, ValueError) as error:
        line.close()
        raise DialError(f"meeting point {point}: {error or type(error).__name__}") from error
    except BaseException:
        line.close()
        raise


async def _open(point: Address, congestion: str, narrow: Container[str]) -> socket.socket:
    """Open a connected socket whose port other sockets may use, too."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(OPEN_S):
            found = await loop.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)
            line = sockets.sharing_port(found[0][0], 0)
            try:
                sockets.tune(line, congestion=congestion)
                if found[0][4][0] in narrow:
                    sockets.shorten(line)
                await loop.sock_connect(line, found[0][4])
            except BaseException:
                line.close()
                raise
            return line
    except TimeoutError:
        raise DialError(f"no answer from meeting point {point} within {OPEN_S:g} s") from None
    except OSError as error:
        raise DialError(f"meeting point: {sockets.explain(error, point)}") from error


async def _wait_for_other(line: socket.socket, ticket: bytes) -> intro.Seen:
    """Show the ticket, and wait for the line of the other peer."""
    local_port = line.getsockname()[1]
    await asyncio.get_running_loop().sock_sendall(line, intro.encode_opening(ticket, local_port))
    async with asyncio.timeout(SEEN_S):
        head = await _read(line, 1)
        if head == intro.REFUSED:
            raise ValueError(await _read_refusal(line))
        return intro.decode_seen(await _read(line, intro.seen_size(head + await _read(line, 1))))


async def _meet_on(
    line: socket.socket,
    point: Address,
    seen: intro.Seen,
    role: Role,
    *,
    may_relay: bool,
    congestion: str,
    narrow: Container[str],
    may_dial: MayDial,
) -> Met:
    loop = asyncio.get_running_loop()
    local_port = line.getsockname()[1]
    other = addresses.of_socket(seen.other_host, seen.other_port)
    is_same_family = (other.family == "ip6") == (line.family == socket.AF_INET6)
    is_allowed = may_dial(other)
    if is_allowed and is_same_family and is_dialable(other.host, line.getpeername()[0]):
        patience_s = PUNCH_S if seen.is_hopeful else HOPELESS_S
        direct = await _punch(
            lambda: _socket_on_port(line.family, local_port, is_narrow=other.host in narrow), other, role, patience_s
        )
        if direct is not None:
            sockets.tune(direct, congestion=congestion)
            line.close()
            return Met(direct, other, False)
    if not may_relay:
        raise ValueError("no direct connection came about")
    await loop.sock_sendall(line, intro.RELAY)
    async with asyncio.timeout(RELAY_S):
        if await _read(line, 1) != intro.RELAYED:
            raise ValueError(await _read_refusal(line))
    return Met(line, point, True)


def _socket_on_port(family: int, port: int, *, is_narrow: bool) -> socket.socket:
    raw = sockets.sharing_port(family, port)
    if is_narrow:
        sockets.shorten(raw)
    return raw


async def _punch(
    make: Callable[[], socket.socket], other: Address, role: Role, patience_s: float
) -> socket.socket | None:
    """Dial until the two dials meet, or the other one comes in. ``make`` opens a socket on the port of the line."""
    ways = [asyncio.ensure_future(_dial_often(make, other))]
    if role is Role.LISTENER:
        ways.append(asyncio.ensure_future(_accept_one(make, other)))
    won: socket.socket | None = None
    try:
        pending: set[asyncio.Future[socket.socket | None]] = set(ways)
        async with asyncio.timeout(patience_s):
            while pending and won is None:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                won = next((way.result() for way in done if way.result() is not None), None)
    except TimeoutError:
        pass
    finally:
        for way in ways:
            way.cancel()
        for late in await asyncio.gather(*ways, return_exceptions=True):
            if isinstance(late, socket.socket) and late is not won:
                late.close()
    return won


async def _dial_often(make: Callable[[], socket.socket], other: Address) -> socket.socket | None:
    loop = asyncio.get_running_loop()
    for _ in range(PUNCHES):
        raw = None
        try:
            raw = make()
            await loop.sock_connect(raw, (other.host, other.port))
            return raw
        except OSError:  # refused by a router, or the port still has the last try
            if raw is not None:
                raw.close()
            await asyncio.sleep(PUNCH_PAUSE_S)
        except BaseException:
            if raw is not None:
                raw.close()
            raise
    return None


async def _accept_one(make: Callable[[], socket.socket], other: Address) -> socket.socket | None:
    """Accept a connection from the address of the other peer; others are closed."""
    loop = asyncio.get_running_loop()
    try:
        with make() as listener:
            listener.listen(1)
            for _ in range(PUNCHES):
                raw, _ = await loop.sock_accept(listener)
                if addresses.of_socket(*raw.getpeername()[:2]).host == other.host:
                    return raw
                raw.close()
    except OSError:
        pass  # the port cannot be listened at: dialling goes on
    return None


def is_dialable(host: str, told_by: str) -> bool:
    """Whether a peer may be at ``host``, as told by a meeting point at ``told_by``.

    A meeting point on the internet introduces no peer in a private network, or on this machine."""
    ip, teller = ipaddress.ip_address(host), ipaddress.ip_address(told_by.partition("%")[0])
    if ip.is_multicast or ip.is_unspecified or ip.is_link_local or host == "255.255.255.255":
        return False
    if ip.is_loopback:
        return teller.is_loopback
    return ip.is_global or not teller.is_global


async def _read(line: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes.

    Raises:
        ValueError: the line was closed.
    """
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        piece = await loop.sock_recv(line, count - len(data))
        if not piece:
            raise ValueError("the line was closed: the other peer has gone, or both connected already")
        data += piece
    return data


async def _read_refusal(line: socket.socket) -> str:
    with suppress(ValueError):
        return decode_text(await _read(line, (await _read(line, 1))[0]))
    return "refused without a reason"
