"""Port multiplexer: peers and the directory share one port; libp2p connections are passed to its daemon.

Some networks let only one port through, so both must answer there.

Rules of this file:
1. A libp2p connection begins with the length of its protocol's name (multistream-select). TLS and the lines of a
   rendezvous (nat/messages.py) begin with other bytes.
2. Bytes are relayed without reading them. If there are too many connections, the host with the most loses its oldest.
3. A connection on which the daemon sent hardly more than its own protocol name counts as failed.
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
# Minimum number of bytes from the daemon in a successful connection. Its part of a handshake has 250.
ANSWERED_BYTES = 128


class SharedPort:
    """Relays connections to the libp2p daemon, which listens on ``port`` of this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._relay = Relay(None)
        self._open: Room[socket.socket] = Room(CONNECTIONS)

    async def carry(self, raw: socket.socket) -> bool:
        """Relay ``raw`` until it ends, and close it. Return whether the connection succeeded."""
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
            return True  # the daemon is restarting, which must not count against the remote host
        finally:
            self._open.leave(raw)
