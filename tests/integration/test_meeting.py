"""Real sockets on this machine: peers that meet through a third. Routers in between: tests/wan/test_homes.py."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import pytest

from p2pdiloco.nat import hole_punching, rendezvous_client, rendezvous_server
from p2pdiloco.nat import messages as intro
from p2pdiloco.nat.rendezvous_client import RendezvousClient
from p2pdiloco.nat.rendezvous_server import Relay, RendezvousServer
from p2pdiloco.net import abuse_limits
from p2pdiloco.net.handshake import WIRE_VERSION, Role
from p2pdiloco.net.path_monitor import LaneKeeper
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.swarm.duplicate_identity import find_duplicate
from p2pdiloco.transport.dialer import Dialler
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import DialError, Observer, RequestRefused, Transport, TransportLimits
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.control_messages import encode
from p2pdiloco.wire.directory_records import PeerRecord
from tests.integration.waiting import until

LISTEN = "/ip4/127.0.0.1/tcp/0"
LANES = 3


class Ear(Observer):
    """Writes down what comes."""

    def __init__(self) -> None:
        self.heard: list[tuple[bytes, bytes]] = []

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> None:
        self.heard.append((body, bytes(payload or b"")))

    def admit(self, peer: PeerId, body: bytes, size: int) -> bytes:
        return body


class One:
    """A peer that listens or not, with all that it takes to meet others, and to let others meet at it."""

    def __init__(
        self, tasks: Tasks, listen: str = "", version: int = 1, *, relay_bytes_per_s: float | None = None
    ) -> None:
        self.ear = Ear()
        self.points: list[str] = []
        """Where it looks for others again."""
        self.transport = Transport(
            Identity.ephemeral(), listen=listen, run="", version=version, limits=TransportLimits(lanes=LANES)
        )
        self.rendezvous = RendezvousClient(
            self.transport, self.transport, Dialler(), tasks, points_of=lambda _: self.points
        )
        self.server = RendezvousServer(self.transport, relay_bytes_per_s)

    def serve(self) -> AbstractAsyncContextManager[Transport]:
        return self.transport.serve(self.ear)

    @property
    def id(self) -> PeerId:
        return self.transport.peer_id


@asynccontextmanager
async def meeting(bytes_per_s: float | None = None, version: int = 1) -> AsyncIterator[tuple[One, One, One, str]]:
    """Ann and Bob, who listen nowhere, and a meeting point with its address."""
    async with Tasks() as tasks:
        ann, bob = One(tasks, "", version), One(tasks, "", version)
        hub = One(tasks, LISTEN, version, relay_bytes_per_s=bytes_per_s)
        async with hub.serve(), ann.serve(), bob.serve():
            (address,) = hub.transport.listen_addresses()
            for one in (ann, bob):
                await one.rendezvous.attend(address, (), b"")
            yield ann, bob, hub, address


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20.0):
            await work()

    asyncio.run(bounded())


def test_two_that_nobody_can_dial_meet_directly() -> None:
    async def work() -> None:
        async with meeting() as (ann, bob, hub, address):
            began = time.monotonic()
            assert await ann.rendezvous.connect(bob.id, [address]) == bob.id
            took_s = time.monotonic() - began
            channel = ann.transport.channel_of(bob.id)
            assert channel is not None
            assert channel.is_met
            assert not channel.connection.greeting.is_relayed
            assert ann.transport.send(bob.id, b"hello", b"x" * 100_000)
            await until(lambda: bob.ear.heard == [(b"hello", b"x" * 100_000)])
            assert hub.server.relay.carried_bytes == 0
            assert took_s < 1.0

    run(work)


def test_a_twin_that_nobody_can_dial_is_found_at_its_meeting_point() -> None:
    """A copy of a state folder, started behind another router: nobody saw it, and the original lost its place."""

    async def work() -> None:
        async with meeting(version=WIRE_VERSION) as (ann, bob, _, address):
            life = ann.transport.life
            record = PeerRecord((), points=(address,), life=life)
            another, unnamed = (msgspec.structs.replace(record, life=life) for life in ("another", ""))
            assert await find_duplicate(record, ann.id, None) == f"the rendezvous server {address}"
            assert await find_duplicate(another, ann.id, None) is None
            assert await find_duplicate(unnamed, bob.id, None) is not None

    run(work)


def test_who_is_at_a_point_that_we_attend_is_met_there_whatever_its_record_says() -> None:
    async def work() -> None:
        async with meeting() as (ann, bob, _, _):
            assert await ann.rendezvous.connect(bob.id, []) == bob.id

    run(work)


def test_what_a_point_told_of_us_stands_when_it_is_gone() -> None:
    """Else a member that was dialled through the bootstrap alone is no meeting point any more when that dies."""

    async def work() -> None:
        async with meeting() as (ann, _, hub, _):
            told = ann.rendezvous.observations
            assert [one.host for one in told] == ["127.0.0.1"]
            hub.transport.disconnect(ann.id, "it dies")
            await until(lambda: not ann.transport.peers())
            ann.rendezvous.forget_disconnected()
            ann.rendezvous.forget_disconnected()
            assert not ann.rendezvous.attended
            assert ann.rendezvous.observations == told

    run(work)


def test_where_no_direct_connection_comes_about_the_line_is_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hole_punching, "PUNCHES", 0)
    logged: list[dict[str, object]] = []
    monkeypatch.setattr(rendezvous_server.log, "info", lambda event, **told: logged.append({"event": event, **told}))

    async def work() -> None:
        async with meeting() as (ann, bob, hub, address):
            await ann.rendezvous.connect(bob.id, [address])
            payload = bytes(range(256)) * 4000
            assert ann.transport.send(bob.id, b"hello", payload)
            await until(lambda: bob.ear.heard == [(b"hello", payload)])
            point = hub.server
            assert point is not None
            assert point.introducer.relayed_pairs == 1
            assert point.relay.carried_bytes > len(payload)
            ann.transport.disconnect(bob.id, "enough")
            await until(lambda: point.introducer.relayed_pairs == 0)
            assert logged[-1]["bytes"] == point.relay.carried_bytes > len(payload)
            await ann.rendezvous.connect(bob.id, [address])
            await until(lambda: point.introducer.relayed_pairs == 1)
        await until(lambda: [line["event"] for line in logged] == ["relaying", "relayed"] * 2)
        assert logged[-1]["bytes"], "what ends because the relay does has carried something, too"

    run(work)


def test_a_pair_takes_another_relay_than_one_without_room_but_that_if_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hole_punching, "PUNCHES", 0)

    async def work() -> None:
        async with meeting() as (ann, bob, full, address), Tasks() as tasks:
            full.server.introducer.room = 0
            with pytest.raises(DialError, match="has no room"):
                await ann.rendezvous.connect(bob.id, [address])
            await ann.rendezvous.connect(bob.id, [address])
            assert full.server.introducer.relayed_pairs == 1
            roomy, eve = One(tasks, LISTEN), One(tasks)
            async with roomy.serve(), eve.serve():
                (other,) = roomy.transport.listen_addresses()
                for one in (bob, eve):
                    await one.rendezvous.attend(other, (), b"")
                await eve.rendezvous.attend(address, (), b"")
                await eve.rendezvous.connect(bob.id, [address, other])
                assert [one.server.introducer.relayed_pairs for one in (full, roomy)] == [1, 1]

    run(work)


def test_a_relay_that_learns_its_line_ends_the_pairs_beyond_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hole_punching, "PUNCHES", 0)

    async def work() -> None:
        async with meeting(bytes_per_s=1e6) as (ann, bob, hub, address):
            server = hub.server
            await ann.rendezvous.connect(bob.id, [address])
            server.follow_line(1e6, 1)
            assert server.introducer.relayed_pairs == 1, "nothing is known of the line"
            hub.transport.set_budget(1000.0, None)
            server.follow_line(1e6, 1)
            assert server.introducer.room == 0
            await until(lambda: bob.id not in ann.transport.peers() and ann.id not in bob.transport.peers())
            with pytest.raises(DialError, match="has no room"):
                await ann.rendezvous.connect(bob.id, [address])
            await ann.rendezvous.connect(bob.id, [address])
            server.follow_line(1e6, 1)
            (carried,) = {line.carried for line in server._lines.values() if line.carried is not None}
            assert not carried.cancelling(), "they have found no other relay"

    run(work)


def test_a_direct_connection_takes_a_relays_place_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with meeting() as (ann, bob, _, address):
            monkeypatch.setattr(hole_punching, "PUNCHES", 0)
            await ann.rendezvous.connect(bob.id, [address])
            assert bob.transport.channel_of(ann.id).connection.greeting.is_relayed  # type: ignore[union-attr]
            monkeypatch.setattr(hole_punching, "PUNCHES", 12)
            sent = []

            async def speak() -> None:
                for number in range(300):
                    sent.append((str(number).encode(), bytes([number % 256]) * 20_000))
                    assert ann.transport.send(bob.id, *sent[-1])
                    await asyncio.sleep(0.002)

            speaking = asyncio.create_task(speak())
            await asyncio.sleep(0.1)
            await bob.rendezvous.connect(ann.id, [address], may_relay=False)  # whoever dials: direct wins
            await speaking
            await until(lambda: len(bob.ear.heard) == len(sent))
            assert sorted(bob.ear.heard) == sorted(sent)
            for one, other in ((ann, bob), (bob, ann)):
                channel = one.transport.channel_of(other.id)
                assert channel is not None
                assert not channel.connection.greeting.is_relayed

    run(work)


def test_lanes_beside_a_punched_connection_are_punched_too() -> None:
    async def work() -> None:
        async with meeting() as (ann, bob, hub, address):
            ann.points = [address]
            await ann.rendezvous.connect(bob.id, [address])
            await until(lambda: ann.transport.lanes(bob.id) == bob.transport.lanes(ann.id) == LANES)
            payload = bytes(range(256)) * 20_000
            assert ann.transport.send(bob.id, b"hello", payload)
            assert bob.transport.send(ann.id, b"hello", payload)
            for one in (ann, bob):
                await until(lambda one=one: one.ear.heard == [(b"hello", payload)])
            mine = [channel for channel in ann.transport._channels.values() if channel.connection.peer == bob.id]
            assert [channel.is_met and bool(channel.connection.session.traffic.sent_bulk) for channel in mine] == [
                True
            ] * LANES
            assert hub.server.relay.carried_bytes == 0

    run(work)


def test_a_relay_carries_one_connection_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hole_punching, "PUNCHES", 0)

    async def work() -> None:
        async with meeting() as (ann, bob, _, address):
            ann.points = [address]
            await ann.rendezvous.connect(bob.id, [address])
            payload = bytes(300_000)
            assert ann.transport.send(bob.id, b"hello", payload)
            await until(lambda: bob.ear.heard == [(b"hello", payload)])
            assert ann.transport.lanes(bob.id) == 1
            (channel,) = (one for one in ann.transport._channels.values() if one.connection.peer == bob.id)
            assert LaneKeeper(channel.connection, {}, LANES, 60.0, 0.0).plan_lanes(None, None, 0.0) == [], (
                "nor are others tried"
            )

    run(work)


def test_a_flood_of_calls_by_a_liar_opens_few_lines() -> None:
    """A meeting point calls whoever attends it as often as it likes; its lines say nothing."""

    async def work() -> None:
        async with meeting() as (ann, _, hub, _):
            opened = 0
            held: list[socket.socket] = []

            async def say_nothing(raw: socket.socket) -> None:
                nonlocal opened
                opened += 1
                held.append(raw)

            hub.transport.setup.takers[intro.OPENING[:1]] = say_nothing
            refused: list[str] = []
            for number in range(4 * rendezvous_client.CALLS_AT_ONCE):
                call = encode(intro.Called(Identity.ephemeral().peer_id, bytes([number]) * intro.TICKET_BYTES, True))
                try:
                    await hub.transport.request(ann.id, call, timeout_s=5.0)
                except RequestRefused as error:
                    refused.append(str(error))
            assert len(refused) == 3 * rendezvous_client.CALLS_AT_ONCE
            assert all("rate limit" in text for text in refused)
            await until(lambda: opened == rendezvous_client.CALLS_AT_ONCE)
            for raw in held:
                raw.close()

    run(work)


async def call_often(hub: One, ann: PeerId, times: int, *, dials: bool = True) -> None:
    """As a liar at a meeting point does, one call after the other."""
    for number in range(times):
        call = intro.Called(Identity.ephemeral().peer_id, bytes([number]) * intro.TICKET_BYTES, dials)
        await hub.transport.request(ann, encode(call), timeout_s=5.0)


@asynccontextmanager
async def a_victim() -> AsyncIterator[tuple[int, list[str]]]:
    """The port of a machine that wants nothing of all this, and who came there."""
    came: list[str] = []

    async def knocked(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(writer.get_extra_info("peername")[0])
        writer.close()

    server = await asyncio.start_server(knocked, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], came


def test_who_is_called_knocks_few_times_where_a_liar_says_that_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the machine that is named shuts out whoever was called: 64 that came to nothing do that."""
    monkeypatch.setattr(abuse_limits, "VAIN_BURST", 3)

    async def work() -> None:
        async with meeting() as (ann, _, hub, _), a_victim() as (port, came):
            over = 0

            async def lie(raw: socket.socket) -> bool:
                nonlocal over
                loop = asyncio.get_running_loop()
                with raw:
                    await loop.sock_recv(raw, intro.OPENING_BYTES)
                    seen = intro.Seen("127.0.0.1", 9, "127.0.0.1", port, True)
                    await loop.sock_sendall(raw, intro.encode_seen(seen))
                    await loop.sock_recv(raw, 1)
                over += 1
                return False

            hub.transport.setup.takers[intro.OPENING[:1]] = lie
            await call_often(hub, ann.id, 8)
            await until(lambda: over == 8)
            assert len(came) == 3

    run(work)


