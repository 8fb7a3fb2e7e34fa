"""The network of a chaos run: a TCP relay before each peer, whose address the peer announces.

Rules of this file:
1. Every data connection to a peer passes its relay, so links can be cut, slowed, spoilt and reset without being root.
   (The directory's own connections do not: who looks there finds addresses that do not answer.)
2. A link is a pair (who speaks, who hears). Quality is a link's, not a connection's: a new connection over a cut link
   is accepted and carries nothing.
3. A cut link loses nothing: like TCP over a dead path, what was under way goes on when the path is back. Corruption
   flips a bit of each of the next pieces.
4. What waits in a relay is bounded; a sender beyond that is not read.
5. A connection may go dead one way (``deafen``): then that is the connection's, and lasts as long as it does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable
from types import TracebackType
from typing import Self

READ_BYTES = 1 << 16
HELD_BYTES = 1 << 20
"""Bytes that the relay buffers for one direction of a connection."""
STRANGER = "?"
"""The sender where it is unknown: a peer that has just ended, or a process from outside."""
_FLIP = 0x10


class Link:
    """The state of the link from one peer to another."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.spoil = 0
        """Pieces that are still to be spoilt."""
        self.carried = 0
        self.spoilt = 0
        self._cuts = 0
        self.is_open = asyncio.Event()
        self.is_open.set()

    def cut(self) -> None:
        """Carry nothing until as often mended as cut."""
        self._cuts += 1
        self.is_open.clear()

    def mend(self) -> None:
        """One cut less."""
        self._cuts = max(0, self._cuts - 1)
        if not self._cuts:
            self.is_open.set()


class _Pipe:
    """One direction of one connection: read, hold as long as the link wants, write."""

    def __init__(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.is_dead = False
        """This connection is dead, even if the link is mended."""
        self._link = link
        self._reader = reader
        self._writer = writer
        self._held: deque[tuple[float, bytes]] = deque()
        self._held_bytes = 0
        self._changed = asyncio.Event()
        self._free_at = 0.0

    async def run(self) -> None:
        """Forward until the end of the stream, or until either side fails."""
        reading = asyncio.create_task(self._read(), name="relay: read")
        try:
            await self._write()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self) -> None:
        loop, link = asyncio.get_running_loop(), self._link
        data = b"?"
        while data:
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError:
                data = b""
            now = loop.time()
            pace = len(data) / link.bytes_per_s if link.bytes_per_s else 0.0
            self._free_at = max(now, self._free_at if link.bytes_per_s else 0.0) + pace
            self._held.append((self._free_at + link.delay_s, data))
            self._held_bytes += len(data)
            self._changed.set()
            while self._held_bytes > HELD_BYTES:
                self._changed.clear()
                await self._changed.wait()

    async def _write(self) -> None:
        loop, link = asyncio.get_running_loop(), self._link
        while True:
            while not self._held:
                self._changed.clear()
                await self._changed.wait()
            due, data = self._held[0]
            await asyncio.sleep(max(0.0, due - loop.time()))
            await link.is_open.wait()
            if self.is_dead:
                await asyncio.Event().wait()  # until the other direction ends
            self._held.popleft()
            self._held_bytes -= len(data)
            self._changed.set()
            if not data:
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                return
            if link.spoil:
                link.spoil -= 1
                link.spoilt += 1
                data = bytes([*data[:-1], data[-1] ^ _FLIP])
            self._writer.write(data)
            await self._writer.drain()
            link.carried += len(data)


class _Relay:
    """Before one peer."""

    def __init__(self, network: Network, peer: str, host: str, target: int) -> None:
        self._network = network
        self._peer = peer
        self._host = host
        self._target = target
        self._server: asyncio.Server | None = None
        self.port = 0
        self.connections: dict[asyncio.Task[None], str] = {}
        """Each with the peer that dialled."""
        self.pipes: dict[asyncio.Task[None], dict[str, _Pipe]] = {}
        """By the sender."""

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._on_accept, self._host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self.connections):
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    async def _on_accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        dialler = self._network.whose(writer.get_extra_info("peername")[1]) or STRANGER
        self.connections[task] = dialler
        onward: asyncio.StreamWriter | None = None
        try:
            back, onward = await asyncio.open_connection(self._host, self._target)
            self.pipes[task] = {
                dialler: _Pipe(self._network.link(dialler, self._peer), reader, onward),
                self._peer: _Pipe(self._network.link(self._peer, dialler), back, writer),
            }
            async with asyncio.TaskGroup() as running:
                for pipe in self.pipes[task].values():
                    running.create_task(pipe.run())
        except* (OSError, RuntimeError):
            pass  # nobody listens there now, or one side is gone: the other learns it
        except* asyncio.CancelledError:
            pass  # reset by a fault, or the run is over
        finally:
            del self.connections[task]
            self.pipes.pop(task, None)
            for end in (writer, onward):
                if end is not None:
                    with contextlib.suppress(OSError, RuntimeError):
                        end.transport.abort()


class Network:
    """All relays and links. ``whose`` names the peer that holds a local port, if one does."""

    def __init__(self, targets: dict[str, int], whose: Callable[[int], str | None], host: str = "127.0.0.1") -> None:
        self.whose = whose
        self._relays = {peer: _Relay(self, peer, host, port) for peer, port in targets.items()}
        self._links: dict[tuple[str, str], Link] = {}

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            OSError: no port is free.
        """
        for relay in self._relays.values():
            await relay.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for relay in self._relays.values():
            await relay.close()

    def port(self, peer: str) -> int:
        """The port of the relay before ``peer``."""
        return self._relays[peer].port

    def link(self, speaker: str, hearer: str) -> Link:
        """From one to the other."""
        return self._links.setdefault((speaker, hearer), Link())

    def between(self, some: Collection[str], *, from_them: bool = True, to_them: bool = True) -> list[Link]:
        """The links between ``some`` and everybody else."""
        others = [name for name in (*self._relays, STRANGER) if name not in some]
        found = [self.link(a, b) for a in some for b in others if from_them]
        return found + [self.link(b, a) for a in some for b in others if to_them]

    def reset(self, peer: str) -> int:
        """Reset every connection of ``peer``; how many there were."""
        hit = [
            task
            for name, relay in self._relays.items()
            for task, dialler in relay.connections.items()
            if peer in (name, dialler)
        ]
        for task in hit:
            task.cancel()
        return len(hit)

    def deafen(self, peer: str) -> int:
        """What ``peer`` says on the connections that it has now goes nowhere; how many there were. Those that are dead
        the other way are left alone: dead both ways is the kernel's to notice."""
        its = [pipes for relay in self._relays.values() for pipes in relay.pipes.values() if peer in pipes]
        hit = [pipes[peer] for pipes in its if not any(pipe.is_dead for pipe in pipes.values())]
        for pipe in hit:
            pipe.is_dead = True
        return len(hit)

    @property
    def spoilt(self) -> int:
        """Pieces spoilt so far."""
        return sum(link.spoilt for link in self._links.values())


def slow_down(links: Iterable[Link], delay_s: float, bytes_per_s: float | None) -> None:
    """Set both; 0 and None are a clean link."""
    for link in links:
        link.delay_s, link.bytes_per_s = delay_s, bytes_per_s
