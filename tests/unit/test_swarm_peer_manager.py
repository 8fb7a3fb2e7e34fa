"""How peers of a run are kept, and how two processes with one identity find each other; in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from p2pdiloco.discovery.directory import Directory, DirectoryError
from p2pdiloco.nat.messages import Reachable
from p2pdiloco.net.endpoint import LEAVING
from p2pdiloco.protocol.groups import group_of
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.swarm import known_peers
from p2pdiloco.swarm import peer_manager as peer_manager_module
from p2pdiloco.swarm.connect import ConnectFallback
from p2pdiloco.swarm.known_peers import KnownPeers
from p2pdiloco.swarm.lookup_policy import FEW, LookupPolicy
from p2pdiloco.swarm.membership_sync import MembershipSync
from p2pdiloco.swarm.neighbours import ENTRIES, MOST, own_topics, surplus, topic_of, wanted
from p2pdiloco.swarm.peer_manager import LEFT_S, RECORD_LIFE_S, SURPLUS, PeerManager
from p2pdiloco.transport.transport import DialError, RequestError, RequestRefused, Transport
from p2pdiloco.wire.control_messages import decode_as, encode
from p2pdiloco.wire.directory_records import PeerRecord
from tests.peer_sim.loop import VirtualLoop

ME, BOB, WATCHER, RUN = PeerId("me"), PeerId("bob"), PeerId("watcher"), RunId("run")
HUB, PUB = "/ip4/1.1.1.1/tcp/1/p2p/hub", "/ip4/2.2.2.2/tcp/1/p2p/pub"
CUT = "connection reset by peer"
LATENCY_S = 0.05
RESOLVED_S = 6.0
"""A few looks."""


class Board:
    """A directory: of one publisher's records the one that expires last stands."""

    def __init__(self) -> None:
        self.published = self.refused = 0
        """Publications to come that fail."""
        self.standing: dict[PeerId, tuple[float, bytes]] = {}
        """In the run's topic."""
        self.groups: dict[str, dict[PeerId, bytes]] = {}
        """In the topics of its groups."""
        self.accepts: Callable[[PeerId, bytes], bool] = lambda _peer, _record: True

    def screen_peers(self, run: RunId, accepts: Callable[[PeerId, bytes], bool]) -> None:
        self.accepts = accepts

    @staticmethod
    def now_s() -> float:
        return asyncio.get_running_loop().time()

    async def publish_peer(self, run: RunId, record: bytes, ttl_s: float, group: str = "") -> None:
        self.published += 1
        expires_s = self.now_s() + ttl_s
        await asyncio.sleep(LATENCY_S)
        if self.refused:
            self.refused -= 1
            raise DirectoryError("publishing failed")
        if group:
            self.groups.setdefault(group, {})[ME] = record
            return
        self.standing[ME] = max(self.standing.get(ME, (0.0, b"")), (expires_s, record))

    async def withdraw_peer(self, run: RunId, group: str = "") -> None:
        (self.groups[group] if group else self.standing).pop(ME)

    async def peers(self, run: RunId, group: str = "") -> dict[PeerId, bytes]:
        await asyncio.sleep(LATENCY_S)
        if group:
            return dict(self.groups.get(group, {}))
        return {peer: record for peer, (_, record) in self.standing.items() if self.accepts(peer, record)}


class Lines:
    """Connections to whom a test says, and what they were told."""

    peer_id = ME

    def __init__(self, life: str) -> None:
        self.life = life
        self.lives: dict[PeerId, str] = {}
        self.told: list[tuple[PeerId, tuple[str, ...]]] = []
        self.failing: list[RequestError] = []

    def peers(self) -> list[PeerId]:
        return list(self.lives)

    def life_of(self, peer: PeerId) -> str | None:
        return self.lives.get(peer)

    def channel_of(self, peer: PeerId) -> None:
        return None

    def answer_requests(self, kind: type[object], answer: object) -> None:
        """Tests say what peers tell."""

    def add_disconnect_callback(self, callback: object) -> None:
        """Tests say who is gone."""

    def disconnect(self, peer: PeerId, reason: str) -> None:
        assert reason == SURPLUS
        del self.lives[peer]

    async def request(self, peer: PeerId, body: bytes, *, timeout_s: float) -> None:
        await asyncio.sleep(LATENCY_S)
        if self.failing:
            raise self.failing.pop()
        self.told.append((peer, decode_as(body, Reachable).record.points))


