"""Without root: TCP relays that shape in this process what passes them, one for each site as seen from each other.

Rules of this file:
1. A command "in site a" reaches site b's server through the relay from a to b; that is how the relay knows who talks.
   Lines are shared as real ones are: all that leaves a goes through a's one line up, whoever it is for.
2. TCP ends here and begins anew, so losses and their effects on TCP are not shown, and an end's round trip as its
   kernel sees it is that of loopback. Rates, delays and jitter that a program sees are right, and are measured.
3. Bytes count as much as they would on a wire: a full segment's payload costs a full packet.
4. What waits is bounded: a sender beyond that is not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import statistics
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from functools import partial
from types import TracebackType
from typing import Self

from benchmarks.netbed.qdisc import PACKET_BYTES
from benchmarks.netbed.topology import Topology
from benchmarks.netbed.verification import OFFERED, Check, down_flows, path_checks, rate_check, up_flows

HOST = "127.0.0.1"
SEGMENT_BYTES = 1448
WIRE = PACKET_BYTES / SEGMENT_BYTES
CHUNK_S = 0.002
CHUNK_BYTES = (SEGMENT_BYTES, 1 << 16)
HELD_BYTES = 1 << 20
"""In one direction of a connection, on top of what the path itself holds."""
ECHOES = 11
MEASURE_S = 0.9
WARM_S = 0.5

Way = tuple[int, int]


class Line:
    """One direction of a site's line; time is a number."""

    def __init__(self, bps: float) -> None:
        self._bytes_per_s = bps / 8
        self.free_s = 0.0
        """When it will have carried all that it was given."""

    def carry(self, now_s: float, payload_bytes: int) -> float:
        """When that has passed, given now."""
        self.free_s = max(now_s, self.free_s) + payload_bytes * WIRE / self._bytes_per_s
        return self.free_s