def test_a_point_that_says_it_is_elsewhere_has_few_lines_opened_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has dialled us; where it can be dialled it says itself."""
    monkeypatch.setattr(abuse_limits, "VAIN_BURST", 3)

    async def work() -> None:
        async with Tasks() as tasks, a_victim() as (port, came):
            ann, hub = One(tasks, LISTEN), One(tasks)
            async with hub.serve(), ann.serve():
                await hub.transport.dial(f"{ann.transport.listen_addresses()[0]}")
                await ann.rendezvous.attend(f"/ip4/127.0.0.1/tcp/{port}/p2p/{hub.id}", (), b"")
                await call_often(hub, ann.id, 8)
                await until(lambda: not ann.rendezvous._coming)
                assert len(came) == 3

    run(work)


def test_a_meeting_point_that_nobody_attends_calls_nobody() -> None:
    async def work() -> None:
        async with meeting() as (ann, bob, _, address):
            await ann.rendezvous.connect(bob.id, [address])
            call = encode(intro.Called(Identity.ephemeral().peer_id, bytes(intro.TICKET_BYTES), True))
            with pytest.raises(RequestRefused, match="is not registered here"):
                await bob.transport.request(ann.id, call, timeout_s=5.0)

    run(work)


@pytest.mark.parametrize("said", [b"\xff" * 64, b"\x00\x00", b"\x00\x05abcde", b"!\x03no\xff", b""])
def test_garbage_on_a_line_ends_it_at_once(said: bytes) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as liar:
            liar.setblocking(False)

            async def lie() -> None:
                raw, _ = await loop.sock_accept(liar)
                with raw:
                    await loop.sock_recv(raw, intro.OPENING_BYTES)
                    await loop.sock_sendall(raw, said)

            lying = asyncio.create_task(lie())
            point = hole_punching.addresses.parse(f"/ip4/127.0.0.1/tcp/{liar.getsockname()[1]}")
            with pytest.raises(DialError, match="rendezvous server"):
                await hole_punching.meet(point, bytes(16), Role.DIALLER, may_relay=True, congestion="")
            await lying

    run(work)


def test_a_point_outside_the_run_that_a_record_names_costs_no_place() -> None:
    async def work() -> None:
        async with meeting() as (ann, bob, _, _), Tasks() as tasks:
            hub = One(tasks, LISTEN)
            async with hub.serve():
                (address,) = hub.transport.listen_addresses()
                await bob.rendezvous.attend(address, (), b"")
                assert await ann.rendezvous.connect(bob.id, [address]) == bob.id
                await until(lambda: hub.id not in ann.transport.peers())
                assert hub.id in bob.transport.peers(), "who attends stays"

    run(work)


def test_a_relay_keeps_to_its_budget_and_uses_it() -> None:
    rate = 4e6
    used = 0.0

    async def work() -> None:
        nonlocal used
        loop, relay = asyncio.get_running_loop(), Relay(rate)
        (a, left), (right, b) = socket.socketpair(), socket.socketpair()
        for one in (a, b, left, right):
            one.setblocking(False)
        carried = [0, 0]
        carrying = asyncio.create_task(relay.carry(left, right, carried))
        began, data = loop.time(), bytes(1_200_000)
        sending = asyncio.create_task(loop.sock_sendall(a, data))
        got = 0
        while got < len(data):
            got += len(await loop.sock_recv(b, 1 << 20))
        await sending
        took_s = loop.time() - began
        used = max(used, len(data) / took_s)
        assert (len(data) - 300_000) / took_s < 1.1 * rate, "the first turn, a socket's fill, is earned afterwards"
        a.close()
        assert await loop.sock_recv(b, 1) == b""
        b.close()
        await carrying
        assert carried == [len(data), 0]

    for _ in range(5):  # others on this machine can only make it slower
        if used <= 0.9 * rate:
            run(work)
    assert used > 0.9 * rate


def test_who_attends_learns_whether_it_can_be_dialled() -> None:
    async def work() -> None:
        async with meeting() as (_, _, hub, address), Tasks() as tasks:
            kim = One(tasks, LISTEN, relay_bytes_per_s=0.0)
            async with kim.serve():
                port = int(kim.transport.listen_addresses()[0].split("/")[4])
                token = kim.server.token
                told = (await kim.rendezvous.attend(address, (port, port), token)).observation
                assert (told.host, told.answers) == ("127.0.0.1", (True, True))
                (other,) = hub.transport.listen_addresses()
                theirs = int(other.split("/")[4])
                told = (await kim.rendezvous.attend(address, (theirs, 1), token)).observation
                assert told.answers == (False, False)  # somebody else's port does not count, nor one where nobody is
                greets = await asyncio.start_server(lambda _, writer: writer.write(b"SSH-2.0-whatever"), "127.0.0.1", 0)
                async with greets:
                    port = greets.sockets[0].getsockname()[1]
                    assert (await kim.rendezvous.attend(address, (port,), token)).observation.answers == (False,)

    run(work)


def test_a_point_dials_a_machine_back_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_server, "DIAL_BURST", 3)

    async def work() -> None:
        async with meeting() as (ann, _, _, address):
            assert (await ann.rendezvous.attend(address, (1, 1), b"")).observation.answers == (False, False)
            assert (await ann.rendezvous.attend(address, (1, 1), b"")).observation.answers == ()

    run(work)


def test_who_does_not_attend_is_not_called() -> None:
    async def work() -> None:
        async with meeting() as (ann, _, _, address):
            with pytest.raises(DialError, match="is not registered here"):
                await ann.rendezvous.connect(Identity.ephemeral().peer_id, [address])

    run(work)


def test_a_liar_at_a_meeting_point_costs_few_dials_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names an address where nobody wants to be dialled, then says nothing."""
    monkeypatch.setattr(hole_punching, "RELAY_S", 0.3)
    monkeypatch.setattr(hole_punching, "PUNCH_S", 1.0)
    dials = 0

    async def lie(raw: socket.socket, victim: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_recv(raw, intro.OPENING_BYTES)
        await loop.sock_sendall(raw, intro.encode_seen(intro.Seen("127.0.0.1", 9, "127.0.0.1", victim, True)))
        await asyncio.sleep(5.0)
        raw.close()

    async def work() -> None:
        nonlocal dials
        with socket.create_server(("127.0.0.1", 0)) as victim, socket.create_server(("127.0.0.1", 0)) as liar:
            for one in (victim, liar):
                one.setblocking(False)
            loop = asyncio.get_running_loop()

            async def listen() -> None:
                raw, _ = await loop.sock_accept(liar)
                await lie(raw, 1)  # nobody listens there: each dial is refused at once

            lying = asyncio.create_task(listen())
            real, began = hole_punching.sockets.sharing_port, time.monotonic()

            def counted(family: int, port: int, *, is_narrow: bool) -> socket.socket:
                nonlocal dials
                dials += port != 0
                return real(family, port, is_narrow=is_narrow)

            monkeypatch.setattr(hole_punching.sockets, "sharing_port", counted)
            point = hole_punching.addresses.parse(f"/ip4/127.0.0.1/tcp/{liar.getsockname()[1]}")
            with pytest.raises(DialError, match="did not connect in time"):
                await hole_punching.meet(point, bytes(16), Role.DIALLER, may_relay=True, congestion="")
            assert time.monotonic() - began < 2.0
            assert 0 < dials <= hole_punching.PUNCHES
            lying.cancel()

    run(work)


@pytest.mark.parametrize(
    ("host", "by", "is_dialable"),
    [
        ("203.0.113.9", "8.8.8.8", False),  # a documentation address: not global
        ("1.1.1.1", "8.8.8.8", True),
        ("127.0.0.1", "8.8.8.8", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("192.168.1.7", "8.8.8.8", False),
        ("192.168.1.7", "10.0.0.1", True),
        ("224.0.0.1", "10.0.0.1", False),
        ("0.0.0.0", "10.0.0.1", False),
        ("255.255.255.255", "10.0.0.1", False),
        ("169.254.1.1", "10.0.0.1", False),
        ("2606:4700::1", "8.8.8.8", True),
        ("::1", "2606:4700::1", False),
    ],
)
def test_what_a_meeting_point_may_have_dialled(host: str, by: str, is_dialable: bool) -> None:
    assert hole_punching.is_dialable(host, by) is is_dialable


def test_what_times_out_shortly_after_a_good_handshake_is_a_narrow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with meeting() as (ann, _, hub, address):
            channel = ann.transport.channel_of(hub.id)
            assert channel is not None
            shortened: list[socket.socket] = []
            monkeypatch.setattr(hole_punching.sockets, "shorten", shortened.append)
            await ann.transport.dial(address)
            ann.transport.on_lost(channel, "connection lost", TimeoutError(110, "Connection timed out"))
            await ann.transport.dial(address)
            assert shortened == [], "nothing long was lost"
            channel = ann.transport.channel_of(hub.id)
            assert channel is not None
            ann.transport.send(hub.id, b"x", bytes(5000))
            await until(lambda: channel.may_lose_long_packets)
            ann.transport.on_lost(channel, "connection lost", TimeoutError(110, "Connection timed out"))
            await ann.transport.dial(address)
            assert shortened, "and whoever else dials meanwhile"

    run(work)


def test_a_punched_way_that_is_narrow_is_punched_anew_with_short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with meeting() as (ann, bob, _, address):
            await ann.rendezvous.connect(bob.id, [address])
            channel = ann.transport.channel_of(bob.id)
            assert channel is not None
            assert channel.is_met
            ann.transport.send(bob.id, b"x", bytes(5000))
            await until(lambda: channel.may_lose_long_packets)
            ann.transport.on_lost(channel, "connection lost", TimeoutError(110, "Connection timed out"))
            await ann.rendezvous.connect(bob.id, [address])
            channel = ann.transport.channel_of(bob.id)
            assert channel is not None
            assert channel.is_met
            assert channel.transport is not None
            raw = channel.transport.get_extra_info("socket")
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= hole_punching.sockets.SHORT_BYTES

    run(work)


def test_a_line_that_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_server, "OPENING_S", 0.2)

    async def work() -> None:
        async with meeting() as (_, _, hub, address):
            loop, point, worth = asyncio.get_running_loop(), hub.server, []
            assert point is not None

            async def line(raw: socket.socket) -> bool:
                worth.append(await point.serve_line(raw))
                return worth[-1]

            hub.transport.setup.takers[intro.OPENING[:1]] = line
            for said in (b"p", intro.encode_opening(bytes(16), 1), b"p" * 34, intro.OPENING):
                raw = socket.socket()
                raw.setblocking(False)
                await loop.sock_connect(raw, ("127.0.0.1", int(address.split("/")[4])))
                await loop.sock_sendall(raw, said)
                async with asyncio.timeout(2.0):
                    while await loop.sock_recv(raw, 100):
                        pass
                raw.close()
            await until(lambda: worth == [False] * 4)
            assert hub.transport.peers()  # the others are as they were

    run(work)


def test_lines_that_show_no_ticket_make_room_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_server, "BEGINNING", 4)

    async def work() -> None:
        async with meeting() as (ann, bob, _, address):
            loop, port, silent = asyncio.get_running_loop(), int(address.split("/")[4]), []
            for _ in range(6):
                raw = socket.socket()
                raw.setblocking(False)
                silent.append(raw)
                await loop.sock_connect(raw, ("127.0.0.1", port))
                await loop.sock_sendall(raw, intro.OPENING[:1])
            async with asyncio.timeout(rendezvous_server.OPENING_S / 2):
                assert [await loop.sock_recv(raw, 1) for raw in silent[:2]] == [b"", b""]
            assert await ann.rendezvous.connect(bob.id, [address]) == bob.id
            for raw in silent:
                raw.close()

    run(work)
