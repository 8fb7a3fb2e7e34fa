"""Dialling and accepting: from a socket to a connection whose other side is proved.

Rules of this file:
1. Strangers are bounded: so many unproved connections, each with a deadline; one log line for each that fails.
2. A dial that fails says why, in a sentence for people.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from p2pdiloco.protocol.identifiers import PeerId
from p2pdiloco.runtime import addresses, logs, sockets
from p2pdiloco.runtime.addresses import Address
from p2pdiloco.runtime.connection import Connection
from p2pdiloco.runtime.limits import TransportLimits
from p2pdiloco.runtime.sockets import DialError, PeerRefused
from p2pdiloco.runtime.tasks import Tasks
from p2pdiloco.runtime.tls import TlsContexts
from p2pdiloco.wire.handshake import HandshakeError, MismatchError, Role

log = logs.get("transport")

ACCEPT_PAUSE_S = 0.2
"""After the machine ran out of file descriptors."""

NewConnection = Callable[[Role, Address, int, bytes], Connection]
"""(our role, the other side's address, lane, bond) -> a connection that is not made yet."""


class Strangers:
    """See the module's rules."""

    def __init__(
        self, new_connection: NewConnection, *, tls: TlsContexts, limits: TransportLimits, tasks: Tasks
    ) -> None:
        self._new_connection = new_connection
        self._tls = tls
        self._limits = limits
        self._tasks = tasks
        self._unproved = 0

    async def dial(self, target: Address, lane: int = 0, bond: bytes = b"") -> PeerId:
        """Connect and prove each other; as a ``lane`` of the connection that ``bond`` names, or in its own right.
        The caller gives the deadline.

        Raises:
            PeerRefused: the other side refused us; its reason.
            DialError: anything else.
        """
        raw = await sockets.connect(target, congestion=self._limits.congestion)
        connection = self._new_connection(Role.DIALLER, target, lane, bond)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: connection,
                sock=raw,
                ssl=self._tls.client,
                server_hostname="",
                ssl_handshake_timeout=self._limits.connection.handshake_s,
                ssl_shutdown_timeout=self._limits.connection.part_s,
            )
            return await asyncio.shield(connection.proved)
        except MismatchError as error:
            raise PeerRefused(f"{target}: {error}") from error
        except HandshakeError as error:
            raise DialError(f"{target}: {error}") from error
        except TimeoutError:
            raise
        except OSError as error:
            raise DialError(f"{target}: {sockets.explain(error, target)}") from error
        finally:
            if connection.remote is None and not connection.is_ending:
                connection.abort("the dial failed")

    async def accept_all(self, listener: socket.socket) -> None:
        """Accept, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                raw, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("cannot accept", error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if self._unproved >= self._limits.handshakes:
                log.warning("dropped a connection: too many are unproved", limit=self._limits.handshakes)
                raw.close()
                continue
            self._unproved += 1
            self._tasks.spawn(self._accept(raw), name="accept one")

    async def _accept(self, raw: socket.socket) -> None:
        where = "unknown"
        connection: Connection | None = None
        limits = self._limits.connection
        try:
            address = addresses.of_socket(*raw.getpeername()[:2])
            where = str(address)
            sockets.tune(raw, congestion=self._limits.congestion)
            connection = self._new_connection(Role.LISTENER, address, 0, b"")
            accepted = connection
            async with asyncio.timeout(2 * limits.handshake_s):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: accepted,
                    raw,
                    ssl=self._tls.server,
                    ssl_handshake_timeout=limits.handshake_s,
                    ssl_shutdown_timeout=limits.part_s,
                )
                await asyncio.shield(connection.proved)
        except (OSError, HandshakeError) as error:
            log.warning("dropped a stranger", address=where, reason=_reason_of(error))
        finally:
            self._unproved -= 1
            if connection is None:
                raw.close()
            elif connection.remote is None and not connection.is_ending:
                connection.abort("the handshake failed")


def _reason_of(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not our TLS ({error.reason})"
    return str(error) or type(error).__name__