class NoWay:
    """Nobody can be reached."""

    def __init__(self) -> None:
        self.dialled: list[PeerId] = []

    async def connect(self, peer: PeerId, record: PeerRecord) -> PeerId:
        self.dialled.append(peer)
        raise DialError("no way")


class OpenRun:
    """A run in which everybody is a member."""

    chain = b""

    def __init__(self) -> None:
        self.out: set[PeerId] = set()

    def was_removed(self, peer: PeerId) -> bool:
        return peer in self.out

    def observes(self, peer: PeerId) -> bool:
        return peer == WATCHER

    def is_announced_by_member(self, peer: PeerId, chain: bytes) -> bool:
        return True


class Process:
    """One that takes part as ME, and the twins that it saw."""

    def __init__(self, board: Board, life: str, folder: Path) -> None:
        self.seen: dict[str, float] = {}
        self.record = PeerRecord((f"/ip4/127.0.0.1/tcp/1/p2p/{life}",))
        self.lines = Lines(life)
        self.run = OpenRun()
        self.connector = NoWay()
        self.known = KnownPeers(ME)
        self.lookup = LookupPolicy(ME, frozenset)
        self.group_bits = 0
        self.leaving: set[PeerId] = set()
        self.peer_manager = PeerManager(
            RUN,
            cast(Directory, board),
            cast(Transport, self.lines),
            self.known,
            self.lookup,
            cast(MembershipSync, self.run),
            cast(ConnectFallback, self.connector),
            record=lambda: self.record,
            began_s=board.now_s(),
            cache=folder / f"{life}.json",
            duplicate_seen=self._saw,
            group_bits=lambda: self.group_bits,
            is_leaving=lambda peer: peer in self.leaving,
        )

    def _saw(self, record: PeerRecord) -> None:
        self.seen.setdefault(record.life, Board.now_s())


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(asyncio.ensure_future(main(), loop=loop))
    finally:
        loop.close()


async def running(*processes: Process, apart_s: float, for_s: float) -> None:
    tasks = []
    for process in processes:
        tasks.append(asyncio.ensure_future(process.peer_manager.keep()))
        await asyncio.sleep(apart_s)
    await asyncio.sleep(for_s)
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("apart_s", [0.0, 0.01, 0.2, 1.0, 1.99, 2.1, 5.0, 9.9])
def test_two_that_started_at_once_see_each_other(apart_s: float, tmp_path: Path) -> None:
    """Their rounds are as long as each other's, so that one always announces just after the other."""

    async def main() -> None:
        board = Board()
        first, second = Process(board, "first", tmp_path), Process(board, "second", tmp_path)
        await running(first, second, apart_s=apart_s, for_s=RESOLVED_S)
        assert set(second.seen) == {"first"}, "the one that has to give way"
        assert set(first.seen) <= {"second"}

    in_virtual_time(main)


def test_who_is_alone_sees_nobody_and_stays_announced(tmp_path: Path) -> None:
    async def main() -> None:
        board = Board()
        only = Process(board, "only", tmp_path)
        await running(only, apart_s=0.0, for_s=3 * RECORD_LIFE_S)
        assert not only.seen
        assert board.standing[ME][0] > Board.now_s() + RECORD_LIFE_S / 2

    in_virtual_time(main)


