"""Transport between two processes of this machine: throughput and CPU time, budgets, and control under bulk.

    python -m benchmarks.wire.transport --json out/transport.json --plot out/transport.png

- ``throughput``: one pair over loopback at several payload sizes, in turns with a raw blocking TLS socket pair. CPU
  seconds are of both ends together, per GB of payload.
- ``budget``: the largest deviation from an up or down budget over any second while bulk is pending, as the receiver
  counts it (windows of a second that begin every SAMPLE_S).
- ``round trip``: of a request the size of a heartbeat, idle and under bulk at the same budget, and the time of one
  chunk at that budget.

Figures are medians of ``--repeat`` runs; for a deviation the worst is reported too. Loopback has no delay and no loss.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import resource
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import Any, NamedTuple

import uvloop

from benchmarks import bench, record
from benchmarks.wire import plots
from p2pdiloco.net.traffic_shaping import slice_bytes
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.tls import TlsContexts
from p2pdiloco.transport.transport import Answer, Transport, TransportLimits

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
THROUGHPUT_BYTES = 1 << 30
RATES_MBIT = (100, 1000, 2500)
ROUND_TRIP_RATES_MBIT = (10, *RATES_MBIT)
BUDGET_S = 5.0
SETTLE_S = 0.5
SAMPLE_S = 0.02
PINGS = 200
PING_GAP_S = 0.005
BULK = 8 << 20
QUEUED_LEAST = 64 << 20
RAW_SLICE = 256 << 10
GB = 1e9
POLL_S = 0.002
Samples = list[tuple[float, int]]


class Quiet:
    """A handler that takes all and answers at once."""

    def __init__(self) -> None:
        self.messages = 0

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None: ...

    def disconnected(self, peer: PeerId, reason: str) -> None: ...

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> None:
        self.messages += 1

    def admit(self, peer: PeerId, body: bytes, size: int) -> bytes:
        return body

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        return Answer(body)


def open_transport(
    handler: Quiet, up: float | None = None, down: float | None = None
) -> AbstractAsyncContextManager[Transport]:
    limits = TransportLimits(up_bytes_per_s=up, down_bytes_per_s=down)
    listen = "/ip4/127.0.0.1/tcp/0"
    return Transport(Identity.ephemeral(), listen=listen, run="bench", version=1, limits=limits).serve(handler)


# -- the other process -----------------------------------------------------------------------------------------------


def receive(pipe: Pipe, down: float | None) -> None:
    """Listen, count, and tell the counts when asked."""
    uvloop.run(_receive(pipe, down))


async def _receive(pipe: Pipe, down: float | None) -> None:
    loop = asyncio.get_running_loop()
    handler = Quiet()
    samples: deque[tuple[float, int]] = deque(maxlen=int(60 / SAMPLE_S))

    def sample() -> None:
        traffic = transport.traffic()
        samples.append((time.monotonic(), traffic.received_bulk + traffic.received_control))
        loop.call_later(SAMPLE_S, sample)

    async with open_transport(handler, down=down) as transport:
        pipe.send(transport.listen_addresses()[0])
        sample()
        while (question := await loop.run_in_executor(None, pipe.recv)) != "end":
            if question == "messages":
                pipe.send(handler.messages)
            elif question == "cpu":
                pipe.send(cpu_s())
            else:
                pipe.send(list(samples))


def receive_raw(pipe: Pipe) -> None:
    """A raw blocking TLS socket: read all, answer with one byte."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    raw, _ = listener.accept()
    channel = TlsContexts().server.wrap_socket(raw, server_side=True)
    size = pipe.recv()
    before, got, buffer = cpu_s(), 0, memoryview(bytearray(RAW_SLICE))
    while got < size:
        got += channel.recv_into(buffer)
    channel.sendall(b"!")
    pipe.send(cpu_s() - before)
    channel.close()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# -- this process ----------------------------------------------------------------------------------------------------


