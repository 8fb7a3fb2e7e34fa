"""A connection that times out after long packets were lost, and one that does because of a full queue or losses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pdiloco.discovery import detours, p2pd
from p2pdiloco.discovery.call_deadlines import CallDeadlines
from p2pdiloco.discovery.detours import loses_long_packets
from p2pdiloco.net.bandwidth import Path
from p2pdiloco.net.handshake import Role
from p2pdiloco.net.send_queue import Slice
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport import addresses
from p2pdiloco.transport.connection_setup import ConnectionSetup
from p2pdiloco.transport.narrow_paths import NarrowPaths
from p2pdiloco.transport.tls_connection import PROOF_BYTES, Channel
from p2pdiloco.transport.transport import Transport

HANDSHAKE_BYTES = 3000
Seen = tuple[float, int | None]
"""Round trip in seconds, acknowledged bytes."""


def is_narrow_after(
    monkeypatch: pytest.MonkeyPatch,
    *seen: Seen,
    sent_bytes: int = 100_000,
    error: Exception | None = None,
    other: str = "",
) -> bool:
    """Whether the path counts as narrow once a connection has timed out.

    ``seen``: what the kernel told when the first bytes were sent, and when messages of the peer came later. ``other``:
    the host of a second connection, on which they came before.
    """

    async def work() -> bool:
        connection = SimpleNamespace(
            is_over=False, is_proved=True, received_at=asyncio.get_running_loop().time(), role=Role.DIALLER,
            host="10.0.0.9", peer="p", advance=lambda size: False,
        )  # fmt: skip
        setup = ConnectionSetup.__new__(ConnectionSetup)
        setup.narrow_paths, setup._listeners = NarrowPaths(), []
        driver: Any = Transport.__new__(Transport)
        driver.setup = setup
        driver.on_long_packets(SimpleNamespace(connection=SimpleNamespace(host=other)))
        channel = Channel(cast(Any, connection), addresses.parse("/ip4/10.0.0.9/tcp/1"), driver)
        channel.transport = cast(Any, SimpleNamespace(write=lambda data: None, writelines=lambda data: None))
        paths = [Path("bbr", round_trip_s, acked_bytes=acked) for round_trip_s, acked in seen]
        monkeypatch.setattr(channel, "path", lambda: paths[0] if len(paths) == 1 else paths.pop(0))
        channel.write(Slice(b"head", memoryview(bytes(sent_bytes))))
        for _ in seen[1:]:
            channel.buffer_updated(100)
        setup.check_path_mtu(channel, error or TimeoutError(110, "Connection timed out"))
        return "10.0.0.9" in setup.narrow_paths

    return asyncio.run(work())


BEFORE = (0.04, HANDSHAKE_BYTES)
HEARTBEATS = (0.04, HANDSHAKE_BYTES + 500)


@pytest.mark.parametrize(
    ("seen", "is_narrow"),
    [
        pytest.param([BEFORE, HEARTBEATS, HEARTBEATS], True, id="a hole"),
        pytest.param([(0.8, 3000), (0.9, 3400), (0.9, 3400)], True, id="a hole at 800 ms"),
        pytest.param([BEFORE, (0.9, HANDSHAKE_BYTES + PROOF_BYTES + 1), (9.0, 20_000)], False, id="a queue that grew"),
        pytest.param([(5.0, 3000), (9.0, 3000)], False, id="a queue that was full before"),
        pytest.param([(0.8, 3000), (1.1, 60_000), (1.1, 60_000)], False, id="losses at 800 ms"),
        pytest.param([(0.0, None), (0.0, None)], True, id="a kernel that does not count"),
    ],
)
def test_only_a_hole_makes_a_path_narrow(monkeypatch: pytest.MonkeyPatch, seen: list[Seen], is_narrow: bool) -> None:
    assert is_narrow_after(monkeypatch, *seen) is is_narrow


def test_where_long_packets_came_on_another_connection_a_lane_was_pushed_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a line of 64 kbit/s a lane got nothing through beside the first connection, and the path counted as narrow."""
    assert not is_narrow_after(monkeypatch, BEFORE, HEARTBEATS, other="10.0.0.9")
    assert is_narrow_after(monkeypatch, BEFORE, HEARTBEATS, other="10.0.0.8")


def test_where_nothing_long_was_sent_nothing_long_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_narrow_after(monkeypatch, BEFORE, HEARTBEATS, sent_bytes=500)
    assert not is_narrow_after(monkeypatch, BEFORE, HEARTBEATS, error=ConnectionResetError(104, "reset"))


def is_lost_at_a_node() -> bool:
    """What a probe of a node on this machine finds."""

    async def work() -> bool:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await loses_long_packets(f"/ip4/127.0.0.1/tcp/{port}")

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("acked", "loses"),
    [
        pytest.param([1, 1, 21, 21, 1500], False, id="both come"),
        pytest.param([1, 1, 21, 21], True, id="the long one is lost"),
        pytest.param([1, 1], False, id="the short one is late, too"),
        pytest.param([1, 1, 21, 21, None], False, id="the node hangs up"),
        pytest.param([None], False, id="the node hung up at once"),
    ],
)
def test_a_probe_compares_a_long_packet_with_a_short_one(
    monkeypatch: pytest.MonkeyPatch, acked: list[int | None], loses: bool
) -> None:
    """``acked``: bytes that the kernel counts as acknowledged, at each look; the last value stays."""
    told = list(acked)
    monkeypatch.setattr(detours, "_acked_bytes", lambda raw: told[0] if len(told) == 1 else told.pop(0))
    monkeypatch.setattr(detours, "PROBE_S", 0.2)

    assert is_lost_at_a_node() is loses


def test_a_system_that_counts_nothing_is_no_proof_that_long_packets_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a tunnel's hole would never be found on macOS."""
    monkeypatch.delattr(detours.socket, "TCP_INFO")
    assert is_lost_at_a_node()


def test_a_probe_of_a_real_path_and_of_nobody() -> None:
    async def work() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            assert not await loses_long_packets(f"/ip4/127.0.0.1/tcp/{port}")
        assert not await loses_long_packets(f"/ip4/127.0.0.1/tcp/{port}"), "nobody listens"

    asyncio.run(work())


@pytest.mark.parametrize("is_lossy", [True, False])
def test_a_node_that_answers_over_a_detour_alone_is_behind_a_hole_only_if_the_probe_says_so(
    monkeypatch: pytest.MonkeyPatch, is_lossy: bool
) -> None:
    """Without one, the first try came through a full queue too late, or lost a packet."""

    async def probe(text: str) -> bool:
        return is_lossy

    async def work() -> None:
        daemon, answers = p2pd.P2pdProcess.__new__(p2pd.P2pdProcess), [f"{p2pd.SILENT} within 3.0 s", None]

        async def connect(*_: object) -> str | None:
            return answers.pop(0)

        async def detour(where: list[str]) -> list[str]:
            return ["/ip4/127.0.0.1/tcp/2"]

        daemon.detoured, daemon._narrow_paths, daemon._deadlines = {}, NarrowPaths(), CallDeadlines()
        daemon._p2p, daemon._detours = None, cast(Any, SimpleNamespace(to=detour))
        monkeypatch.setattr(daemon, "_connect", connect)
        assert await daemon.connect(PeerId("node"), ["/ip4/10.0.0.9/tcp/1"], 10.0) is None
        assert ("10.0.0.9" in daemon._narrow_paths, daemon.detoured[PeerId("node")]) == (is_lossy, is_lossy)

    monkeypatch.setattr(p2pd, "loses_long_packets", probe)
    asyncio.run(work())
