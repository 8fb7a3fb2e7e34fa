"""How peers learn where others can be met: rosters, ladders and meeting points on real sockets, and a directory that
says nothing new. Routers in between, and processes: tests/wan."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import cast

import pytest

from p2pdiloco.discovery.directory import Directory
from p2pdiloco.nat import hole_punching
from p2pdiloco.nat import messages as intro
from p2pdiloco.nat.rendezvous_client import Registration
from p2pdiloco.nat.rendezvous_server import TICK_S, USUAL_RELAYS, RendezvousServer
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.swarm import peer_manager as peer_manager_module
from p2pdiloco.swarm import reachability as reachability_module
from p2pdiloco.swarm import run_lookup
from p2pdiloco.swarm.connect import DIAL_S
from p2pdiloco.swarm.known_peers import KnownPeers
from p2pdiloco.swarm.lookup_policy import LookupPolicy
from p2pdiloco.swarm.membership_sync import MembershipSync
from p2pdiloco.swarm.peer_manager import PeerManager
from p2pdiloco.swarm.reachability import Reachability, drawn_points
from p2pdiloco.swarm.run_lookup import RunLookup, observer_transport
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import Observer, Transport
from p2pdiloco.wire.control_messages import encode
from p2pdiloco.wire.directory_records import PeerRecord, PointRecord
from tests.integration.waiting import until

LISTEN = "/ip4/127.0.0.1/tcp/0"
RUN = RunId("run")


class Board:
    """A directory that knows of each peer what it said first, and no more."""

    def __init__(self) -> None:
        self.first: dict[PeerId, bytes] = {}
        self.hub: dict[PeerId, bytes] = {}

    def of(self, peer: PeerId) -> Directory:
        return cast(Directory, Place(self, peer))


class Place:
    """One peer's part of it."""

    def __init__(self, board: Board, peer: PeerId) -> None:
        self._board, self._peer = board, peer

    def screen_peers(self, run: RunId, accepts: Callable[[PeerId, bytes], bool]) -> None:
        """All are members."""

    @staticmethod
    def now_s() -> float:
        return asyncio.get_running_loop().time()

    @staticmethod
    def visible_addresses() -> list[str]:
        return []

    async def publish_peer(self, run: RunId, record: bytes, ttl_s: float, group: str = "") -> None:
        self._board.first.setdefault(self._peer, record)

    async def peers(self, run: RunId, group: str = "") -> dict[PeerId, bytes]:
        return dict(self._board.first)

    async def points(self) -> dict[PeerId, bytes]:
        return dict(self._board.hub)


class OpenRun:
    """A run in which everybody is a member."""

    chain = b""

    def observes(self, peer: PeerId) -> bool:
        return False

    def was_removed(self, peer: PeerId) -> bool:
        return False


class Member(Observer):
    """A node's connections, and nothing else of it."""

    def __init__(self, board: Board, listen: str, folder: Path, relay_bytes_per_s: float | None = None) -> None:
        identity = Identity.ephemeral()
        self.id, directory = identity.peer_id, board.of(identity.peer_id)
        self.transport = Transport(identity, listen=listen, run=RUN, version=WIRE_VERSION)
        known, lookup = KnownPeers(self.id), LookupPolicy(self.id, frozenset)
        self.reachability = Reachability(
            identity,
            directory,
            self.transport,
            known,
            lookup,
            announced=(),
            relay_bytes_per_s=relay_bytes_per_s,
            maps_port=False,
            payload_rate=lambda: (100_000.0, 4),
        )
        self.peer_manager = PeerManager(
            RUN,
            directory,
            self.transport,
            known,
            lookup,
            cast(MembershipSync, OpenRun()),
            self.reachability.connector,
            record=self.reachability.record,
            began_s=directory.now_s(),
            cache=folder / f"{self.id}.json",
            duplicate_seen=lambda _: None,
            group_bits=lambda: 0,
            is_leaving=lambda peer: False,
        )

    def serve(self) -> AbstractAsyncContextManager[Transport]:
        return self.transport.serve(self)


def test_a_relayed_pair_meets_at_a_member_when_the_bootstrap_dies_though_the_directory_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hole_punching, "PUNCHES", 0)
    monkeypatch.setattr(peer_manager_module, "ROUND_S", 0.1)
    monkeypatch.setattr(reachability_module, "LOOK_S", 0.1)

    async def work() -> None:
        board = Board()
        hub = Transport(Identity.ephemeral(), listen=LISTEN, run="", version=WIRE_VERSION)
        server = RendezvousServer(hub, None)
        async with AsyncExitStack() as stack:
            dying = await stack.enter_async_context(AsyncExitStack())
            await dying.enter_async_context(hub.serve(Observer()))
            board.hub = {hub.peer_id: encode(PointRecord(tuple(hub.listen_addresses())))}
            ann, kim, pub = (Member(board, listen, tmp_path) for listen in ("", "", LISTEN))
            for one in (ann, kim, pub):
                await stack.enter_async_context(one.serve())
                await stack.enter_async_context(one.reachability)
                for keeping in (one.peer_manager.keep(), one.reachability.keep(lambda _: None)):
                    stack.callback(asyncio.ensure_future(keeping).cancel)
            point = pub.reachability.server
            await until(lambda: all(len(one.transport.peers()) == 2 for one in (ann, kim, pub)))
            assert server.introducer.relayed_pairs > 0, "the bootstrap is asked first"
            await until(lambda: {*point._attending} == {ann.id, kim.id})
            await dying.aclose()
            await until(lambda: point.introducer.relayed_pairs == 1)
            await until(lambda: {*ann.transport.peers()} == {kim.id, pub.id})
            assert pub.reachability.record().is_point, "nobody is left who could say otherwise"

    async def bounded() -> None:
        async with asyncio.timeout(30.0):
            await work()

    asyncio.run(bounded())


