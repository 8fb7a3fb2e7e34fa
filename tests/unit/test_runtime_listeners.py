"""All sockets of one process, and what arrives at a port that peers and the directory share."""

from __future__ import annotations

import asyncio
import socket

import pytest

from p2pdiloco.runtime import sockets
from p2pdiloco.runtime.handler import Observer
from p2pdiloco.runtime.identity import Identity
from p2pdiloco.runtime.listeners import Listeners
from p2pdiloco.runtime.shared_port import FIRST, SharedPort
from p2pdiloco.runtime.transport import Transport

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
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"told: " + await reader.readexactly(20))
            writer.close()

        inner = await asyncio.start_server(echo, "127.0.0.1", 0)
        ann, bob = (
            Transport(Identity.ephemeral(), listen=LOOPBACK, run="", version=1, handler=Observer()) for _ in range(2)
        )
        ann.strangers.others[FIRST] = SharedPort(inner.sockets[0].getsockname()[1]).carry
        async with inner, ann, bob:
            (where,) = ann.listen_addresses()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(where.split("/")[4]))
            writer.write(FIRST + b"/multistream/1.0.0\n")
            assert await asyncio.wait_for(reader.read(), 5.0) == b"told: " + FIRST + b"/multistream/1.0.0\n"
            writer.close()
            assert await bob.dial(where) == ann.peer_id

    asyncio.run(work())
