"""One port for peers and for the directory: what begins as libp2p does is handed to its daemon.

Where everything but one port is closed on the way, both must answer there.

Rules of this file:
1. libp2p says the length of its protocol's name first (multistream-select), TLS and lines begin otherwise.
2. Bytes are carried unread, of so many connections at once: of the machine that has most, the first makes room.
3. Nothing came of a connection on which the daemon said hardly more than its own name.
"""

from __future__ import annotations

import asyncio
import socket

from p2pdiloco.nat.rendezvous_server import Relay
from p2pdiloco.net.abuse_limits import Room, machine_of
from p2pdiloco.transport import sockets

FIRST = b"\x13"
CONNECTIONS = 512
OPEN_S = 5.0
ANSWERED_BYTES = 128
"""Of the daemon; its part of a handshake has 250."""


class SharedPort:
    """See the module's rules. ``port``: of this machine's daemon."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._relay = Relay(None)
        self._open: Room[socket.socket] = Room(CONNECTIONS)

    async def carry(self, raw: socket.socket) -> bool:
        """Until it ends; whether anything came of it. ``raw`` is closed then."""
        loop = asyncio.get_running_loop()
        try:
            with raw, socket.socket() as inner:
                host = raw.getpeername()[0].removeprefix("::ffff:")
                if (out := self._open.enter(raw, machine_of(host))) is not None:
                    sockets.hang_up(out)
                inner.setblocking(False)
                async with asyncio.timeout(OPEN_S):
                    await loop.sock_connect(inner, ("127.0.0.1", self._port))
                carried = [0, 0]
                await self._relay.carry(raw, inner, carried)
                return carried[1] >= ANSWERED_BYTES
        except OSError:
            return True  # the daemon restarts: that is nobody's fault
        finally:
            self._open.leave(raw)
