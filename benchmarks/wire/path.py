"""Path of a contribution (quantize, zstd, TLS, zstd, dequantize), and the share of a link that it fills.

    python -m benchmarks.wire.path --json out/path.json
    python -m benchmarks.wire.path --link long --codec bf16 --repeat 5

One process encodes outer gradients of SHARD parameters on one thread and keeps the transport busy; another decodes each
payload on one thread, as a node does. Payloads are Huffman-coded where a node that knows the link would do so
(``peer.codec_choice``). Each row has, over a window of ``--seconds``:

- ``cpu_s_per_wire_gb``: CPU seconds of both ends together (user and system) per GB of payload on the wire;
- ``link_share``: received payload as a share of what the link can carry. Bytes are pending all the time.

Links: ``lo``, those of ``links`` (no delay), and ``long``: 1 Gbit/s, 100 ms round trip, 0.1 % loss each way, by
``benchmarks.netbed``. Shaped links need root; their up budget is UP_SHARE of the link. The testbed's router uses part
of the two cores, so the figures of the long path are lower bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks import bench
from benchmarks.wire import line, links
from benchmarks.wire.transport import Quiet
from p2pdiloco.codec.bitrate_ladder import FAST_BYTES_PER_S
from p2pdiloco.codec.compression import index_bytes, split
from p2pdiloco.codec.quantization import CHUNK, LARGEST_BODY, Recipe, chunk_count, decode_chunk, encode_vector, recipe
from p2pdiloco.peer.learner_updates import Payload
from p2pdiloco.peer.model_state import payload_of
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import Codec
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import Transport, TransportLimits

SHARD = 1 << 20
GRADIENTS = 8
"""Different ones, encoded in turns."""
UP_SHARE = 0.97
QUEUED_BYTES = {"long": 48 << 20}
QUEUED_ELSE_BYTES = 8 << 20
WARM_S = {"long": 8.0}
WARM_ELSE_S = 2.0
LONG = """
name = "wire-long"
[[site]]
name = "a"
[[site]]
name = "b"
[defaults]
up = "1gbit"
down = "1gbit"
round_trip_ms = 100.0
loss = 0.001
"""
LINKS = ("lo", "200mbit", "1gbit", "2.5gbit", "long")
CODECS: tuple[Codec, ...] = ("int4", "bf16")
POLL_S = 0.001
GB = 1e9


# -- the two ends ----------------------------------------------------------------------------------------------------


class Decoding(Quiet):
    """Decodes what comes, on one thread; until then the sender gets no credit for it."""

    def __init__(self) -> None:
        super().__init__()
        self._worker = ThreadPoolExecutor(1)
        self._out = torch.empty(CHUNK)

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> asyncio.Future[None]:  # type: ignore[override]
        assert payload is not None
        self.messages += 1
        return asyncio.get_running_loop().run_in_executor(self._worker, self._decode, payload)

    def _decode(self, payload: memoryview) -> None:
        for body in split(payload, chunk_count(SHARD), LARGEST_BODY):
            decode_chunk(body, self._out)


async def serve(config: line.Message) -> None:
    """One end, until the parent closes the pipe."""
    loop = asyncio.get_running_loop()
    torch.set_num_threads(1)
    limits = TransportLimits(up_bytes_per_s=config["up_bytes_per_s"])
    listen = f"/ip4/{config['host']}/tcp/0"
    handler = Decoding()
    opened = Transport(Identity.ephemeral(), listen=listen, run="bench", version=1, limits=limits)
    async with opened.serve(handler) as transport:
        line.answer(address=transport.listen_addresses()[0])
        commands: asyncio.Queue[line.Message | None] = asyncio.Queue()

        def read() -> None:
            for command in line.commands():
                loop.call_soon_threadsafe(commands.put_nowait, command)
            loop.call_soon_threadsafe(commands.put_nowait, None)

        threading.Thread(target=read, daemon=True).start()
        async with asyncio.TaskGroup() as tasks:
            while (command := await commands.get()) is not None:
                if command["do"] == "send":
                    peer = await transport.dial(command["address"], timeout_s=30.0)
                    how, is_coded = recipe(config["codec"]), config["is_coded"]
                    tasks.create_task(_send(transport, peer, how, is_coded, config["queued_bytes"]))
                usage = resource.getrusage(resource.RUSAGE_SELF)
                received = transport.traffic().received_bulk
                line.answer(at=time.monotonic(), cpu_s=usage.ru_utime + usage.ru_stime, received=received)
            os._exit(0)


async def _send(transport: Transport, peer: PeerId, how: Recipe, is_coded: bool, queued_bytes: int) -> None:
    gradients = torch.randn(GRADIENTS, SHARD, generator=torch.Generator().manual_seed(0)) * 1e-3
    number = 0
    with ThreadPoolExecutor(1) as worker:
        while True:
            while transport.queued_bytes(peer) > queued_bytes:  # noqa: ASYNC110 - room is not announced
                await asyncio.sleep(POLL_S)
            x = gradients[number % GRADIENTS]
            payload = await asyncio.get_running_loop().run_in_executor(worker, _encoded, how, x, is_coded)
            if not transport.send(peer, b"contribution", payload):
                raise RuntimeError("the connection is lost")
            number += 1


def _encoded(how: Recipe, x: torch.Tensor, is_coded: bool) -> Payload:
    return payload_of(encode_vector(how, x, room=index_bytes(chunk_count(x.numel()))), how, is_coded)


# -- the parent ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def places(link: str) -> Iterator[list[links.Place]]:
    """Two, joined by ``link``.

    Raises:
        links.LinkError, TestbedError: it cannot be made here.
    """
    if link != "long":
        with links.network(link, 2) as found:
            yield found
        return
    from benchmarks.netbed import testbed
    from benchmarks.netbed.topology import address

    made = testbed.up(LONG.encode())
    try:
        yield [links.Place(made.site(i), address(i), "eth0") for i in range(2)]
    finally:
        testbed.down(made.topology.name)


class End:
    """A process at one place."""

    def __init__(self, place: links.Place, config: line.Message) -> None:
        argv = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.wire.path",
            json.dumps({**config, "host": place.host}),
        ]
        self.process = subprocess.Popen(
            place.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        self.address = self.read()["address"]

    def read(self) -> line.Message:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError("an end of the path gave up; see above")
        found: line.Message = json.loads(text)
        return found

    def ask(self, **command: object) -> line.Message:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()


def measure(link: str, codec: Codec, seconds: float) -> dict[str, float | None]:
    """One window."""
    rate = 1e9 if link == "long" else links.RATES[link]
    config: dict[str, Any] = {
        "codec": codec,
        "is_coded": rate is not None and rate / 8 < FAST_BYTES_PER_S,
        "up_bytes_per_s": None if rate is None else UP_SHARE * rate / 8,
        "queued_bytes": QUEUED_BYTES.get(link, QUEUED_ELSE_BYTES),
    }
    with places(link) as (here, there), contextlib.ExitStack() as stack:
        ends = []
        for place in (there, here):
            ends.append(end := End(place, config))
            stack.callback(end.process.wait)
            stack.callback(end.process.kill)
        taker, sender = ends
        sender.ask(do="send", address=taker.address)
        time.sleep(WARM_S.get(link, WARM_ELSE_S))
        before = [end.ask(do="count") for end in ends]
        time.sleep(seconds)
        after = [end.ask(do="count") for end in ends]
    cpu_s = [b["cpu_s"] - a["cpu_s"] for a, b in zip(before, after, strict=True)]
    wire = after[0]["received"] - before[0]["received"]
    wire_bytes_per_s = wire / (after[0]["at"] - before[0]["at"])
    return {
        "gbit_per_s": wire_bytes_per_s * 8 / 1e9,
        "link_share": None if rate is None else wire_bytes_per_s * 8 / (rate * links.PAYLOAD_SHARE),
        "cpu_s_per_wire_gb": sum(cpu_s) / (wire / GB),
        "receiver_cpu_s_per_wire_gb": cpu_s[0] / (wire / GB),
        "sender_cpu_s_per_wire_gb": cpu_s[1] / (wire / GB),
    }


def main() -> None:
    """The command line; or an end, when started with its configuration alone."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        uvloop.run(serve(line.begin()))
        return
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each case")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of a run")
    parser.add_argument("--link", action="append", choices=LINKS, help="default: all as root, otherwise lo")
    parser.add_argument(
        "--codec", action="append", choices=CODECS, help="codec to measure; may be repeated (default: all)"
    )
    options = parser.parse_args()
    rows = {}
    for link in options.link or (LINKS if os.geteuid() == 0 else LINKS[:1]):
        for codec in options.codec or CODECS:
            found = bench.medians([measure(link, codec, options.seconds) for _ in range(options.repeat)])
            bench.write(options, "wire path", {"link": link, "codec": codec}, found)
            rows[f"{link} {codec}"] = found
            print(f"{link} {codec}: {found}", file=sys.stderr, flush=True)
    print(bench.table("link, codec", COLUMNS, rows))


COLUMNS = (
    ("Gbit/s", "gbit_per_s", ".3f"),
    ("of the link", "link_share", ".1%"),
    ("CPU s/GB", "cpu_s_per_wire_gb", ".2f"),
    ("sender", "sender_cpu_s_per_wire_gb", ".2f"),
    ("receiver", "receiver_cpu_s_per_wire_gb", ".2f"),
)


if __name__ == "__main__":
    main()