def test_what_announcements_cost_does_not_grow_with_the_swarm(tmp_path: Path) -> None:
    """Each brings all records along. Of four times as many each announces itself a quarter as often, and stays."""

    async def published(others: int) -> int:
        board = Board()
        one = Process(board, "one", tmp_path)
        one.lines.lives = {PeerId(f"p{i}"): "" for i in range(others)}
        await running(one, apart_s=0.0, for_s=5 * RECORD_LIFE_S)
        assert board.standing[ME][0] > Board.now_s() + RECORD_LIFE_S / 3
        before = board.published
        await running(one, apart_s=0.0, for_s=5 * RECORD_LIFE_S)
        return board.published - before

    async def main() -> None:
        assert await published(4 * FEW) <= await published(FEW) / 3

    in_virtual_time(main)


def test_news_that_the_directory_did_not_take_is_told_again_soon(tmp_path: Path) -> None:
    """Where a peer can be met is news, and comes while the directory's node changes how it takes part."""

    async def main() -> None:
        board = Board()
        only = Process(board, "only", tmp_path)
        telling = asyncio.ensure_future(only.peer_manager.keep())
        await asyncio.sleep(RESOLVED_S)
        only.record = PeerRecord((), points=("/ip4/1.1.1.1/tcp/1/p2p/hub",))
        board.refused = 2
        await asyncio.sleep(RESOLVED_S)
        assert b"hub" in board.standing[ME][1]
        telling.cancel()

    in_virtual_time(main)


def test_who_is_connected_is_told_how_we_can_be_reached_and_again_when_that_changes(tmp_path: Path) -> None:
    """Where a relayed pair meets when its meeting point dies each knows before: the directory would say it too late."""

    async def main() -> None:
        one = Process(Board(), "one", tmp_path)
        told = one.lines.told
        one.peer_manager.handle_reachable(BOB, PeerRecord((), points=(HUB,)))
        one.lines.lives = {BOB: "first", PeerId("only asks"): "1"}
        telling = asyncio.ensure_future(one.peer_manager.keep())
        await asyncio.sleep(RESOLVED_S)
        assert told == [(BOB, ())], "once"
        one.record = PeerRecord((), points=(HUB, PUB))
        one.lines.failing = [RequestError("no answer within 8 s")]
        await asyncio.sleep(RESOLVED_S)
        assert told[1:] == [(BOB, (HUB, PUB))], "what did not arrive is told again, and what did is not"
        one.lines.lives[BOB] = "second"
        await asyncio.sleep(RESOLVED_S)
        assert told[2:] == [(BOB, (HUB, PUB))], "a new process knows nothing of us"
        one.record = PeerRecord((), points=(PUB,))
        one.lines.failing = [RequestRefused("a release that does not know it")]
        await asyncio.sleep(RESOLVED_S)
        assert len(told) == 3, "who refuses is not asked again"
        telling.cancel()

    in_virtual_time(main)


def test_what_a_connected_peer_says_of_itself_is_newer_than_the_directory(tmp_path: Path) -> None:
    async def main() -> None:
        board = Board()
        one = Process(board, "one", tmp_path)
        # no addresses: they would be saved, by a thread, which lives in another time than this loop
        first, last = PeerRecord((), points=(HUB,)), PeerRecord((), points=(HUB,), is_point=True)
        later = PeerRecord((), points=(PUB,))
        board.standing[BOB] = (Board.now_s() + RECORD_LIFE_S, encode(first))
        one.lines.lives = {BOB: "life"}
        telling = asyncio.ensure_future(one.peer_manager.keep())
        await asyncio.sleep(RESOLVED_S)
        assert one.known.records()[BOB] == first
        one.peer_manager.handle_reachable(BOB, last)
        one.peer_manager.handle_reachable(WATCHER, last)
        for _ in range(3):
            one.lines.lives = {BOB: "life", PeerId(str(Board.now_s())): "somebody comes: the directory is read"}
            await asyncio.sleep(RESOLVED_S)
            assert one.known.records() == {BOB: last}
        one.lines.lives = {}
        one.peer_manager.handle_disconnected(BOB, CUT)
        board.standing[BOB] = (Board.now_s() + RECORD_LIFE_S, encode(later))
        await asyncio.sleep(RESOLVED_S)
        assert one.known.records()[BOB] == later, "who is gone says nothing more"
        telling.cancel()

    in_virtual_time(main)


