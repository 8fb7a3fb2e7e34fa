"""What is known of paths that lose long packets: by host, everywhere after two of them, and for the next process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import uvloop
from msgspec import json

from p2pdiloco.discovery.detours import Detours
from p2pdiloco.transport import addresses, narrow_paths
from p2pdiloco.transport.narrow_paths import HOSTS_LIMIT, NarrowPaths
from p2pdiloco.transport.sockets import SHORT_BYTES


def test_two_narrow_paths_are_a_tunnel_on_this_side() -> None:
    paths = NarrowPaths()
    assert "10.0.0.1" not in paths
    paths.add("10.0.0.1")
    paths.add("10.0.0.1")
    assert "10.0.0.1" in paths
    assert "10.0.0.2" not in paths
    paths.add("10.0.0.2")
    assert "10.0.0.3" in paths
    assert paths.is_everywhere
    (ours := NarrowPaths()).add(narrow_paths.EVERYWHERE)
    assert "10.0.0.3" in ours


def test_the_next_process_knows_them_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "narrow.json"
    paths = NarrowPaths(file)
    paths.load()
    paths.save()
    assert not file.exists(), "nothing was found"
    paths.add("10.0.0.1")
    paths.save()
    (again := NarrowPaths(file)).load()
    assert "10.0.0.1" in again
    later = narrow_paths.time.time() + narrow_paths.LIFE_S + 1.0
    monkeypatch.setattr(narrow_paths.time, "time", lambda: later)
    (much_later := NarrowPaths(file)).load()
    assert "10.0.0.1" not in much_later


@pytest.mark.parametrize("content", [b"", b"[1]", json.encode({"x" * 100: 1.0}), b'{"a": "b"}'])
def test_a_damaged_file_is_no_hint(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "narrow.json"
    file.write_bytes(content)
    (paths := NarrowPaths(file)).load()
    assert not paths.is_everywhere


def test_they_are_bounded() -> None:
    paths = NarrowPaths()
    for number in range(HOSTS_LIMIT + 5):
        paths.add(str(number))
    assert len(paths._hosts) == HOSTS_LIMIT


def test_a_detour_carries_bytes_in_short_segments_and_one_that_leads_nowhere_is_not_offered() -> None:
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as there:
            address = f"/ip4/127.0.0.1/tcp/{there.getsockname()[1]}"
            async with Detours() as detours:
                for _ in range(2):  # a way is used again
                    (way,) = await detours.to([address, "/ip4/127.0.0.1/tcp/1"])
                    assert await _echo(way, there) == b"hello"

    async def _echo(way: str, there: socket.socket) -> bytes:
        loop = asyncio.get_running_loop()
        there.setblocking(False)
        with socket.socket() as here:
            here.setblocking(False)
            await loop.sock_connect(here, ("127.0.0.1", addresses.parse(way).port))
            onward, _ = await loop.sock_accept(there)
            with onward:
                assert onward.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= SHORT_BYTES
                await loop.sock_sendall(onward, b"hello")
                return await loop.sock_recv(here, 100)

    uvloop.run(work())


def test_of_many_detours_the_oldest_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdiloco.discovery.detours.DETOURS", 2)

    def port(way: Sequence[str]) -> int:
        return addresses.parse(way[0]).port

    async def work() -> None:
        loop = asyncio.get_running_loop()
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        async with Detours() as detours:
            texts = [f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}" for server in servers]
            first, second, _ = [port(await detours.to([text])) for text in texts]
            await asyncio.sleep(0.01)
            for number, is_open in ((first, False), (second, True)):
                with socket.socket() as here:
                    here.setblocking(False)
                    try:
                        await loop.sock_connect(here, ("127.0.0.1", number))
                    except ConnectionRefusedError:
                        assert not is_open
                    else:
                        assert is_open
        for server in servers:
            server.close()

    uvloop.run(work())


def test_a_host_found_again_is_known_for_as_long_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, began, days = tmp_path / "narrow.json", narrow_paths.time.time(), [0.0]
    monkeypatch.setattr(narrow_paths.time, "time", lambda: began + days[0] * 86_400.0)
    paths = NarrowPaths(file)
    for days[0] in (0.0, 6.0):
        paths.add("10.0.0.1")
    paths.save()
    days[0] = 10.0
    (again := NarrowPaths(file)).load()
    assert "10.0.0.1" in again
