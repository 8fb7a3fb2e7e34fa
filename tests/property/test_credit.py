"""Credits: the budget and the windows hold, and everything that was announced comes, whatever the order of events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.net.flow_control import AHEAD_BYTES, SLACK_S, Account, Granter, Grants, Spending
from p2pdiloco.net.frames import FIRST_CREDIT, FrameError
from p2pdiloco.net.traffic_shaping import BURST_S

KIB, MIB = 1 << 10, 1 << 20
WINDOW = 8 * MIB
TOTAL = 16 * MIB
SLICE_MOST = MIB


class World:
    """Senders with payloads, a receiver that grants, and a network without time of its own."""

    def __init__(self, rate: float | None) -> None:
        self.now = 0.0
        self.granter = Granter(window_bytes=WINDOW, total_bytes=TOTAL, bytes_per_s=rate)
        self.pending: dict[Account, int] = {}
        self.granted: list[tuple[float, int]] = []
        self.lost_bytes = 0

    def connect(self, peer: int, round_trip_s: float) -> None:
        account = Account(peer)
        account.round_trip_s = round_trip_s
        self.pending[account] = 0
        self.granter.open(account)

    def announce(self, account: Account, size: int) -> None:
        self.pending[account] += size
        account.demand += size

    def lose(self, account: Account) -> None:
        """The connection is lost; its peer connects again and announces what is left."""
        left = self.pending.pop(account) + account.untaken
        self.granter.close(account)
        self.connect(int(str(account.peer)), account.round_trip_s)
        self.announce(list(self.pending)[-1], left)

    def arrive(self, account: Account, most: int, is_taken: bool = True) -> None:
        count = min(most, account.coming, self.pending[account])
        self.pending[account] -= count
        account.demand -= count
        account.received += count
        if not is_taken:
            account.untaken += count

    def grant(self) -> None:
        before = {account: account.granted for account in self.pending}
        if self.granter.bytes_per_s is None:
            for account in self.pending:
                self.granter.top_up(account)
        else:
            self.granter.grant(self.now)
        for account, old in before.items():
            if account.granted != old:
                self.granted.append((self.now, account.granted - old))
                room = max(WINDOW, FIRST_CREDIT)
                assert account.outstanding <= room

    def check_budget(self) -> None:
        rate = self.granter.bytes_per_s
        if rate is None:
            return
        for begin, (at, _) in enumerate(self.granted):
            total = 0
            for then, count in self.granted[begin:]:
                total += count
                assert total <= rate * (then - at + BURST_S) + SLICE_MOST + 1

    def finish(self) -> None:
        """From here on all that is granted arrives and is taken; everything must come, at about the budget's rate."""
        rate = self.granter.bytes_per_s
        left = sum(self.pending.values())
        bound_s = self.now + 3.0 + (1.2 * left / rate if rate is not None else 0.0)
        while any(self.pending.values()):
            assert self.now < bound_s, "no progress"
            self.grant()
            for account in self.pending:
                account.untaken = 0
                self.arrive(account, 1 << 40)
            at = self.granter.next_at()
            self.now = max(self.now + 0.001, at if at is not None else 0.0)


steps = st.lists(
    st.tuples(
        st.sampled_from(["announce", "arrive", "hold", "take", "lose", "grant", "wait"]),
        st.integers(0, 4),
        st.integers(1, 6 * MIB),
    ),
    max_size=60,
)


@given(steps=steps, rate=st.sampled_from([None, 12.5e6, 125e6, 312.5e6]), round_trip_s=st.sampled_from([0.0, 0.1]))
@settings(max_examples=200, deadline=None)
def test_never_more_than_the_budget_and_never_a_deadlock(steps: Any, rate: float | None, round_trip_s: float) -> None:
    world = World(rate)
    for peer in range(3):
        world.connect(peer, round_trip_s)
    for what, who, size in steps:
        account = list(world.pending)[who % len(world.pending)]
        match what:
            case "announce":
                world.announce(account, size)
            case "arrive" | "hold":
                world.arrive(account, size, is_taken=what == "arrive")
            case "take":
                account.untaken = 0
            case "lose":
                world.lose(account)
            case "grant":
                world.grant()
            case "wait":
                world.now += size / 1e7
        world.check_budget()
    world.finish()
    world.check_budget()