class InProcess:
    """All relays of a topology; ``ports`` are known inside ``async with``."""

    def __init__(self, topology: Topology, servers: Mapping[int, tuple[str, int]], seed: int = 1) -> None:
        self._topology = topology
        self._servers = servers
        self._ups = [Line(site.up_bps) for site in topology.sites]
        self._downs = [Line(site.down_bps) for site in topology.sites]
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[asyncio.Server] = []
        self.ports: dict[Way, int] = {}
        """Where on this host the second site's server is reached from the first."""

    async def __aenter__(self) -> Self:
        for target in self._servers:
            for source in range(len(self._topology.sites)):
                if source != target:
                    way = (source, target)
                    listener = await asyncio.start_server(partial(self._accepted, way), HOST, 0)
                    self._listeners.append(listener)
                    self.ports[way] = listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners:
            listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._relay(way, reader, writer)
        finally:
            self._tasks.discard(task)

    async def _relay(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source, target = way
        with contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                far_reader, far_writer = await asyncio.open_connection(*self._servers[target])
            except OSError:
                writer.transport.abort()
                return
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pipe(source, target, reader, far_writer))
                    group.create_task(self._pipe(target, source, far_reader, writer))
            except* OSError:
                pass
            finally:
                far_writer.transport.abort()
                writer.transport.abort()

    async def _pipe(self, i: int, j: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction of one connection, until its end."""
        waiting: deque[tuple[float, bytes]] = deque()
        news = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take(i, j, reader, waiting, news))
            group.create_task(self._give(j, writer, waiting, news))

    async def _take(
        self, i: int, j: int, reader: asyncio.StreamReader, waiting: deque[tuple[float, bytes]], news: asyncio.Event
    ) -> None:
        up, site, route = self._ups[i], self._topology.sites[i], self._topology.path(i, j)
        least, most = CHUNK_BYTES
        chunk = int(min(max(site.up_bps / 8 * CHUNK_S, least), most))
        bound = HELD_BYTES + site.up_bps / 8 * (route.round_trip_s + site.queue_s)
        last = 0.0
        while True:
            while up.free_s - time.monotonic() > site.queue_s or sum(len(data) for _, data in waiting) > bound:  # noqa: ASYNC110  (time)
                await asyncio.sleep(CHUNK_S)
            data = await reader.read(chunk)
            now = time.monotonic()
            arrives = up.carry(now, len(data)) + route.round_trip_s / 2
            last = max(last, arrives + self._random.uniform(-route.jitter_s, route.jitter_s))
            waiting.append((last, data))
            news.set()
            if not data:
                return

    async def _give(
        self, j: int, writer: asyncio.StreamWriter, waiting: deque[tuple[float, bytes]], news: asyncio.Event
    ) -> None:
        down = self._downs[j]
        while True:
            while not waiting:
                news.clear()
                await news.wait()
            arrives, data = waiting[0]
            await _until(arrives)
            await _until(down.carry(arrives, len(data)))
            waiting.popleft()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


async def verify_in_process(topology: Topology) -> AsyncIterator[Check]:
    """Measure relays of that topology: echoes on each path, TCP on each line."""
    sinks = [_Sink() for _ in topology.sites]
    servers = {i: (HOST, await sink.open()) for i, sink in enumerate(sinks)}
    try:
        async with InProcess(topology, servers) as network:
            for (i, j), route in topology.paths.items():
                where = f"{topology.sites[i].name}-{topology.sites[j].name}"
                found = await _echoes(network.ports[i, j])
                for check in path_checks(where, route.round_trip_s, route.jitter_s, route.loss, found, ECHOES):
                    if check.kind != "jitter":  # too few echoes
                        yield check
            for i in range(len(topology.sites)):
                ways, _ = up_flows(topology, i)
                carried = min(topology.sites[i].up_bps, sum(flow.bps for flow in ways) / OFFERED)
                measured = await _filled([network.ports[i, flow.target] for flow in ways], sinks)
                yield rate_check(topology, i, "up", carried, measured)
                ways, _ = down_flows(topology, i)
                others = sum(topology.sites[j].up_bps for j in range(len(topology.sites)) if j != i)
                carried = min(topology.sites[i].down_bps, others)
                measured = await _filled([network.ports[flow.source, i] for flow in ways], sinks)
                yield rate_check(topology, i, "down", carried, measured)
    finally:
        for sink in sinks:
            sink.close()


class _Sink:
    """A server that answers single bytes and counts the rest."""

    def __init__(self) -> None:
        self.bytes = 0

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._accepted, HOST, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        self._server.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18):
                self.bytes += len(data)
                if len(data) == 1:
                    writer.write(data)
        writer.transport.abort()


async def _echoes(port: int) -> list[float]:
    reader, writer = await asyncio.open_connection(HOST, port)
    found = []
    for _ in range(ECHOES):
        begin = time.monotonic()
        writer.write(b"x")
        await reader.readexactly(1)
        found.append(time.monotonic() - begin)
    writer.transport.abort()
    return found


async def _filled(ports: list[int], sinks: list[_Sink]) -> float:
    """Bits per second on the wire through all these relays at once; the median of several moments."""

    async def push(port: int) -> None:
        _, writer = await asyncio.open_connection(HOST, port)
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # what is under way is dropped
        try:
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()
        finally:
            writer.transport.abort()

    tasks = [asyncio.create_task(push(port), name=f"filling {port}") for port in ports]
    try:
        await asyncio.sleep(WARM_S)
        rates = []
        for _ in range(3):
            begin, before = time.monotonic(), sum(sink.bytes for sink in sinks)
            await asyncio.sleep(MEASURE_S / 3)
            rates.append((sum(sink.bytes for sink in sinks) - before) / (time.monotonic() - begin))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(WARM_S / 2)
    return statistics.median(rates) * 8 * WIRE


async def _until(when: float) -> None:
    if (left := when - time.monotonic()) > 0:
        await asyncio.sleep(left)
