"""When the directory is asked, in numbers: where it is needed, and seldom otherwise."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from p2pdiloco.discovery import directory as pings_module
from p2pdiloco.discovery.directory import CALM_S, PEERS_MOST, SILENT_S, Directory, DirectoryError, PingSchedule
from p2pdiloco.protocol.ids import PeerId, fingerprint
from p2pdiloco.swarm.lookup_policy import FEW, LOOK_MOST_S, LOOK_S, UNMET_MOST_S, KnownPoints, LookupPolicy

ANN, BOB, CID = (PeerId(name) for name in ("ann", "bob", "cid"))


class Round:
    """Lookup policy of ann, asked every LOOK_S as the peer manager asks it."""

    def __init__(self) -> None:
        self.heard: frozenset[int] = frozenset()
        self.policy = LookupPolicy(ANN, lambda: self.heard)
        self.connected = [BOB]
        self.known = [BOB]
        self.now = 0.0

    def looks(self, seconds: float) -> list[float]:
        """When it looks, from now on."""
        found, begin = list[float](), self.now
        while self.now < begin + seconds:
            if self.policy.is_lookup_due(self.connected, self.known, self.now):
                self.policy.record_lookup(self.now, is_news=False)
                found.append(self.now - begin)
            self.now += LOOK_S
        return found


def test_who_is_among_all_whom_it_knows_looks_ever_more_seldom() -> None:
    round_ = Round()
    assert not round_.policy.has_looked_up
    assert round_.looks(100.0) == [0.0, 2.0, 6.0, 14.0, 30.0, 62.0]
    assert round_.policy.has_looked_up
    assert 3 <= len(round_.looks(4 * LOOK_MOST_S)) <= 6


def test_what_looks_cost_does_not_grow_with_the_swarm() -> None:
    """A peer in a swarm four times as large looks a quarter as often."""
    small, large = Round(), Round()
    small.connected = small.known = [PeerId(f"p{i}") for i in range(FEW)]
    large.connected = large.known = [PeerId(f"p{i}") for i in range(4 * FEW)]
    assert small.looks(100.0) == [0.0, 2.0, 6.0, 14.0, 30.0, 62.0]
    assert large.looks(400.0) == [0.0, 30.0, 60.0, 92.0, 156.0, 284.0]
    full = Round()
    full.connected = full.known = [PeerId(f"p{i}") for i in range(30 * FEW)]
    assert full.looks(400.0) == [0.0, 30.0, 60.0, 92.0, 156.0, 284.0], "they may all be one stranger's"
    large.heard = frozenset({fingerprint(CID)})
    assert large.looks(2.0) == [0.0]


def test_in_a_large_run_not_each_coming_and_going_is_looked_after() -> None:
    """In a run of 64 peers whose sessions last an hour it looked 257 times an hour."""
    crowd = [PeerId(f"p{i}") for i in range(2 * FEW)]
    for connected, least, most in ((crowd, 2, 3), (crowd[:FEW], 10, 32)):
        round_ = Round()
        round_.connected = round_.known = connected
        round_.looks(1000.0)
        found = 0
        for _ in range(32):
            round_.policy.look_soon(round_.now)
            found += len(round_.looks(LOOK_S))
        assert least <= found <= most, "in 64 s"


def test_who_is_alone_looks_each_time() -> None:
    round_ = Round()
    round_.looks(1000.0)
    round_.connected = []
    assert len(round_.looks(20.0)) == 10


def test_news_are_looked_after_soon() -> None:
    """Somebody is lost; somebody comes of whom nothing is known; what was read was new."""
    round_ = Round()
    round_.looks(1000.0)
    round_.policy.look_soon(round_.now)
    assert round_.looks(10.0) == [2.0, 4.0, 8.0]
    round_.looks(1000.0)
    round_.connected = [BOB, CID]
    assert round_.looks(10.0) == [2.0, 4.0, 8.0]
    assert round_.looks(5.0) == [], "the same one is no news again"
    round_.looks(1000.0)
    round_.policy.record_lookup(round_.now, is_news=True)
    assert round_.looks(10.0) == [2.0, 6.0]


def test_whom_others_hear_and_we_do_not_is_looked_for() -> None:
    round_ = Round()
    round_.looks(1100.0)
    round_.heard = frozenset(map(fingerprint, (ANN, BOB)))
    assert round_.looks(60.0) == []
    assert not round_.policy.is_peer_missing
    round_.heard |= {fingerprint(CID)}
    assert round_.looks(20.0) == [0.0, 2.0, 6.0, 12.0, 18.0]
    assert round_.policy.is_peer_missing
    round_.looks(1100.0)
    assert round_.looks(60.0) == [], "one who cannot be met is not looked for again and again"


class Board:
    """A directory of meeting points."""

    def __init__(self) -> None:
        self.found: dict[PeerId, bytes] = {}
        self.is_down = False
        self.reads = 0

    async def points(self) -> dict[PeerId, bytes]:
        self.reads += 1
        if self.is_down:
            raise DirectoryError("down")
        return dict(self.found)


def test_meeting_points_are_looked_for_where_none_is_attended_or_one_is_lost() -> None:
    async def story() -> None:
        board, now = Board(), 0.0
        lookup = SimpleNamespace(is_peer_missing=True)
        points = KnownPoints(cast(Directory, board), cast(LookupPolicy, lookup))

        async def reads(attended: list[PeerId], seconds: float) -> int:
            nonlocal now
            before, end = board.reads, now + seconds
            while now < end:
                assert await points.records(attended, now) == board.found or board.is_down
                now += 2.0
            return board.reads - before

        board.found = {BOB: b"here"}
        await reads([], 600.0)
        assert 600.0 / UNMET_MOST_S - 1 <= await reads([], 600.0) <= 600.0 / UNMET_MOST_S + 1
        lookup.is_peer_missing = False
        assert await reads([], 1200.0) <= 5, "nobody is to be met"
        lookup.is_peer_missing = True
        assert await reads([], 2.0) == 1, "somebody is"
        assert await reads([BOB], 1200.0) <= 5
        assert await reads([], 4.0) == 2, "it is lost"
        board.is_down = True
        await reads([], 60.0)
        assert await points.records([], now) == {BOB: b"here"}, "what was read stays"

    asyncio.run(story())


def pinged(pings: PingSchedule, peer: PeerId, begin: float, seconds: float, *, is_answered: bool) -> list[float]:
    """When, with a look each half second."""
    found = list[float]()
    for tick in range(int(2 * seconds)):
        now = begin + tick / 2
        if pings.due([peer], now):
            pings.record_result(peer, now, is_answered=is_answered)
            found.append(now - begin)
    return found


def test_who_answers_is_pinged_ever_more_seldom_and_who_does_not_any_more_at_once() -> None:
    pings = PingSchedule(2.0)
    assert pinged(pings, ANN, 0.0, 31.0, is_answered=True) == [0.0, 2.0, 6.0, 14.0, 30.0]
    assert len(pinged(pings, ANN, 31.0, 600.0, is_answered=True)) <= 600.0 / CALM_S + 1
    silent = pinged(pings, ANN, 700.0, 100.0, is_answered=False)
    assert silent[:4] == [0.0, 2.0, 6.0, 14.0]
    assert len(silent) >= 100.0 / SILENT_S
    assert pinged(pings, ANN, 900.0, 7.0, is_answered=True) == [0.0, 2.0, 6.0], "it is back"


def test_what_pings_cost_does_not_grow_with_the_swarm() -> None:
    pings = PingSchedule(2.0)
    others = [PeerId(str(number)) for number in range(8 * pings_module.FEW)]
    count = 0
    for now in range(4000):
        due = pings.due(others, float(now))
        for peer in due:
            pings.record_result(peer, float(now), is_answered=True)
        count += len(due) if now >= 2000 else 0
    assert count <= 2000 * pings_module.FEW / CALM_S * 1.1
    assert len(pinged(pings, others[0], 4500.0, 100.0, is_answered=False)) >= 100.0 / SILENT_S, "who is silent, often"


def test_pings_of_more_peers_than_have_room_are_forgotten() -> None:
    pings = PingSchedule(2.0)
    for number in range(PEERS_MOST + 1):
        pings.record_result(PeerId(str(number)), 1.0, is_answered=True)
    assert pings.due([PeerId("0"), PeerId("1")], 1.0) == [PeerId("0")]