def test_with_a_budget_nothing_is_granted_to_who_wants_nothing() -> None:
    granter = Granter(window_bytes=WINDOW, total_bytes=TOTAL, bytes_per_s=1e6)
    idle, busy = Account("idle"), Account("busy")
    granter.open(idle)
    granter.open(busy)
    busy.demand = 10 * MIB
    busy.received = FIRST_CREDIT
    assert granter.grant(0.0) == [busy]
    assert idle.granted == FIRST_CREDIT


def test_grants_take_turns_over_peers_not_connections() -> None:
    granter = Granter(window_bytes=WINDOW, total_bytes=TOTAL, bytes_per_s=10e6)
    accounts = [Account("a"), Account("a"), Account("a"), Account("b")]
    for account in accounts:
        account.demand = 1 << 30
        granter.open(account)
    now = 0.0
    while now < 2.0:
        granter.grant(now)
        for account in accounts:
            account.demand -= account.coming
            account.received = account.granted
        now = max(now, granter.next_at() or 0.0) + 0.001
    by_a = sum(account.granted for account in accounts[:3])
    assert by_a == pytest.approx(accounts[3].granted, rel=0.03)


def test_who_returns_from_a_pause_has_its_share_and_no_more() -> None:
    """A peer that returns after a pause gets its share, and not the bytes that it missed as well."""
    granter = Granter(window_bytes=WINDOW, total_bytes=TOTAL, bytes_per_s=10e6)
    busy, back = Account("busy"), Account("back")
    for account in (busy, back):
        granter.open(account)
    now, before = 0.0, 0
    busy.demand = 1 << 30
    while now < 3.0:
        if now >= 2.0 and not back.demand:
            back.demand, before = 1 << 30, busy.granted
        granter.grant(now)
        for account in (busy, back):
            account.demand -= account.coming if account.demand else 0
            account.received = account.granted
        now = max(now, granter.next_at() or 0.0) + 0.001
    assert back.granted - FIRST_CREDIT == pytest.approx(busy.granted - before, rel=0.05)


def test_a_slow_sender_does_not_keep_the_budget_from_a_fast_one() -> None:
    granter = Granter(window_bytes=WINDOW, total_bytes=TOTAL, bytes_per_s=10e6)
    slow, fast = Account("slow"), Account("fast")
    for account in (slow, fast):
        account.demand = 1 << 30
        granter.open(account)
    now = 0.0
    while now < 2.0:
        granter.grant(now)
        fast.demand -= fast.coming
        fast.received = fast.granted
        now = max(now, granter.next_at() or 0.0) + 0.001
    assert slow.coming <= max(FIRST_CREDIT, 10e6 * SLACK_S)
    assert fast.granted > 0.95 * 20e6


def test_what_the_handler_has_not_taken_stops_the_sender() -> None:
    granter = Granter(window_bytes=WINDOW, total_bytes=TOTAL)
    account = Account("a")
    granter.open(account)
    account.demand = 1 << 30
    while granter.top_up(account):
        account.untaken += account.coming
        account.demand -= account.coming
        account.received = account.granted
    assert account.untaken == WINDOW
    account.untaken = 0
    assert granter.top_up(account)
    assert account.coming == WINDOW


def test_without_a_budget_an_idle_sender_has_some_credit_and_no_more() -> None:
    granter = Granter(window_bytes=WINDOW, total_bytes=TOTAL)
    account = Account("a")
    granter.open(account)
    assert granter.top_up(account)
    assert account.coming == AHEAD_BYTES


def test_a_credit_is_not_taken_back() -> None:
    spending = Spending()
    spending.sent = 100
    spending.extend(FIRST_CREDIT + 5)
    assert spending.left == FIRST_CREDIT - 95
    with pytest.raises(FrameError):
        spending.extend(FIRST_CREDIT)


def test_of_connections_that_have_gone_nothing_is_left() -> None:
    """Peers come and go for months: neither their accounts nor what they were granted stay."""
    granter = Granter(window_bytes=WINDOW, total_bytes=TOTAL, bytes_per_s=1e9)
    grants = Grants(granter)
    for number in range(100):
        for lane in [Account(number), Account(number)]:
            lane.demand = 10 * MIB
            grants.open(lane, float(number))
        grants.grant(number + 0.5)
        for lane in granter.accounts():
            grants.close(lane)
    assert granter.accounts() == []
    assert (granter._served, grants._accounts) == ({}, set())