def test_a_member_relays_what_its_line_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability_module, "LOOK_S", 0.01)

    async def work() -> None:
        one = Member(Board(), LISTEN, tmp_path, relay_bytes_per_s=1e6)
        relay, introducer = one.reachability.server.relay, one.reachability.server.introducer
        assert introducer.room == USUAL_RELAYS
        async with one.serve(), one.reachability:
            one.transport.set_budget(500_000.0, None)
            keeping = asyncio.ensure_future(one.reachability.keep(lambda _: None))
            await until(lambda: introducer.room == 4)
            assert relay.budget.turn_bytes == int(400_000 * TICK_S)
            assert one.reachability.record().room == 4
            for budget, room, told in ((600_000.0, 5, 4), (900_000.0, 8, 8), (700_000.0, 6, 8), (500_000.0, 4, 4)):
                one.transport.set_budget(budget, None)
                await until(lambda room=room: introducer.room == room)  # type: ignore[misc]
                assert one.reachability.record().room == told
            keeping.cancel()

    asyncio.run(work())


def test_a_peer_moves_to_the_points_that_it_draws_and_stays_where_none_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability_module, "LOOK_S", 0.01)
    hubs = [PeerId(f"hub{number}") for number in range(5)]
    order, silent = [*hubs[2:]], {hubs[1]}

    async def work() -> None:
        home = Member(Board(), "", tmp_path).reachability

        async def candidates() -> dict[PeerId, list[str]]:
            return {hub: [hub] for hub in order}

        async def attend(where: Sequence[str], _: object) -> None:
            if where[0] not in silent:
                found = intro.Attended("192.0.2.1", 4100)
                home.client.attended[PeerId(where[0])] = Registration(f"/ip4/192.0.2.1/tcp/1/p2p/{where[0]}", found)

        monkeypatch.setattr(home, "_candidates", candidates)
        monkeypatch.setattr(home, "_attend", attend)
        monkeypatch.setattr(home.client, "forget_disconnected", lambda: None)
        async with home:
            keeping = asyncio.ensure_future(home.keep(lambda _: None))
            await until(lambda: {*home.client.attended} == {*hubs[2:]})
            order[:] = hubs  # two come that it prefers, of which one does not answer
            await until(lambda: {*home.client.attended} == {hubs[0], hubs[2], hubs[3]})
            await asyncio.sleep(0.05)
            assert {*home.client.attended} == {hubs[0], hubs[2], hubs[3]}
            keeping.cancel()

    asyncio.run(work())


def test_points_are_drawn_by_their_room() -> None:
    rooms = {PeerId(f"slow{number}"): 4 for number in range(8)} | {PeerId(f"fast{number}"): 80 for number in range(2)}
    first = Counter(drawn_points(PeerId(f"home{number}"), rooms)[0][:4] for number in range(1000))
    assert first["fast"] / 1000 == pytest.approx(2 * 81 / (2 * 81 + 8 * 5), abs=0.05)


def test_who_asks_around_does_not_wait_for_those_who_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one who takes connections and says nothing."""
    monkeypatch.setattr(run_lookup, "STRAGGLERS_S", 0.1)

    async def work() -> None:
        board = Board()
        pub = Member(board, LISTEN, tmp_path)
        with socket.create_server(("127.0.0.1", 0)) as gone:
            async with pub.serve(), observer_transport(Identity.ephemeral()) as asking:
                where = f"/ip4/127.0.0.1/tcp/{gone.getsockname()[1]}"
                board.first[Identity.ephemeral().peer_id] = encode(PeerRecord((where,)))
                board.first[pub.id] = encode(PeerRecord(tuple(pub.transport.listen_addresses())))
                began = asyncio.get_running_loop().time()
                assert await RunLookup(board.of(asking.peer_id)).dial_any(asking, RUN) == [pub.id]
                assert asyncio.get_running_loop().time() - began < DIAL_S

    asyncio.run(work())


@pytest.mark.parametrize(
    ("told", "is_dialable", "is_met"),
    [
        ([True], True, False),
        ([False], False, True),
        ([True, False], True, True),
        ([True, False, False], False, True),
        ([True, True, False], True, True),
        ([True, True, True], True, False),
    ],
)
def test_one_meeting_point_of_three_cannot_say_that_a_home_can_be_dialled(
    tmp_path: Path, told: list[bool], is_dialable: bool, is_met: bool
) -> None:
    """Where they differ, others are told where it can be met, whatever they try first."""

    async def work() -> None:
        home = Member(Board(), "", tmp_path)
        for number, says in enumerate(told):
            found = intro.Attended("192.0.2.1", 4100, (says, says))
            home.reachability.client.attended[PeerId(str(number))] = Registration(f"/ip4/192.0.2.{number}", found)
        assert home.reachability.is_dialable is home.reachability.is_directory_dialable is is_dialable
        assert bool(home.reachability.points) is is_met

    asyncio.run(work())
