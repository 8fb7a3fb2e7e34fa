"""Ways for the libp2p daemon to nodes behind a path that loses long packets.

The daemon cannot use short TCP segments. So it dials a port of this machine instead, from where its bytes are relayed
over a connection that does.

Rules of this file:
1. The connection is made before the daemon is told of the way. So it is ahead of the daemon's own attempts to reach
   the same node directly.
2. Each address has a port of its own on the loopback interface, at most DETOURS in all; the one that was asked for
   least recently is closed first.
3. Bytes are relayed without reading them. libp2p proves the node's identity end to end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from p2pdiloco.nat.rendezvous_server import Relay
from p2pdiloco.transport import addresses, sockets
from p2pdiloco.transport.connection_setup import connect
from p2pdiloco.transport.narrow_paths import NarrowPaths
from p2pdiloco.transport.sockets import DialError
from p2pdiloco.util import logs
from p2pdiloco.util.tasks import Tasks

log = logs.get("directory")

DETOURS = 64
OPEN_S = 10.0
# Pause after this machine ran out of file descriptors.
ACCEPT_PAUSE_S = 0.5
# How long a probe waits for an acknowledgement, which leaves room for repetitions of a lost packet.
PROBE_S, PROBE_ROUND_TRIPS, PROBE_LOOK_S = 4.0, 10, 0.05
# What libp2p nodes say first.
GREETING = b"\x13/multistream/1.0.0\n"


async def loses_long_packets(address: str) -> bool:
    """Return whether the path to a node loses a packet of full length, and not a short one before it.

    False also if the short one takes PROBE_S, since the path is then slow or broken.
    """
    loop, limit_s = asyncio.get_running_loop(), PROBE_S
    with suppress(OSError, DialError):
        async with asyncio.timeout(PROBE_S):
            raw = await connect(addresses.parse(address), congestion="")
        with raw:
            if not hasattr(socket, "TCP_INFO"):
                return True  # not Linux: it cannot be told
            for data in (GREETING, bytes(raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))):
                began, before = loop.time(), _acked_bytes(raw)
                await loop.sock_sendall(raw, data)
                while _acked_bytes(raw) == before:
                    if loop.time() - began > limit_s:
                        return data is not GREETING
                    await asyncio.sleep(PROBE_LOOK_S)
                limit_s = max(PROBE_S, PROBE_ROUND_TRIPS * (loop.time() - began))
    return False


def _acked_bytes(raw: socket.socket) -> int | None:
    """Return the acknowledged bytes of a connection; None if it is over, or the kernel does not count them."""
    path = sockets.path_of(raw)
    return None if path is None else path.acked_bytes


class Detours:
    """Ports of this machine that lead to other addresses over short segments. An async context manager."""

    def __init__(self) -> None:
        # Port and task for each address, the one that was asked for least recently first.
        self._ways: dict[str, tuple[int, asyncio.Task[None]]] = {}
        # A connection to each address that waits for the daemon's.
        self._spare: dict[str, socket.socket] = {}
        self._relay = Relay(None)
        self._narrow = NarrowPaths(everywhere=True)
        self._tasks = Tasks()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for unused in self._spare.values():
            unused.close()
        self._spare.clear()
        self._ways.clear()
        await self._tasks.__aexit__(None, None, None)

    async def to(self, where: Sequence[str]) -> list[str]:
        """Return multiaddrs on this machine that lead to those of the addresses ``where`` that can be connected.

        Raises:
            OSError: no port or file descriptor is free.
        """
        connected = await asyncio.gather(*map(self._open, where))
        return [self._way(text, raw) for text, raw in zip(where, connected, strict=True) if raw is not None]

    async def _open(self, address: str) -> socket.socket | None:
        with suppress(OSError, DialError, TimeoutError):
            async with asyncio.timeout(OPEN_S):
                return await connect(addresses.parse(address), congestion="", narrow=self._narrow)
        return None

    def _way(self, address: str, onward: socket.socket) -> str:
        """Return the multiaddr whose next connection is relayed to ``onward``, a connection to ``address``."""
        if (unused := self._spare.pop(address, None)) is not None:
            unused.close()
        self._spare[address] = onward
        if address not in self._ways:
            if len(self._ways) >= DETOURS:
                oldest = next(iter(self._ways))
                self._ways.pop(oldest)[1].cancel()
                if (unused := self._spare.pop(oldest, None)) is not None:
                    unused.close()
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            accepting = self._tasks.spawn(self._accept_all(listener, address), name=f"detour to {address}")
            self._ways[address] = (listener.getsockname()[1], accepting)
        self._ways[address] = port, _ = self._ways.pop(address)
        return f"/ip4/127.0.0.1/tcp/{port}"

    async def _accept_all(self, listener: socket.socket, address: str) -> None:
        """Relay what comes in, until the detour is closed. If this fails, the next ``to`` makes a new detour."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    raw, _ = await loop.sock_accept(listener)
                except OSError as error:
                    log.warning("cannot accept a connection of the libp2p daemon", error=error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                self._tasks.spawn(self._carry(raw, address), name=f"relay to {address}")
        finally:
            listener.close()
            if address in self._ways and self._ways[address][1] is asyncio.current_task():
                del self._ways[address]

    async def _carry(self, raw: socket.socket, address: str) -> None:
        """Relay the daemon's connection ``raw`` until it ends, and close it."""
        with raw, suppress(OSError):
            onward = self._spare.pop(address, None) or await self._open(address)
            if onward is not None:
                with onward:
                    await self._relay.carry(raw, onward, [0, 0])
