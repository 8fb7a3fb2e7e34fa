"""Time until two peers are connected, and the cost of a relay.

    python -m benchmarks.wan.meeting --json out/meeting.json       # both; needs root
    python -m benchmarks.wan.meeting --relay                       # the relay alone; needs no root
    python -m benchmarks.wan.meeting --joins                       # the times alone

Times run from the start of ``p2pdiloco join`` to its first connection with a peer of the run; the part after its
directory is up is reported too (before that, Python starts). Peers are dialled directly (the founder is public),
punched (both behind port-keeping routers), or relayed (one behind a router that changes ports). A relay's CPU time and
throughput are measured on this machine's loopback, in a process that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import bench
from benchmarks.wan.homes import START_S, Home, gathered, wait_for
from benchmarks.wan.sites import network, on_sigterm
from p2pdiloco.nat.rendezvous_server import Relay

SITES = {"pub": "", "ann": 'nat = "keep"', "bob": 'nat = "keep"', "kim": 'nat = "random"'}
WAYS = {"direct": ("pub", "bob"), "punched": ("ann", "bob"), "relayed": ("ann", "kim")}
"""Who founds, and who joins."""
UP = "directory is up"
SECONDS = 8.0
PIECE = bytes(1 << 18)


def topology(founder: str, joiner: str, round_trip_ms: float) -> str:
    """A bootstrap, and two peers."""
    text = ['name = "meeting"', "[defaults]", f"round_trip_ms = {round_trip_ms:g}", '[[site]]\nname = "hub"']
    for name in (founder, joiner):
        text += ["[[site]]", f'name = "{name}"', SITES[name]]
    return "\n".join(text) + "\n"


def first_connection_s(way: str, round_trip_ms: float, repeats: int) -> tuple[list[float], list[float]]:
    """Of each join, since its start and since its directory was up."""
    took, since_up = [], []
    with (
        tempfile.TemporaryDirectory(prefix="p2pdiloco-meeting-") as folder,
        network(topology(*WAYS[way], round_trip_ms), is_verified=False) as made,
        gathered(made, Path(folder), steps=1_000_000, absent={2}) as those,
    ):
        for number in range(repeats):
            began = time.time()
            home = Home(made, 2, Path(folder) / str(number), ["join", those.where(2), *those.own])
            line = wait_for(partial(_connected, home), [*those.homes, home], START_S, "the joiner is connected")
            at, up = (_seconds(one) for one in (line, next(one for one in home.lines() if one["event"] == UP)))
            took.append(at - began)
            since_up.append(at - up)
            home.process.kill()
            home.process.wait()
            wait_for(lambda: those.homes[0].live == 1, those.homes, START_S, "the joiner is gone")
    return took, since_up


def _seconds(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def _connected(home: Home) -> Any:
    return next((line for line in home.lines() if line["event"] == "connected" and not line["observer"]), None)


@contextlib.contextmanager
def _pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        yield near, far


def relayed(bytes_per_s: float | None, pairs: int) -> dict[str, float]:
    """Throughput and processor time of a relay that ``pairs`` use in one direction, as fast as they can."""
    with contextlib.ExitStack() as stack:
        ends = [(stack.enter_context(_pair()), stack.enter_context(_pair())) for _ in range(pairs)]
        passed = [str(one.fileno()) for (_, inner), (outer, _) in ends for one in (inner, outer)]
        argv = [sys.executable, "-m", "benchmarks.wan.meeting", "--carry", str(bytes_per_s or 0.0), *passed]
        carrier = subprocess.Popen(argv, pass_fds=[int(one) for one in passed], stdout=subprocess.PIPE, text=True)
        got = [0] * pairs

        def push(near: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while True:
                    near.sendall(PIECE)

        def pull(number: int, far: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := far.recv(1 << 20):
                    got[number] += len(data)

        assert carrier.stdout is not None
        carrier.stdout.readline()
        for number, ((near, _), (_, far)) in enumerate(ends):
            threading.Thread(target=push, args=(near,), daemon=True).start()
            threading.Thread(target=pull, args=(number, far), daemon=True).start()
        time.sleep(1.0)
        before, began = sum(got), time.monotonic()
        time.sleep(SECONDS)
        carried, took = sum(got) - before, time.monotonic() - began
        for (near, _), (_, far) in ends:
            for one in (near, far):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        carrier.terminate()
        words = carrier.communicate()[0].split()
    return {
        "mbit_per_s": carried * 8 / took / 1e6,
        "of_budget": carried / took / bytes_per_s if bytes_per_s else 1.0,
        "cpu_s_per_gb": float(words[0]) / float(words[1]) * 1e9,
        "evenness": min(got) / max(1, *got),
    }


def carry(bytes_per_s: float, descriptors: list[int]) -> int:
    """The relay's process, until SIGTERM: it tells its processor time and its bytes."""
    import signal

    import uvloop

    async def work() -> None:
        relay, loop = Relay(bytes_per_s or None), asyncio.get_running_loop()
        ends = [socket.socket(fileno=one) for one in descriptors]
        for one in ends:
            one.setblocking(False)
        carrying = [asyncio.create_task(relay.carry(a, b, [0, 0])) for a, b in zip(ends[::2], ends[1::2], strict=True)]
        stop = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        before = resource.getrusage(resource.RUSAGE_SELF)
        print("ready", flush=True)
        await stop.wait()
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, relay.carried_bytes, flush=True)
        for way in carrying:
            way.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)

    uvloop.run(work())
    return 0


def main() -> int:
    """Measure, write, print."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--relay", action="store_true", help="measure only the relay")
    parser.add_argument("--joins", action="store_true", help="measure only the joins")
    parser.add_argument("--repeats", type=int, default=5, help="joins of each kind (default: %(default)s)")
    parser.add_argument("--round-trip-ms", type=float, default=40.0, help="between two sites (default: %(default)s)")
    parser.add_argument("--carry", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.carry:
        return carry(float(options.carry[0]), [int(one) for one in options.carry[1:]])
    on_sigterm()
    found: dict[str, Any] = {
        f"relay {name}, {pairs} pairs": relayed(rate, pairs)
        for name, rate in (("50mbit", 50e6 / 8), ("500mbit", 500e6 / 8), ("none", None))
        for pairs in (1, 4)
        if not options.joins
    }
    if not options.relay:
        for way in WAYS:
            took, since_up = first_connection_s(way, options.round_trip_ms, options.repeats)
            found[way] = {
                "median_s": statistics.median(took),
                "slowest_s": max(took),
                "since_directory_median_s": statistics.median(since_up),
                "since_directory_slowest_s": max(since_up),
            }
    for name, figures in found.items():
        print(f"{name:24} " + "  ".join(f"{key} {value:.3f}" for key, value in figures.items()))
        bench.write(options, "wan.meeting", {"of": name}, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