class Receiver:
    """The other process, and our transport that is connected to it."""

    def __init__(self, pipe: Pipe, transport: Transport, peer: PeerId) -> None:
        self._pipe, self.transport, self.peer = pipe, transport, peer

    async def ask(self, question: str) -> object:
        self._pipe.send(question)
        return await asyncio.get_running_loop().run_in_executor(None, self._pipe.recv)

    async def ask_number(self, question: str) -> float:
        answer = await self.ask(question)
        assert isinstance(answer, int | float)
        return answer

    async def ask_samples(self) -> Samples:
        answer = await self.ask("samples")
        assert isinstance(answer, list)
        return answer

    async def send(self, payload: memoryview) -> None:
        """Queue ``payload`` as soon as there is room."""
        while not self.transport.send(self.peer, b"payload", payload):  # noqa: ASYNC110 - room is not announced
            await asyncio.sleep(POLL_S)

    async def wait_for_messages(self, count: float) -> None:
        while await self.ask_number("messages") < count:  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(POLL_S)

    def feed(self, payload: memoryview) -> None:
        """Keep bulk pending."""
        while self.transport.queued_bytes(self.peer) < QUEUED_LEAST:
            if not self.transport.send(self.peer, b"bulk", payload):
                raise RuntimeError("the connection is lost")


@asynccontextmanager
async def pair(up: float | None = None, down: float | None = None) -> AsyncIterator[Receiver]:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=receive, args=(theirs, down), daemon=True)
    process.start()
    try:
        address = await asyncio.get_running_loop().run_in_executor(None, ours.recv)
        async with open_transport(Quiet(), up=up) as transport:
            yield Receiver(ours, transport, await transport.dial(address))
            ours.send("end")
    finally:
        await asyncio.get_running_loop().run_in_executor(None, process.join, 10)
        process.kill()


