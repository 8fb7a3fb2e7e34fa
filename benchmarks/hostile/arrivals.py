"""CPU time that a stranger's connection costs the peer that accepts it.

    python -m benchmarks.hostile.arrivals                  # 8,000 connections of each kind
    python -m benchmarks.hostile.arrivals --number 500     # quick check that it works

*Silent* connections send nothing, *slow* ones the first byte of a greeting, *loud* ones garbage. They come from another
process, 250 addresses of this machine and 50 at a time; the oldest of 400 is dropped for each new one. *Refused* ones,
an eighth as many, prove an identity and belong to another run; their rate limit is lifted here, and no host is blocked.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from contextlib import AbstractAsyncContextManager, suppress

import uvloop

from benchmarks import bench
from benchmarks.hostile.flood import ADDRESSES
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import DialError, Observer, Transport

SAID = {"silent": b"", "slow": b"\x16", "loud": os.urandom(4096)}
REFUSED = "refused"
AT_ONCE, OPEN = 50, 400
"""Then a pause of a fiftieth of a second; sockets of the flood's."""


def come(port: int, said: bytes, number: int) -> None:
    """The flood, in a process of its own."""
    there: list[socket.socket] = []
    for one in range(number):
        raw = socket.socket()
        there.append(raw)
        with suppress(OSError):
            raw.bind((f"127.0.1.{1 + one % ADDRESSES}", 0))
            raw.connect(("127.0.0.1", port))
            raw.send(said)
        if len(there) > OPEN:
            there.pop(0).close()
        if one % AT_ONCE == AT_ONCE - 1:
            time.sleep(0.02)


def transport(listen: str, run: str) -> AbstractAsyncContextManager[Transport]:
    """Of somebody."""
    limits = TransportLimits(failures_at_once=1 << 30, shut_out_after=1 << 30)
    opened = Transport(Identity.ephemeral(), listen=listen, run=run, version=WIRE_VERSION, limits=limits)
    return opened.serve(Observer())


def greet(port: int, number: int) -> None:
    """The flood of those that are refused."""

    async def main() -> None:
        for _ in range(number):
            async with transport("", "another run") as stranger:
                with suppress(DialError):
                    await stranger.dial(f"/ip4/127.0.0.1/tcp/{port}")

    uvloop.run(main())


async def measure(kind: str, number: int) -> float:
    """Microseconds of the processor an arrival."""
    async with transport("/ip4/127.0.0.1/tcp/0", "run") as flooded:
        port = int(flooded.listen_addresses()[0].split("/")[4])
        spawn = multiprocessing.get_context("spawn").Process
        if kind == REFUSED:
            number //= 8
            flood = spawn(target=greet, args=(port, number))
        else:
            flood = spawn(target=come, args=(port, SAID[kind], number))
        flood.start()
        before = time.process_time()
        await asyncio.to_thread(flood.join)
        return (time.process_time() - before) / number * 1e6


def main() -> None:
    parser = bench.parser(__doc__, rows="kind", has_plot=False)
    parser.add_argument("--number", type=int, default=8000, help="connections of each kind")
    options = parser.parse_args()
    found = {kind: {"us": uvloop.run(measure(kind, options.number))} for kind in (*SAID, REFUSED)}
    for kind, row in found.items():
        bench.write(options, "hostile/arrivals", {"kind": kind, "number": options.number}, row)
    print(bench.table("kind", (("us an arrival", "us", ",.0f"),), found))


if __name__ == "__main__":
    main()
