"""The fallback without root: relays that shape in process."""

from __future__ import annotations

import asyncio
import os

import pytest

from benchmarks.netbed.tcp_relays import HOST, SEGMENT_BYTES, InProcess, Line, verify_in_process
from benchmarks.netbed.topology import parse_topology

MEASURES = os.environ.get("P2PDILOCO_MEASURE") == "1"
TWO = parse_topology(
    'name = "two"\n[defaults]\nup = "20mbit"\ndown = "60mbit"\nround_trip_ms = 40\n'
    '[[site]]\nname = "a"\n[[site]]\nname = "b"\n'
)


def test_a_line_carries_one_thing_after_the_other():
    line = Line(1514 * 8 * 10)  # ten full packets a second
    assert line.carry(5.0, SEGMENT_BYTES) == pytest.approx(5.1)
    assert line.carry(5.0, 2 * SEGMENT_BYTES) == pytest.approx(5.3)
    assert line.carry(9.0, SEGMENT_BYTES) == pytest.approx(9.1)


def test_relays_are_as_asked_for():
    """Beside other tests within a factor of two: relays that do not shape are some hundred times as fast. Within what
    ``bench`` allows on a quiet machine (make test-measured)."""

    async def measure():
        return [check async for check in verify_in_process(TWO)]

    def is_near(check):
        return not MEASURES and check.wanted / 2 <= check.measured <= 2 * check.wanted

    for _ in range(3):
        found = asyncio.run(measure())
        wrong = [check.sentence() for check in found if not check.is_right and not is_near(check)]
        if not wrong:
            return
    raise AssertionError(wrong)


def test_bytes_pass_as_they_are_both_ways_and_ends_are_told():
    async def talk() -> bytes:
        async def answer(reader, writer):
            writer.write((await reader.read())[::-1])
            writer.close()

        server = await asyncio.start_server(answer, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        async with InProcess(TWO, {1: (HOST, port)}) as network:
            assert set(network.ports) == {(0, 1)}
            reader, writer = await asyncio.open_connection(HOST, network.ports[0, 1])
            writer.write(bytes(range(256)) * 400)
            writer.write_eof()
            return await asyncio.wait_for(reader.read(), 10)

    assert asyncio.run(talk()) == (bytes(range(256)) * 400)[::-1]


def test_nobody_behind_a_relay_ends_the_connection():
    async def dial() -> bytes:
        async with InProcess(TWO, {1: (HOST, 1)}) as network:
            reader, _ = await asyncio.open_connection(HOST, network.ports[0, 1])
            try:
                return await asyncio.wait_for(reader.read(), 10)
            except ConnectionResetError:
                return b""

    assert asyncio.run(dial()) == b""
