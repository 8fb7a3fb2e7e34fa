"""The shaper and the credits; time is a number."""

from __future__ import annotations

from math import inf

import pytest

from p2pdiloco.net.flow_control import AHEAD_BYTES, Account, Granter, Grants
from p2pdiloco.net.frames import FIRST_CREDIT
from p2pdiloco.net.traffic_shaping import PACING_HEADROOM, PEER_TURN_BYTES, Shaper

MB = 1_000_000
GB = 1_000_000_000
TURN_S = 0.001
"""What an event loop takes at least to come round."""


class Sender:
    """Sends what it has, at most ``room`` before it is told ready again."""

    def __init__(self, pending: int, room: int = 1 << 60) -> None:
        self.pending, self.room = pending, room
        self.sent = 0
        self.rates: list[float | None] = []

    def write(self, most: int) -> int:
        count = min(most, self.pending, self.room)
        self.pending -= count
        self.room -= count
        self.sent += count
        return count


class World:
    """A shaper, those who send by it, and a clock that stands still but for ``run``."""

    def __init__(self, rate: float | None, **senders: Sender) -> None:
        self.now = 0.0
        self.shaper: Shaper[Sender] = Shaper(rate)
        for peer, sender in senders.items():
            self.join(peer, sender)

    def join(self, peer: str, sender: Sender) -> None:
        self.shaper.open(peer, sender)
        self.shaper.ready(sender)
        self.hear()

    def hear(self) -> None:
        for sender, rate in self.shaper.news().items():
            sender.rates.append(rate)

    def run(self, until: float) -> None:
        while (at := self.shaper.next_at()) is not None and at <= until:
            self.now = max(self.now, at)
            if (choice := self.shaper.next(self.now)) is None:
                self.now += TURN_S
                continue
            sender, most = choice
            if count := sender.write(most):
                self.shaper.wrote(sender, count, self.now)
            else:
                self.shaper.cannot(sender)
            self.hear()
        self.now = until


def test_the_budget_is_shared_and_kept_over_every_second() -> None:
    ann, bob = Sender(GB), Sender(GB)
    world = World(10.0 * MB, ann=ann, bob=bob)
    for second in range(1, 5):
        before = ann.sent + bob.sent
        world.run(float(second))
        assert ann.sent + bob.sent - before == pytest.approx(10 * MB, rel=0.03)
    assert ann.sent == pytest.approx(bob.sent, abs=PEER_TURN_BYTES)


def test_a_change_of_the_budget_takes_effect_at_once() -> None:
    ann = Sender(GB)
    world = World(10.0 * MB, ann=ann)
    for rate in (50.0 * MB, 1.0 * MB, 20.0 * MB):
        world.shaper.set_budget(rate, world.now)
        world.hear()
        before, start = ann.sent, world.now
        world.run(start + 1.0)
        assert ann.sent - before == pytest.approx(rate, rel=0.03)
    world.shaper.set_budget(None, world.now)
    world.hear()
    world.run(world.now)
    assert ann.pending == 0
    assert ann.rates[-1] is None


def test_sockets_are_paced_at_the_budget_and_follow_it() -> None:
    ann, bob = Sender(GB), Sender(GB)
    world = World(10.0 * MB, ann=ann, bob=bob)
    world.run(1.0)
    assert ann.rates == bob.rates == [10.0 * MB * PACING_HEADROOM]
    for rate in (10.1 * MB, 5.0 * MB):
        world.shaper.set_budget(rate, world.now)
        world.hear()
    assert ann.rates == bob.rates == [10.0 * MB * PACING_HEADROOM, 5.0 * MB * PACING_HEADROOM]


def test_who_cannot_write_is_skipped_until_it_is_ready_again() -> None:
    ann, bob = Sender(GB, room=100_000), Sender(GB)
    world = World(10.0 * MB, ann=ann, bob=bob)
    world.run(1.0)
    assert ann.sent == 100_000
    assert ann.sent + bob.sent == pytest.approx(10 * MB, rel=0.03)
    ann.room = 1 << 60
    world.shaper.ready(ann)
    before = ann.sent
    world.run(5.0)
    assert ann.sent - before == pytest.approx(20 * MB, abs=PEER_TURN_BYTES)


def test_control_goes_at_once_and_bulk_yields_to_it() -> None:
    ann = Sender(GB)
    world = World(10.0 * MB, ann=ann)
    world.run(1.0)
    before = ann.sent
    for tenth in range(10):
        world.shaper.wrote_control(ann, 400_000, world.now)
        world.run(1.1 + tenth / 10)
    assert ann.sent - before == pytest.approx(6 * MB, rel=0.03)


def test_a_peer_that_is_gone_is_forgotten() -> None:
    ann, bob = Sender(GB), Sender(GB)
    world = World(10.0 * MB, ann=ann, bob=bob)
    world.shaper.close(ann)
    world.shaper.ready(ann)
    world.run(1.0)
    assert ann.sent == 0
    assert bob.sent == pytest.approx(10 * MB, rel=0.03)
    world.join("ann", ann)
    assert ann.rates[-1] == 10.0 * MB * PACING_HEADROOM


class Source:
    """A sender behind an account: sends all that it is granted, at once."""

    def __init__(self, grants: Grants, peer: str, pending: int) -> None:
        self.account = Account(peer)
        self.account.demand = pending
        self._grants = grants
        grants.open(self.account, 0.0)

    def send(self, now: float) -> None:
        count = min(self.account.granted - self.account.received, self.account.demand)
        self.account.received += count
        self.account.demand -= count
        self._grants.update(self.account, now)


def test_the_down_budget_is_kept_changed_and_lifted() -> None:
    grants = Grants(Granter(window_bytes=64 << 20, total_bytes=1 << 30, bytes_per_s=10.0 * MB))
    sources = [Source(grants, peer, GB) for peer in ("ann", "bob")]
    now = 0.0

    def receive_until(end: float) -> int:
        nonlocal now
        before = sum(source.account.received for source in sources)
        while now < end:
            for source in sources:
                source.send(now)
            now = min(end, now + TURN_S)
            if (grants.due_at or inf) <= now:
                grants.grant(now)
        return sum(source.account.received for source in sources) - before

    receive_until(0.5)
    assert receive_until(1.5) == pytest.approx(10 * MB, rel=0.03)
    grants.set_budget(50.0 * MB, now)
    assert receive_until(2.5) == pytest.approx(50 * MB, rel=0.03)
    grants.set_budget(1.0 * MB, now)
    receive_until(2.6)
    assert receive_until(3.6) == pytest.approx(1 * MB, rel=0.03)
    shares = [source.account.received for source in sources]
    assert shares[0] == pytest.approx(shares[1], rel=0.02)
    grants.close(sources[0].account)
    receive_until(3.7)
    assert receive_until(4.7) == pytest.approx(1 * MB, rel=0.03)
    grants.set_budget(None, now)
    assert sources[1].account.coming >= min(sources[1].account.demand, AHEAD_BYTES)
    assert FIRST_CREDIT < AHEAD_BYTES
