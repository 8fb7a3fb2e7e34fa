"""All sockets of one process, and what arrives at a port that peers and the directory share."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from p2pdiloco.discovery import port_multiplexer
from p2pdiloco.discovery.port_multiplexer import FIRST, SharedPort
from p2pdiloco.transport import sockets
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.sockets import Congestion, Listeners
from p2pdiloco.transport.transport import Observer, Transport
from tests.integration.waiting import until

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def test_one_number_stands_for_both_families_and_several_ports_for_several() -> None:
    listeners = Listeners((LOOPBACK, "/ip6/::1/tcp/0", "/ip4/127.0.0.2/tcp/0"))
    listeners.open()
    try:
        four, six, other = listeners.addresses()
        assert four.port == six.port == other.port
        assert [four.family, six.family, other.host] == ["ip4", "ip6", "127.0.0.2"]
        with socket.create_connection(("::1", six.port), 1.0):
            pass
        again = Listeners((LOOPBACK, str(four)))
        with pytest.raises(OSError, match="cannot listen"):
            again.open()
        assert list(again) == []
    finally:
        listeners.close()


def test_a_machine_listens_where_others_may_reach_it() -> None:
    assert sockets.everywhere(7)[0] == "/ip4/0.0.0.0/tcp/7"
    assert set(sockets.everywhere(7)) <= {"/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7"}
    assert sockets.has_route("127.0.0.1")
    assert sockets.has_route("example.org")


def test_what_begins_as_the_directory_does_is_handed_to_it() -> None:
    async def work() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            said = await reader.readexactly(20)
            writer.write(b"told: " + said * int(await reader.readexactly(1)))
            writer.close()

        inner = await asyncio.start_server(answer, "127.0.0.1", 0)
        shared, worth = SharedPort(inner.sockets[0].getsockname()[1]), []

        async def carry(raw: socket.socket) -> bool:
            worth.append(await shared.carry(raw))
            return worth[-1]

        ann, bob = (Transport(Identity.ephemeral(), listen=LOOPBACK, run="", version=1) for _ in range(2))
        ann.setup.takers[FIRST] = carry
        async with inner, ann.serve(Observer()), bob.serve(Observer()):
            (where,) = ann.listen_addresses()
            for times in (1, 9):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(where.split("/")[4]))
                writer.write(b"%b/multistream/1.0.0\n%d" % (FIRST, times))
                answered = await asyncio.wait_for(reader.read(), 5.0)
                assert answered == b"told: " + (FIRST + b"/multistream/1.0.0\n") * times
                writer.close()
            assert await bob.dial(where) == ann.peer_id
            await until(lambda: worth == [False, True])

    asyncio.run(work())


def test_of_the_directorys_connections_the_largest_holders_first_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_multiplexer, "CONNECTIONS", 2)

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        inner = await asyncio.start_server(wait, "127.0.0.1", 0)
        shared, carrying, calling = SharedPort(inner.sockets[0].getsockname()[1]), [], []
        with socket.create_server(("127.0.0.1", 0)) as outer:
            for sender in ("127.0.0.7", "127.0.0.7", "127.0.0.1"):
                calling.append(socket.create_connection(outer.getsockname(), 5.0, (sender, 0)))
                raw, _ = outer.accept()
                raw.setblocking(False)
                carrying.append(loop.create_task(shared.carry(raw)))
                await asyncio.sleep(0.0)
        async with inner:
            assert await asyncio.wait_for(carrying[0], 5.0) is False
            assert calling[0].recv(1) == b""
            assert not carrying[1].done()
            assert not carrying[2].done()
            for one in calling:
                one.close()
            assert await asyncio.wait_for(asyncio.gather(*carrying[1:]), 5.0) == [False, False]

    asyncio.run(work())


def test_a_kernel_that_refuses_a_congestion_control_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    paths: list[Any] = [None, SimpleNamespace(congestion="bbr"), SimpleNamespace(congestion="cubic")]
    noted = Congestion("bbr")
    for path in (*paths, *paths):
        noted.note(path)
    assert noted._has_warned
    quiet = Congestion("")
    quiet.note(paths[2])
    assert not quiet._has_warned
