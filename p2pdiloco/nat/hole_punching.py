"""TCP hole punching: connect to a peer behind NAT with the help of a rendezvous server, or relay through that server.

Each peer opens a *line*, a TCP connection to the rendezvous server (nat/messages.py).

Rules of this file:
1. Simultaneous open: each peer dials the other from the local port of its line, at the address that the server observed
   for the other. The peer with the listener role also listens on that port, since one of the dials may arrive as a
   normal connection. The line stays open meanwhile, which keeps the router's mapping alive.
2. The address given by the server is only a hint. One address is dialled, at most PUNCHES times in PUNCH_S seconds. It
   must be plausible (``is_dialable``) and within the caller's budget (``may_dial``).
3. The other end proves its key afterwards, as on any connection (net/handshake.py).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial

from p2pdiloco.nat import messages as intro
from p2pdiloco.net.frames import decode_text
from p2pdiloco.net.handshake import Role
from p2pdiloco.transport import addresses, sockets
from p2pdiloco.transport.addresses import Address
from p2pdiloco.transport.connection_setup import Met
from p2pdiloco.transport.sockets import DialError
from p2pdiloco.wire.control_messages import decode_as

# Timeout for connecting to the rendezvous server.
OPEN_S = 5.0
# Timeout for the other peer to open its line.
SEEN_S = 12.0
PUNCH_S = 2.0
# Replaces PUNCH_S if a router changes ports. Punching rarely works then, but the router may map ports predictably.
HOPELESS_S = 0.5
PUNCHES = 12
PUNCH_PAUSE_S = 0.05
RELAY_S = 6.0


# Called once, with the address that the rendezvous server observed for the other peer.
MayDial = Callable[[Address], bool]


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
    """Open a line to the rendezvous server ``point`` and connect to the peer that holds the matching ticket.

    role: role of this peer in the resulting connection.
    narrow: hosts to which TCP segments must be short.

    Raises:
        DialError: no connection was established; the message gives the reason.
    """
    line = await _open(point, congestion, narrow)
    try:
        seen = await _wait_for_other(line, ticket)
        other = addresses.of_socket(seen.other_host, seen.other_port)
        is_same_family = (other.family == "ip6") == (line.family == socket.AF_INET6)
        if may_dial(other) and is_same_family and is_dialable(other.host, line.getpeername()[0]):
            make = partial(sockets.sharing_port, line.family, line.getsockname()[1], is_narrow=other.host in narrow)
            direct = await _punch(make, other, role, PUNCH_S if seen.is_hopeful else HOPELESS_S)
            if direct is not None:
                sockets.tune(direct, congestion=congestion)
                line.close()
                return Met(direct, other, False)
        if not may_relay:
            raise ValueError("hole punching failed, and relaying is not allowed")
        await asyncio.get_running_loop().sock_sendall(line, intro.RELAY)
        async with asyncio.timeout(RELAY_S):
            if await _read(line, 1) != intro.RELAYED:
                raise ValueError(await _read_refusal(line))
        return Met(line, point, True)
    except TimeoutError:
        line.close()
        raise DialError(f"rendezvous server {point}: the other peer did not connect in time") from None
    except (OSError, ValueError) as error:
        line.close()
        raise DialError(f"rendezvous server {point}: {error or type(error).__name__}") from error
    except BaseException:
        line.close()
        raise


async def _open(point: Address, congestion: str, narrow: Container[str]) -> socket.socket:
    """Connect a socket to ``point``. Other sockets may share its local port."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(OPEN_S):
            found = await loop.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)
            line = sockets.sharing_port(found[0][0], 0, is_narrow=found[0][4][0] in narrow)
            try:
                sockets.tune(line, congestion=congestion)
                await loop.sock_connect(line, found[0][4])
            except BaseException:
                line.close()
                raise
            return line
    except TimeoutError:
        raise DialError(f"rendezvous server {point} did not answer within {OPEN_S:g} s") from None
    except OSError as error:
        raise DialError(f"rendezvous server: {sockets.explain(error, point)}") from error


async def _wait_for_other(line: socket.socket, ticket: bytes) -> intro.Seen:
    """Send the ticket and wait until the other peer has opened its line."""
    local_port = line.getsockname()[1]
    await asyncio.get_running_loop().sock_sendall(line, intro.encode_opening(ticket, local_port))
    async with asyncio.timeout(SEEN_S):
        head = await _read(line, 1)
        if head == intro.REFUSED:
            raise ValueError(await _read_refusal(line))
        return decode_as(await _read(line, intro.seen_size(head + await _read(line, 1))), intro.Seen)


async def _punch(
    make: Callable[[], socket.socket], other: Address, role: Role, patience_s: float
) -> socket.socket | None:
    """Dial ``other``, and as the listener also accept; return the first connection, or None after ``patience_s``.

    ``make`` opens a socket on the local port of the line."""
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
        # Both attempts may have succeeded: close the connection that is not used.
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
        except OSError:  # a router refused, or the port is still in use by the previous attempt
            if raw is not None:
                raw.close()
            await asyncio.sleep(PUNCH_PAUSE_S)
        except BaseException:
            if raw is not None:
                raw.close()
            raise
    return None


async def _accept_one(make: Callable[[], socket.socket], other: Address) -> socket.socket | None:
    """Accept a connection from the host of ``other``, and close connections from elsewhere."""
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
        pass  # listening on this port is not possible; dialling continues
    return None


def is_dialable(host: str, told_by: str) -> bool:
    """Return whether ``host``, given by a rendezvous server at ``told_by``, is a plausible address of a peer.

    A server on the internet may not name an address in a private network or on this machine."""
    ip, teller = ipaddress.ip_address(host), ipaddress.ip_address(told_by.partition("%")[0])
    if ip.is_multicast or ip.is_unspecified or ip.is_link_local or host == "255.255.255.255":
        return False
    if ip.is_loopback:
        return teller.is_loopback
    return ip.is_global or not teller.is_global


async def _read(line: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes. Raises ValueError if the line was closed."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        piece = await loop.sock_recv(line, count - len(data))
        if not piece:
            raise ValueError("the server closed the line: the other peer has gone, or both are connected already")
        data += piece
    return data


async def _read_refusal(line: socket.socket) -> str:
    with suppress(ValueError):
        return decode_text(await _read(line, (await _read(line, 1))[0]))
    return "it refused without giving a reason"
