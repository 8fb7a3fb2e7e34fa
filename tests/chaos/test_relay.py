"""The relay, over real sockets: bytes pass as they are, links can be cut, slowed, spoilt and reset."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from tests.chaos.fault_proxy import HELD_BYTES, STRANGER, Network, slow_down

HOST = "127.0.0.1"
SOON_S = 5.0
A_WHILE_S = 0.2


class Line:
    """A connection through the relay before B, dialled by A (or whom ``diallers`` names), to a server that echoes."""

    def __init__(self, network: Network, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.network = network
        self.reader = reader
        self.writer = writer

    async def echo(self, data: bytes, timeout_s: float = SOON_S) -> bytes:
        self.writer.write(data)
        return await asyncio.wait_for(self.reader.readexactly(len(data)), timeout_s)

    async def is_silent(self) -> bool:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(self.reader.readexactly(1), A_WHILE_S)
        return True


@asynccontextmanager
async def line(dialler: str | None = "A") -> AsyncIterator[Line]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    async with server, Network({"A": 1, "B": server.sockets[0].getsockname()[1]}, lambda port: dialler) as network:
        reader, writer = await asyncio.open_connection(HOST, network.port("B"))
        try:
            yield Line(network, reader, writer)
        finally:
            writer.close()


def check(test: Callable[[Line], Awaitable[None]], dialler: str | None = "A") -> None:
    async def run() -> None:
        async with line(dialler) as there:
            await test(there)

    asyncio.run(run())


def test_bytes_pass_as_they_are() -> None:
    async def test(there: Line) -> None:
        data = bytes(range(256)) * 8192  # more than the relay holds
        assert len(data) > HELD_BYTES
        assert await there.echo(data) == data
        assert there.network.link("A", "B").carried == len(data)

    check(test)


@pytest.mark.parametrize(("speaker", "hearer"), [("A", "B"), ("B", "A")])
def test_a_cut_link_carries_nothing_and_loses_nothing(speaker: str, hearer: str) -> None:
    async def test(there: Line) -> None:
        link = there.network.link(speaker, hearer)
        link.cut()
        link.cut()
        there.writer.write(b"late")
        assert await there.is_silent()
        link.mend()
        assert await there.is_silent(), "mended as often as cut"
        link.mend()
        assert await asyncio.wait_for(there.reader.readexactly(4), SOON_S) == b"late"

    check(test)


def test_a_new_connection_over_a_cut_link_is_accepted_and_silent() -> None:
    async def test(there: Line) -> None:
        for link in there.network.between(["B"]):
            link.cut()
        reader, writer = await asyncio.open_connection(HOST, there.network.port("B"))
        writer.write(b"?")
        assert await Line(there.network, reader, writer).is_silent()
        writer.close()

    check(test)


@pytest.mark.parametrize("speaker", ["A", "B"])
def test_a_connection_goes_dead_one_way_and_a_new_one_carries(speaker: str) -> None:
    async def test(there: Line) -> None:
        assert await there.echo(b"both ways") == b"both ways"
        assert there.network.deafen(speaker) == 1
        there.writer.write(b"lost")
        assert await there.is_silent()
        assert there.network.link("B", "A").is_open.is_set(), "the link is whole"
        reader, writer = await asyncio.open_connection(HOST, there.network.port("B"))
        assert await Line(there.network, reader, writer).echo(b"new") == b"new"
        writer.close()

    check(test)


def test_a_cut_of_some_does_not_touch_others() -> None:
    async def test(there: Line) -> None:
        for link in there.network.between(["A"]):
            link.cut()
        assert await there.echo(b"a stranger is heard") == b"a stranger is heard"
        assert there.network.link(STRANGER, "B").carried

    check(test, dialler=None)


def test_a_slow_link_delays_and_paces() -> None:
    async def test(there: Line) -> None:
        loop = asyncio.get_running_loop()
        slow_down([there.network.link("A", "B")], 0.1, 100_000.0)
        began = loop.time()
        await there.echo(bytes(20_000))
        assert loop.time() - began >= 0.1 + 0.2
        slow_down([there.network.link("A", "B")], 0.0, None)
        began = loop.time()
        await there.echo(bytes(20_000))
        assert loop.time() - began < 0.2

    check(test)


def test_a_spoilt_piece_differs_in_one_bit_and_the_next_does_not() -> None:
    async def test(there: Line) -> None:
        there.network.link("A", "B").spoil = 1
        came = await there.echo(b"\x00" * 100)
        assert sum(byte.bit_count() for byte in came) == 1
        assert await there.echo(b"\x00" * 100) == b"\x00" * 100
        assert there.network.spoilt == 1

    check(test)


def test_a_reset_connection_ends() -> None:
    async def test(there: Line) -> None:
        await there.echo(b"there")
        assert there.network.reset("A") == 1
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await there.echo(b"?")

    check(test)


def test_the_end_of_what_is_sent_passes_on() -> None:
    async def test(there: Line) -> None:
        there.writer.write(b"last words")
        there.writer.write_eof()
        assert await asyncio.wait_for(there.reader.read(), SOON_S) == b"last words"

    check(test)


def test_nobody_behind_the_relay_ends_the_connection() -> None:
    async def test(there: Line) -> None:
        reader, writer = await asyncio.open_connection(HOST, there.network.port("A"))
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), SOON_S) == b""
        writer.close()

    check(test)