async def throughput(size: int) -> tuple[float, float]:
    """Gbit/s and CPU seconds per GB, of both ends."""
    count = THROUGHPUT_BYTES // size
    payload = memoryview(bytearray(size))
    async with pair() as other:
        for warm in (True, False):
            before = await other.ask_number("messages")
            cpu, start = cpu_s() + await other.ask_number("cpu"), time.perf_counter()
            for _ in range(count // 8 if warm else count):
                await other.send(payload)
            await other.wait_for_messages(before + (count // 8 if warm else count))
            passed = time.perf_counter() - start
            cpu = cpu_s() + await other.ask_number("cpu") - cpu
    return count * size * 8 / passed / 1e9, cpu / (count * size / GB)


async def raw_throughput() -> tuple[float, float]:
    """The same of blocking TLS sockets, each in a process of its own."""
    return await asyncio.get_running_loop().run_in_executor(None, _raw_throughput)


def _raw_throughput() -> tuple[float, float]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive_raw, args=(theirs,), daemon=True)
    process.start()
    channel = TlsContexts().client.wrap_socket(socket.create_connection(("127.0.0.1", ours.recv())))
    ours.send(THROUGHPUT_BYTES)
    payload = memoryview(bytearray(RAW_SLICE))
    cpu, start = time.thread_time(), time.perf_counter()
    for _ in range(THROUGHPUT_BYTES // RAW_SLICE):
        channel.sendall(payload)
    channel.recv(1)
    passed, cpu = time.perf_counter() - start, time.thread_time() - cpu
    cpu += ours.recv()
    channel.close()
    process.join(10)
    return THROUGHPUT_BYTES * 8 / passed / 1e9, cpu / (THROUGHPUT_BYTES / GB)


async def budget(rate_mbit: int, direction: str) -> tuple[float, float]:
    """Relative deviation of the mean and of the worst second."""
    rate = rate_mbit * 1e6 / 8
    payload = memoryview(bytearray(BULK))
    async with pair(up=rate if direction == "up" else None, down=rate if direction == "down" else None) as other:
        start = time.monotonic()
        while time.monotonic() < start + SETTLE_S + BUDGET_S:
            other.feed(payload)
            await asyncio.sleep(0.05)
        samples = [entry for entry in await other.ask_samples() if start + SETTLE_S <= entry[0] < start + 5.5]
    mean = (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])
    return mean / rate - 1.0, max((value / rate - 1.0 for value in seconds(samples)), key=abs)


def seconds(samples: Samples) -> list[float]:
    """Bytes per second over every window of at least a second."""
    found, end = [], 0
    for begin, (at, count) in enumerate(samples):
        while end < len(samples) and samples[end][0] < at + 1.0:
            end += 1
        if end == len(samples):
            break
        found.append((samples[end][1] - count) / (samples[end][0] - at))
        assert end > begin
    return found


async def round_trip(rate_mbit: int | None) -> tuple[float, float]:
    """Median milliseconds idle and under bulk."""
    rate = rate_mbit * 1e6 / 8 if rate_mbit is not None else None
    payload = memoryview(bytearray(BULK))
    async with pair(up=rate) as other:
        await ping(other, None)
        idle = await ping(other, None)
        busy = await ping(other, payload)
    return idle, busy


async def ping(other: Receiver, payload: memoryview | None) -> float:
    times = []
    for _ in range(PINGS):
        if payload is not None:
            other.feed(payload)
        start = time.perf_counter()
        await other.transport.request(other.peer, bytes(64), timeout_s=10.0)
        times.append((time.perf_counter() - start) * 1e3)
        await asyncio.sleep(PING_GAP_S)
    return median(times)


# -- the tables ------------------------------------------------------------------------------------------------------


Rows = list[record.Row]


async def throughput_rows(options: argparse.Namespace) -> Rows:
    runs: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.repeat):
        runs.setdefault("raw", []).append(await raw_throughput())
        for size in SIZES:
            runs.setdefault(str(size), []).append(await throughput(size))
    return [
        bench.write(
            options,
            "transport throughput",
            {"payload_bytes": name},
            {"gbit_per_s": median(v[0] for v in values), "cpu_s_per_gb": median(v[1] for v in values)},
        )
        for name, values in runs.items()
    ]


async def budget_rows(options: argparse.Namespace) -> Rows:
    rows: Rows = []
    for rate, direction in itertools.product(RATES_MBIT, ("up", "down")):
        runs = [await budget(rate, direction) for _ in range(options.repeat)]
        worst = sorted((run[1] for run in runs), key=abs)
        found = {"mean": median(run[0] for run in runs)}
        found |= {"worst_second": worst[len(worst) // 2], "worst_of_all": worst[-1]}
        settings = {"mbit_per_s": rate, "direction": direction}
        rows.append(bench.write(options, "transport budget", settings, found))
    return rows


async def round_trip_rows(options: argparse.Namespace) -> Rows:
    rows: Rows = []
    for rate in (*ROUND_TRIP_RATES_MBIT, None):
        runs = [await round_trip(rate) for _ in range(options.repeat)]
        idle, busy = median(run[0] for run in runs), median(run[1] for run in runs)
        chunk = None if rate is None else slice_bytes(rate * 1e6 / 8) / (rate * 1e6 / 8) * 1e3
        bound = None if chunk is None else 1.5 * idle + chunk
        found = {"idle_ms": idle, "bulk_ms": busy, "chunk_ms": chunk, "bound_ms": bound}
        rows.append(bench.write(options, "transport round trip", {"up_mbit_per_s": rate}, found))
    return rows


class Part(NamedTuple):
    """One of the benchmark's tables."""

    measure: Callable[[argparse.Namespace], Awaitable[Rows]]
    name: Callable[[Any], str]
    """Of a row, by its settings."""
    columns: tuple[bench.Column, ...]


PARTS = {
    "throughput": Part(
        throughput_rows,
        lambda s: plots.size_name(s["payload_bytes"]),
        (("Gbit/s", "gbit_per_s", ".2f"), ("CPU s/GB", "cpu_s_per_gb", ".2f")),
    ),
    "budget": Part(
        budget_rows,
        lambda s: f"{s['mbit_per_s']} Mbit/s {s['direction']}",
        (("mean", "mean", "+.2%"), ("worst second", "worst_second", "+.2%"), ("of all", "worst_of_all", "+.2%")),
    ),
    "round-trip": Part(
        round_trip_rows,
        lambda s: "no budget" if s["up_mbit_per_s"] is None else f"up {s['up_mbit_per_s']} Mbit/s",
        (("idle ms", "idle_ms", ".3f"), ("bulk ms", "bulk_ms", ".3f"), ("1.5 idle + chunk", "bound_ms", ".3f")),
    ),
}


async def measure(options: argparse.Namespace) -> Rows:
    rows: Rows = []
    for name in options.only or PARTS:
        found = await PARTS[name].measure(options)
        print(bench.table(name, PARTS[name].columns, {PARTS[name].name(r["settings"]): r["figures"] for r in found}))
        rows += found
    return rows


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each measurement")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure only this part; may be repeated")
    options = parser.parse_args()
    rows = uvloop.run(measure(options))
    if options.plot is not None:
        plots.transport(options.plot, rows)


if __name__ == "__main__":
    main()