class Gone:
    """Bob, who was connected, and whose record is still in the directory."""

    def __init__(self, folder: Path) -> None:
        self.board = Board()
        self.began_s = Board.now_s()
        self.one = Process(self.board, "one", folder)
        self.one.lines.lives = {BOB: "first"}
        self.announced(self.began_s)
        self.one.peer_manager.handle_reachable(BOB, PeerRecord((), points=(HUB,)))

    def announced(self, began_s: float) -> None:
        record = PeerRecord((), points=(HUB,), life=str(began_s), began_s=began_s)
        self.board.standing[BOB] = (Board.now_s() + RECORD_LIFE_S, encode(record))

    def goes(self, reason: str) -> None:
        self.one.lines.lives = {}
        self.one.connector.dialled.clear()
        self.one.peer_manager.handle_disconnected(BOB, reason)

    def dials(self) -> int:
        return len(self.one.connector.dialled)


def test_who_said_goodbye_is_dialled_when_it_has_come_back_and_else_seldom(tmp_path: Path) -> None:
    async def main() -> None:
        gone = Gone(tmp_path)
        keeping = asyncio.ensure_future(gone.one.peer_manager.keep())
        await asyncio.sleep(RESOLVED_S)
        gone.goes(CUT)
        await asyncio.sleep(5 * RESOLVED_S)
        assert gone.dials() >= 3, "who is cut off is dialled again and again"
        gone.one.lines.lives = {BOB: "first"}
        await asyncio.sleep(RESOLVED_S)
        gone.goes(LEAVING)
        await asyncio.sleep(LEFT_S - RESOLVED_S)
        assert gone.dials() == 0, "its old record is no news"
        await asyncio.sleep(9 * LEFT_S + 2 * RESOLVED_S)
        assert 9 <= gone.dials() <= 10, "it may be back, and nobody says so"
        gone.one.connector.dialled.clear()
        gone.announced(Board.now_s())
        await asyncio.sleep(5 * RESOLVED_S)
        assert gone.dials() >= 3, "another life of it is announced"
        keeping.cancel()

    in_virtual_time(main)


def test_who_said_goodbye_and_is_connected_again_is_dialled_as_ever(tmp_path: Path) -> None:
    async def main() -> None:
        gone = Gone(tmp_path)
        keeping = asyncio.ensure_future(gone.one.peer_manager.keep())
        await asyncio.sleep(RESOLVED_S)
        gone.goes(LEAVING)
        await asyncio.sleep(RESOLVED_S)
        gone.one.lines.lives = {BOB: "second"}
        gone.one.peer_manager.handle_reachable(BOB, PeerRecord((), points=(PUB,)))
        await asyncio.sleep(RESOLVED_S)
        gone.goes(CUT)
        await asyncio.sleep(5 * RESOLVED_S)
        assert gone.dials() >= 3
        keeping.cancel()

    in_virtual_time(main)


@pytest.mark.parametrize("banned", [BOB, ME])
def test_who_is_banned_is_not_dialled_and_dials_nobody(tmp_path: Path, banned: PeerId) -> None:
    async def main() -> None:
        gone = Gone(tmp_path)
        keeping = asyncio.ensure_future(gone.one.peer_manager.keep())
        await asyncio.sleep(RESOLVED_S)
        gone.one.run.out.add(banned)
        gone.goes("who is banned is parted from")
        await asyncio.sleep(2 * LEFT_S)
        assert gone.dials() == 0
        gone.one.run.out.clear()  # another chain of it is known
        await asyncio.sleep(RESOLVED_S)
        assert gone.dials()
        keeping.cancel()

    in_virtual_time(main)


