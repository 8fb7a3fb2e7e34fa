"""One port for peers and for the directory: what begins as libp2p does is handed to its daemon.

Where everything but one port is closed on the way, both must answer there.

Rules of this file:
1. libp2p says the length of its protocol's name first (multistream-select), TLS and lines begin otherwise.
2. Bytes are carried unread, of so many connections at once; more are hung up on.
"""

from __future__ import annotations

import asyncio
import socket

from p2pdiloco.runtime.relay import Relay

FIRST = b"\x13"
CONNECTIONS = 512
OPEN_S = 5.0


class SharedPort:
    """See the module's rules. ``port``: of this machine's daemon."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._relay = Relay(None)
        self._open = 0

    async def carry(self, raw: socket.socket) -> None:
        """Until it ends. ``raw`` is closed then."""
        loop = asyncio.get_running_loop()
        self._open += 1
        try:
            with raw, socket.socket() as inner:
                if self._open > CONNECTIONS:
                    return
                inner.setblocking(False)
                async with asyncio.timeout(OPEN_S):
                    await loop.sock_connect(inner, ("127.0.0.1", self._port))
                await self._relay.carry(raw, inner)
        except OSError:
            pass  # the daemon restarts, or one of the two has gone: the other side sees that
        finally:
            self._open -= 1
