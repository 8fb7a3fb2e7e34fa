"""Connection limits of the page's HTTP server: number of connections, and time per request.

aiohttp itself keeps a connection with a half-sent request for an hour. Rules of this file:
1. A request's headers, its answer, and the pause until the next request each have ``PageLimits.stage_s``. Then the
   connection is aborted. Bytes that complete nothing do not extend it.
2. The number of connections without an open stream is limited. A new one replaces the oldest of the remote machine that
   has most (``net/abuse_limits.py``), so a client that floods the page takes places from itself.
3. The page uses at most a sixteenth of the process's file descriptors. The others are for the peer's own connections.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import cast

from aiohttp import web
from msgspec import Struct

from p2pdiloco.net.abuse_limits import Room, machine_of

# Client of a stream that this process's own user has opened.
OWN_USER = "own user"
# The page may use one in this many of the process's file descriptors.
PAGE_SHARE = 16


class PageLimits(Struct, frozen=True, kw_only=True):
    """Limits on the clients of the page."""

    connections: int = 64
    """Maximum connections without an open stream. A browser opens at most six."""
    stage_s: float = 30.0
    """Seconds for a request's headers, for its answer, and for the pause until the next request."""

    def places(self) -> int:
        """Return ``connections``, or fewer if the process may open few descriptors (``RLIMIT_NOFILE``)."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self.connections if soft == resource.RLIM_INFINITY else max(1, min(self.connections, soft // PAGE_SHARE))


class PageConnections:
    """The connections of one server. ``accept`` is the protocol factory of the listener."""

    def __init__(self, server: web.Server, limits: PageLimits) -> None:
        self._server = server
        self._stage_s = limits.stage_s
        self._waiting: Room[PageConnection] = Room(limits.places())
        self._by_handler: dict[web.RequestHandler, PageConnection] = {}

    def accept(self) -> PageConnection:
        """Return the protocol for a new socket."""
        handler = self._server()
        self._by_handler[handler] = connection = PageConnection(self, handler, self._stage_s)
        return connection

    def of(self, request: web.Request) -> PageConnection:
        """Return the connection of ``request``; if it is closed already, a connection that does nothing."""
        handler = request.protocol
        return self._by_handler.get(handler) or PageConnection(self, handler, self._stage_s)

    def wait(self, connection: PageConnection) -> None:
        """Count a connection without an open stream. It may replace another one."""
        out = self._waiting.enter(connection, connection.machine)
        if out is not None:
            out.abort()

    def stream(self, connection: PageConnection) -> None:
        """Stop counting a connection that has opened a stream. The server limits streams by their number and client.

        Each event that is sent restarts the connection's timer."""
        self._waiting.leave(connection)

    def remove(self, connection: PageConnection) -> None:
        """Forget a closed connection."""
        self._waiting.leave(connection)
        self._by_handler.pop(connection.handler, None)


def client_of(peer: tuple[str, int], here: tuple[str, int]) -> str:
    """Return the client that a connection from ``peer`` to ``here`` counts for: on loopback the user, else the machine.

    Blocks on the kernel's table of connections, which may be long.
    """
    machine = machine_of(peer[0])
    if not machine or not ip_address(peer[0].partition("%")[0]).is_loopback:
        return machine
    table, ends = ("tcp6" if ":" in peer[0] else "tcp"), [_hexadecimal(*peer[:2]), _hexadecimal(*here[:2])]
    with suppress(OSError), Path(f"/proc/net/{table}").open() as file:
        for line in file:
            if ends == (fields := line.split())[1:3]:
                return OWN_USER if int(fields[7]) == os.getuid() else f"user {fields[7]}"
    return machine


def _hexadecimal(host: str, port: int) -> str:
    """Return an address as the kernel writes it: words of 32 bits, least significant byte first on most machines."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"


class PageConnection(asyncio.Protocol):
    """One connection: passes events on to aiohttp's ``handler``, until the time is over."""

    def __init__(self, connections: PageConnections, handler: web.RequestHandler, stage_s: float) -> None:
        self.handler = handler
        self.machine = ""
        self._connections = connections
        self._stage_s = stage_s
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def begin_stage(self) -> None:
        """Restart the timer, because a stage was completed."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            self._deadline = asyncio.get_running_loop().call_later(self._stage_s, self.abort)

    def close_stream(self) -> None:
        """Note that the stream has ended. The connection may send another request."""
        if self._transport is not None:
            self._connections.wait(self)

    def abort(self) -> None:
        """Close at once, and discard queued data."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As of ``asyncio.Protocol``."""
        self._transport = cast(asyncio.Transport, transport)
        where = transport.get_extra_info("peername")
        self.machine = machine_of(where[0]) if where else ""
        self.handler.connection_made(transport)
        self._connections.wait(self)
        self.begin_stage()

    def connection_lost(self, exc: Exception | None) -> None:
        """As of ``asyncio.Protocol``."""
        self._transport = None
        if self._deadline is not None:
            self._deadline.cancel()
        self._connections.remove(self)
        self.handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As of ``asyncio.Protocol``."""
        self.handler.data_received(data)

    def pause_writing(self) -> None:
        """As of ``asyncio.Protocol``."""
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        """As of ``asyncio.Protocol``."""
        self.handler.resume_writing()