def test_records_of_nobody_keep_no_newcomer_from_being_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an open run anybody publishes as many as he likes; what is known is kept over restarts, too."""
    monkeypatch.setattr(known_peers, "MAX_KNOWN", 8)
    monkeypatch.setattr(peer_manager_module, "ROOM", 2)

    async def main() -> None:
        board = Board()
        one = Process(board, "one", tmp_path)
        record = (Board.now_s() + 1e6, encode(PeerRecord((), points=(HUB,))))
        for number in range(12):
            board.standing[PeerId(f"forged {number}")] = record
        keeping = asyncio.ensure_future(one.peer_manager.keep())
        await asyncio.sleep(RESOLVED_S)
        one.lines.lives = {BOB: "life"}
        one.peer_manager.handle_reachable(BOB, PeerRecord((), points=(PUB,)))
        assert BOB in one.known.records(), "who is here is known, whoever else is not"
        newcomer = PeerId("newcomer")
        board.standing[newcomer] = record
        met = 0
        for _ in range(40):
            one.lines.lives = {BOB: "life", PeerId(str(Board.now_s())): "somebody comes: the directory is read"}
            await asyncio.sleep(RESOLVED_S)
            known = one.known.records()
            met += newcomer in known
            assert BOB in known
            assert len(known) <= 8
        assert met
        keeping.cancel()

    in_virtual_time(main)


def test_a_record_that_began_when_its_peer_left_does_not_bring_it_back() -> None:
    """It is of the process that has left: a later one begins later."""
    known = KnownPeers(ME)
    assert known.learn(BOB, PeerRecord((HUB,), began_s=5.0), 0.0)
    known._known[BOB].left_s = 5.0
    assert not known.learn(BOB, PeerRecord((HUB,), began_s=5.0), 1.0)
    assert known._known[BOB].left_s == 5.0
    assert known.learn(BOB, PeerRecord((HUB,), began_s=5.1), 2.0)


# -- large runs --------------------------------------------------------------------------------------------------------

MANY = [PeerId(f"peer {i}") for i in range(1000)]


def test_in_a_large_run_a_peer_dials_its_group_and_one_of_each_other_group() -> None:
    """A bridge is drawn for each pair, so that nobody is dialled by all."""
    assert wanted(ME, 0, MANY, ()) == MANY, "a small run: all"
    mine = [peer for peer in MANY if group_of(peer, 4) == group_of(ME, 4)]
    found = wanted(ME, 4, MANY, ())
    assert found[: len(mine)] == mine
    assert sorted(group_of(peer, 4) for peer in found[len(mine) :]) == [g for g in range(16) if g != group_of(ME, 4)]
    assert wanted(ME, 4, MANY, found[len(mine) :]) == mine, "one of each other group is enough"
    dialled = Counter(peer for me in MANY for peer in wanted(me, 4, MANY, ()) if group_of(peer, 4) != group_of(me, 4))
    assert max(dialled.values()) < 3 * 15


def test_a_peer_with_too_many_connections_ends_those_that_it_needs_least() -> None:
    """It keeps its group, and one of each other group. In a small run it ends none."""
    assert surplus(ME, 0, MANY) == []
    assert surplus(ME, 4, MANY[:MOST]) == []
    spare = surplus(ME, 4, MANY[: MOST + 10])
    assert len(spare) == 10
    kept = set(MANY[: MOST + 10]).difference(spare)
    assert {group_of(peer, 4) for peer in kept} == set(range(16))
    assert not [peer for peer in spare if group_of(peer, 4) == group_of(ME, 4)]
    assert not set(wanted(ME, 4, MANY[: MOST + 10], ())) & set(spare), "it does not end what it would dial"


def test_peers_that_leave_are_not_needed_where_another_one_stays() -> None:
    """Nor are they kept beyond the most: members that say it for ever would fill the table."""
    connected = MANY[: MOST + 10]
    first = {group: peer for peer in surplus(ME, 4, connected, most=0)[::-1] if (group := group_of(peer, 4))}
    leaving = {peer for peer in connected if peer not in first.values()}
    kept = set(connected).difference(surplus(ME, 4, connected, leaving=leaving))
    assert len(kept) == MOST
    assert set(first.values()) <= kept


def test_newcomers_find_some_peers_of_each_large_run() -> None:
    for peers, bits in ((60, 1), (150, 2), (1000, 5)):
        topics = [own_topics(peer, bits) for peer in MANY[:peers]]
        assert all(topic_of(group_of(peer, bits), bits) in its for peer, its in zip(MANY, topics, strict=False))
        assert ENTRIES / 2 < sum("" in its for its in topics) < 2 * ENTRIES
    assert own_topics(ME, 0) == [""]


def test_in_a_large_run_a_peer_looks_for_its_group_and_for_one_of_each_other_group(tmp_path: Path) -> None:
    """It announces itself in its group's topic, and is no longer in the run's unless it is an entry."""

    async def main() -> None:
        board, bits = Board(), 5
        me = Process(board, "only", tmp_path)
        record = encode(PeerRecord((), points=(HUB,)))
        for peer in MANY:
            board.groups.setdefault(topic_of(group_of(peer, bits), bits), {})[peer] = record
        board.standing[MANY[0]] = (1e9, record)
        await running(me, apart_s=0.0, for_s=5.0)
        assert set(me.connector.dialled) == {MANY[0]}
        assert set(board.standing) == {ME, MANY[0]}
        me.group_bits = bits
        await running(me, apart_s=0.0, for_s=1.0)
        mine = {peer for peer in MANY if group_of(peer, bits) == group_of(ME, bits)}
        assert mine <= set(me.connector.dialled), "its own group comes first"
        assert ME in board.groups[topic_of(group_of(ME, bits), bits)]
        assert (ME in board.standing) == ("" in own_topics(ME, bits)) is False
        await running(me, apart_s=0.0, for_s=40.0)
        assert {group_of(peer, bits) for peer in me.connector.dialled} == set(range(1 << bits))
        me.lines.lives = dict.fromkeys(MANY[: MOST + 10], "life")
        await running(me, apart_s=0.0, for_s=5.0)
        assert len([peer for peer in me.lines.lives if peer in me.known]) <= MOST

    in_virtual_time(main)


def test_a_bridge_that_leaves_is_replaced_at_once(tmp_path: Path) -> None:
    """Where all of a group but one leave, the others find out that it stays."""

    async def main() -> None:
        board, bits = Board(), 1
        me = Process(board, "only", tmp_path)
        far = [peer for peer in MANY if group_of(peer, bits) != group_of(ME, bits)]
        me.group_bits = bits
        record = encode(PeerRecord((), points=(HUB,)))
        board.groups[topic_of(1 - group_of(ME, bits), bits)] = dict.fromkeys(far[:5], record)
        me.lines.lives = {far[0]: "life"}
        me.peer_manager.handle_reachable(far[0], PeerRecord((), points=(HUB,)))
        await running(me, apart_s=0.0, for_s=40.0)
        assert not me.connector.dialled
        me.leaving = {far[0]}
        await running(me, apart_s=0.0, for_s=40.0)
        assert set(me.connector.dialled) <= set(far[1:5])
        assert me.connector.dialled

    in_virtual_time(main)


def test_who_has_nobody_of_its_group_looks_for_it_again_and_again(tmp_path: Path) -> None:
    """Its group divided a moment ago, and the others have not announced themselves in the new topic yet, or only in
    that of the run. Connections to other groups are no reason to wait."""

    async def main() -> None:
        board, bits = Board(), 1
        me = Process(board, "only", tmp_path)
        far = next(peer for peer in MANY if group_of(peer, bits) != group_of(ME, bits))
        near = [peer for peer in MANY if group_of(peer, bits) == group_of(ME, bits)]
        me.lines.lives = {far: "life"}
        me.peer_manager.handle_reachable(far, PeerRecord((), points=(HUB,)))
        me.group_bits = bits
        await running(me, apart_s=0.0, for_s=100.0)
        record = encode(PeerRecord((), points=(HUB,)))
        board.groups[topic_of(group_of(ME, bits), bits)][near[0]] = record
        await running(me, apart_s=0.0, for_s=RESOLVED_S)
        assert me.connector.dialled[:1] == near[:1]
        board.standing[near[1]] = (1e9, record)
        await running(me, apart_s=0.0, for_s=RESOLVED_S)
        assert near[1] in me.connector.dialled

    in_virtual_time(main)
