"""Training speed, memory and join time of a private run while one of its peers is flooded.

    python -m benchmarks.hostile.flood                       # 10,000 connections from 250 addresses, 30 s per phase
    python -m benchmarks.hostile.flood --connections 300 --identities 16 --seconds 8     # quick check that it works
    python -m benchmarks.hostile.flood --apart --rounds 3    # the flooded peer has a core to itself

A quarter of the connections is silent, a quarter sends a byte per second, a quarter garbage, and a quarter begins like
a connection to a meeting point; all reconnect. Strangers with fresh identities greet from one further address as fast
as they are refused. The directory is not flooded.

The flood comes from this machine and takes the peers' processors, which explains most of the lost step rate. Therefore
one phase floods another node (a bootstrap node): the cost is the difference between that phase and a flood of the peer
itself. Phases alternate, and a rate is the median of its phases; the flooded node's share of a processor is reported
too. With ``--apart`` the flooded peer is alone in its run and on its core, and on the other core everything gives way
to the newcomer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import psutil

from benchmarks import bench
from p2pdiloco.access.invite_code import decode_invite
from p2pdiloco.demo.local_swarm import LOOPBACK, Member, Swarm
from p2pdiloco.nat.messages import OPENING
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.transport import sockets
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import DialError, Observer, Transport
from p2pdiloco.util.status_pipe import Invited, Listening

START_S = 120.0
TUNE = sockets.tune
ADDRESSES = 250
QUIET, ELSEWHERE, FLOODED = "quiet", "flood elsewhere", "flooded"
STRANGERS = "127.0.2.1"
RUN = """
name = "flooded"
[model]
width = 64
depth = 2
heads = 2
context = 64
[data]
kind = "stdlib"
[inner]
steps = 1000000
batch = 8
warmup = 20
[schedule]
fragments = 2
sync_every = 32
overlap = 12
max_shard = 16384
"""
COLUMNS = (
    ("tokens a second", "rate", ",.0f"),
    ("node's CPU %", "node_cpu", ".0%"),
    ("flood's CPU %", "flood_cpu", ".0%"),
    ("memory MB", "memory_mb", ",.0f"),
    ("connections", "connections", ",.0f"),
    ("newcomer s", "newcomer_s", ".1f"),
)


class Flood:
    """Of one port of this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.opened = 0
        self.refused = 0

    async def run(self, connections: int, identities: int, invite: str) -> None:
        """Until cancelled."""
        kinds = (self._silent, self._slow, self._loud, self._line)
        async with asyncio.TaskGroup() as group:
            for number in range(connections):
                group.create_task(self._again(kinds[number % 4], f"127.0.1.{1 + number % ADDRESSES}"))
                if number % 100 == 99:
                    await asyncio.sleep(0.05)
            for _ in range(identities):
                group.create_task(self._greet(invite))

    async def _again(self, kind: Any, address: str) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(address, 0))
                self.opened += 1
                try:
                    await kind(reader, writer)
                finally:
                    self.opened -= 1
                    writer.transport.abort()
            self.refused += 1
            await asyncio.sleep(1.0)

    async def _silent(self, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async def _slow(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"\x16")
            await writer.drain()
            await asyncio.sleep(1.0)

    async def _loud(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(os.urandom(4096))
        await writer.drain()
        await reader.read()

    async def _line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OPENING[:1])
        await writer.drain()
        await reader.read()

    async def _greet(self, invite: str) -> None:
        """A stranger that knows the run."""
        sockets.tune = _strangely
        run = decode_invite(invite).run
        while True:
            me = Identity.ephemeral()
            async with contextlib.AsyncExitStack() as stack:
                transport = Transport(me, listen="", run=run, version=WIRE_VERSION)
                await stack.enter_async_context(transport.serve(Observer()))
                with contextlib.suppress(DialError):
                    await transport.dial(f"/ip4/127.0.0.1/tcp/{self._port}")
            await asyncio.sleep(0.2)


def _strangely(connection: socket.socket, *, congestion: str) -> None:
    """What this process dials comes from the strangers' address."""
    connection.bind((STRANGERS, 0))
    TUNE(connection, congestion=congestion)


async def trained(peers: list[Member], seconds: float) -> float:
    """Tokens a second of all of them together."""
    for peer in peers:
        peer.refresh()
    before, began = sum(peer.view.tokens for peer in peers), time.monotonic()
    await asyncio.sleep(seconds)
    for peer in peers:
        peer.refresh()
    return (sum(peer.view.tokens for peer in peers) - before) / (time.monotonic() - began)


def spent(process: psutil.Process) -> float:
    """Processor seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)


def keep_to(core: int, pid: int) -> None:
    """A process, what it has started, and all their threads."""
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, {core})


def give_way() -> None:
    """A real flood takes nothing of the newcomer's processor. (Each peer is in a session of its own.)"""
    Path("/proc/self/autogroup").write_text("10")


async def came(newcomer: Member) -> float:
    """Seconds from its node's first event to its having the whole state."""
    deadline = time.monotonic() + START_S
    while not newcomer.view.current_at and time.monotonic() < deadline:
        newcomer.refresh()
        await asyncio.sleep(0.1)
    return newcomer.view.current_at - newcomer.began_unix if newcomer.view.current_at else float("inf")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def measure(swarm: Swarm, options: Any) -> dict[str, dict[str, Any]]:
    config, port, elsewhere = swarm.out / "run.toml", free_port(), free_port()
    config.write_text(RUN)
    address = (await asyncio.to_thread(swarm.launch_bootstrap().wait_for, Listening)).addresses[0]
    listen = ("--listen", f"/ip4/127.0.0.1/tcp/{port}")
    ann = swarm.launch("ann", ["start", str(config), "--bootstrap", address], *listen)
    invite = (await asyncio.to_thread(ann.wait_for, Invited)).invite
    peers = [ann] if options.apart else [ann, swarm.join("bob", invite)]
    await until_training(peers)
    if options.apart:
        keep_to(1, os.getpid())  # and all that is started from now on
        keep_to(0, ann.process.pid)
        give_way()
    command = ["bootstrap", "--listen", LOOPBACK, "--rendezvous", f"/ip4/127.0.0.1/tcp/{elsewhere}"]
    other = Member("other", command, swarm.out / "other", swarm.mark)
    await asyncio.to_thread(other.wait_for, Listening)
    phases = ((QUIET, 0, port), (ELSEWHERE, options.connections, elsewhere), (FLOODED, options.connections, port))
    found: dict[str, list[dict[str, Any]]] = {phase: [] for phase, _, _ in phases}
    for number in range(options.rounds):
        for phase, connections, at in phases:
            flood = Flood(at)
            flooding = flood.run(connections, options.identities if connections else 0, invite)
            async with until_over(flooding):
                await asyncio.sleep(options.seconds / 4)
                row = await look(ann, peers, flood, options.seconds)
                if phase != ELSEWHERE:
                    newcomer = swarm.join(f"cat-{phase}-{number}", invite)
                    row["newcomer_s"] = await came(newcomer)
                    newcomer.kill()
            found[phase].append(row)
            print(phase, row, flush=True)
    return {phase: {"phase": phase} | medians(rows) for phase, rows in found.items()}


async def look(flooded: Member, peers: list[Member], flood: Flood, seconds: float) -> dict[str, Any]:
    """One phase: what ``peers`` train meanwhile, and what the flooded one's node takes."""
    node = psutil.Process(flooded.process.pid)
    before, began = (spent(node), spent(psutil.Process())), time.monotonic()
    rate = await trained(peers, seconds)
    took = time.monotonic() - began
    return {
        "rate": rate,
        "node_cpu": (spent(node) - before[0]) / took,
        "flood_cpu": (spent(psutil.Process()) - before[1]) / took,
        "memory_mb": node.memory_info().rss / 1e6,
        "connections": flood.opened,
        "newcomer_s": float("nan"),
    }


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {column: statistics.median(row[column] for row in rows) for column in rows[0]}


@contextlib.asynccontextmanager
async def until_over(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until_training(peers: list[Member]) -> None:
    deadline = time.monotonic() + START_S
    while not all(peer.view.tokens for peer in peers):
        if time.monotonic() > deadline:
            raise SystemExit("the peers do not train")
        for peer in peers:
            peer.refresh()
        await asyncio.sleep(0.2)


def main() -> None:
    parser = bench.parser(__doc__, rows="phase", has_plot=False)
    parser.add_argument("--connections", type=int, default=10_000, help="connections of the flood")
    parser.add_argument("--identities", type=int, default=512, help="fresh identities that greet")
    parser.add_argument(
        "--apart", action="store_true", help="flooded peer alone on core 0, flood and newcomer on core 1"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each phase")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all phases")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder))
        try:
            found = asyncio.run(measure(swarm, options))
        finally:
            swarm.stop()
            swarm.kill_leftovers()
    for row in found.values():
        bench.write(options, "hostile/flood", {"phase": row["phase"]}, row)
    print(bench.table("phase", COLUMNS, found))


if __name__ == "__main__":
    main()
