"""The shaper and the credits on a clock that the test moves."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest

from p2pdiloco.runtime.crediting import Crediting
from p2pdiloco.runtime.shaping import PACING_HEADROOM, TURN_BYTES, Shaper
from p2pdiloco.wire.credit import AHEAD_BYTES, Account, Granter
from p2pdiloco.wire.frames import FIRST_CREDIT
from p2pdiloco.wire.schedule import SLICE_UNLIMITED

MB = 1_000_000
GB = 1_000_000_000


class Call:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeClock:
    """An event loop of timers; ``run`` moves the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Call]] = []
        self._order = itertools.count()

    def __call__(self) -> FakeClock:
        return self

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> Call:
        return self.call_at(self.now, callback)

    def call_at(self, when: float, callback: Callable[[], None]) -> Call:
        call = Call(callback)
        heapq.heappush(self._calls, (when, next(self._order), call))
        return call

    def run(self, until: float) -> None:
        for count in itertools.count():
            assert count < 1_000_000, "the clock does not move"
            if not self._calls or self._calls[0][0] > until:
                break
            when, _, call = heapq.heappop(self._calls)
            self.now = max(self.now, when)
            if call.callback is not None:
                call.callback()
        self.now = until


class FakeSender:
    """Sends what it has, at most ``room`` before it must be told ``ready`` again."""

    def __init__(self, pending: int, room: int = 1 << 60) -> None:
        self.pending, self.room = pending, room
        self.sent = 0
        self.rates: list[float | None] = []

    def write_bulk(self, most: int) -> int:
        count = min(most, self.pending, self.room)
        self.pending -= count
        self.room -= count
        self.sent += count
        return count

    def pace(self, bytes_per_s: float | None) -> None:
        self.rates.append(bytes_per_s)


def shaper_with(clock: FakeClock, rate: float | None, **senders: FakeSender) -> Shaper:
    shaper = Shaper(rate, clock)
    for peer, sender in senders.items():
        shaper.open(peer, sender)
        shaper.ready(sender)
    return shaper


def test_the_budget_is_shared_and_kept_over_every_second() -> None:
    clock = FakeClock()
    ann, bob = FakeSender(GB), FakeSender(GB)
    shaper_with(clock, 10.0 * MB, ann=ann, bob=bob)
    for second in range(1, 5):
        before = ann.sent + bob.sent
        clock.run(float(second))
        assert ann.sent + bob.sent - before == pytest.approx(10 * MB, rel=0.03)
    assert ann.sent == pytest.approx(bob.sent, rel=0.01)


def test_a_change_of_the_budget_takes_effect_at_once() -> None:
    clock = FakeClock()
    ann = FakeSender(GB)
    shaper = shaper_with(clock, 10.0 * MB, ann=ann)
    for rate in (50.0 * MB, 1.0 * MB, 20.0 * MB):
        shaper.set_budget(rate)
        before, start = ann.sent, clock.now
        clock.run(start + 1.0)
        assert ann.sent - before == pytest.approx(rate, rel=0.03)
    shaper.set_budget(None)
    clock.run(clock.now)
    assert ann.pending == 0
    assert ann.rates[-1] is None


def test_a_cap_at_run_time() -> None:
    clock = FakeClock()
    ann, bob = FakeSender(GB), FakeSender(GB)
    shaper = shaper_with(clock, 10.0 * MB, ann=ann, bob=bob)
    shaper.set_cap("ann", 1.0 * MB)
    clock.run(1.0)
    assert ann.sent == pytest.approx(1 * MB, rel=0.05)
    assert bob.sent == pytest.approx(9 * MB, rel=0.03)
    assert ann.rates[-1] == 1.0 * MB * PACING_HEADROOM


def test_a_peer_at_its_cap_does_not_hold_up_another_that_becomes_ready() -> None:
    clock = FakeClock()
    ann, bob = FakeSender(GB), FakeSender(GB)
    shaper = shaper_with(clock, None, ann=ann)
    shaper.set_cap("ann", 1.0)
    clock.run(1.0)
    shaper.open("bob", bob)
    shaper.ready(bob)
    clock.run(1.0)
    assert bob.pending == 0


def test_sockets_are_paced_at_the_share_and_follow_it() -> None:
    clock = FakeClock()
    ann, bob = FakeSender(GB), FakeSender(GB)
    shaper = shaper_with(clock, 10.0 * MB, ann=ann, bob=bob)
    assert ann.rates == [10.0 * MB * PACING_HEADROOM]
    clock.run(1.0)
    assert ann.rates[-1] == pytest.approx(5 * MB * PACING_HEADROOM, rel=0.1)
    bob.pending = 0
    clock.run(2.0)
    assert ann.rates[-1] == pytest.approx(10 * MB * PACING_HEADROOM, rel=0.1)
    assert len(ann.rates) < 60
    shaper.close(bob)
    clock.run(3.0)


def test_who_cannot_write_is_skipped_until_it_is_ready_again() -> None:
    clock = FakeClock()
    ann, bob = FakeSender(GB, room=100_000), FakeSender(GB)
    shaper = shaper_with(clock, 10.0 * MB, ann=ann, bob=bob)
    clock.run(1.0)
    assert ann.sent == 100_000
    assert ann.sent + bob.sent == pytest.approx(10 * MB, rel=0.03)
    ann.room = 1 << 60
    shaper.ready(ann)
    before = ann.sent
    clock.run(2.0)
    assert ann.sent - before == pytest.approx(5 * MB, rel=0.03)


def test_control_goes_at_once_and_bulk_yields_to_it() -> None:
    clock = FakeClock()
    ann = FakeSender(GB)
    shaper = shaper_with(clock, 10.0 * MB, ann=ann)
    clock.run(1.0)
    before = ann.sent
    for tenth in range(10):
        shaper.wrote_control(ann, 400_000)
        clock.run(1.1 + tenth / 10)
    assert ann.sent - before == pytest.approx(6 * MB, rel=0.03)


def test_without_a_budget_a_turn_of_the_event_loop_is_bounded() -> None:
    clock = FakeClock()
    ann, bob = FakeSender(4 << 20), FakeSender(4 << 20)
    shaper_with(clock, None, ann=ann, bob=bob)
    turns = []
    while clock._calls:
        _, _, call = heapq.heappop(clock._calls)
        assert call.callback is not None
        before = ann.sent + bob.sent
        call.callback()
        turns.append(ann.sent + bob.sent - before)
    assert ann.pending == bob.pending == 0
    assert TURN_BYTES <= max(turns) <= TURN_BYTES + SLICE_UNLIMITED


def test_a_peer_that_is_gone_is_forgotten() -> None:
    clock = FakeClock()
    ann, bob = FakeSender(GB), FakeSender(GB)
    shaper = shaper_with(clock, 10.0 * MB, ann=ann, bob=bob)
    shaper.set_cap("ann", 1.0)
    shaper.close(ann)
    shaper.ready(ann)
    clock.run(1.0)
    assert ann.sent == 0
    assert bob.sent == pytest.approx(10 * MB, rel=0.03)
    shaper.open("ann", ann)
    assert ann.rates[-1] == 10.0 * MB * PACING_HEADROOM


class Source:
    """A sender behind an account: sends all that it is granted, at once."""

    def __init__(self, crediting: Crediting, peer: str, pending: int) -> None:
        self.account = Account(peer)
        self.account.demand = pending
        self._crediting = crediting
        self.told = FIRST_CREDIT
        crediting.open(self.account, self._hear)

    def _hear(self) -> None:
        self.told = self.account.granted

    def send(self) -> None:
        count = min(self.told - self.account.received, self.account.demand)
        self.account.received += count
        self.account.demand -= count
        self._crediting.progressed(self.account)


def test_the_down_budget_is_kept_changed_and_lifted() -> None:
    clock = FakeClock()
    crediting = Crediting(Granter(window_bytes=64 << 20, total_bytes=1 << 30, bytes_per_s=10.0 * MB), clock)
    sources = [Source(crediting, peer, GB) for peer in ("ann", "bob")]

    def receive_until(end: float) -> int:
        before = sum(source.account.received for source in sources)
        while clock.now < end:
            for source in sources:
                source.send()
            clock.run(min(end, clock.now + 0.001))
        return sum(source.account.received for source in sources) - before

    receive_until(0.5)
    assert receive_until(1.5) == pytest.approx(10 * MB, rel=0.03)
    crediting.set_budget(50.0 * MB)
    assert receive_until(2.5) == pytest.approx(50 * MB, rel=0.03)
    crediting.set_budget(1.0 * MB)
    receive_until(2.6)
    assert receive_until(3.6) == pytest.approx(1 * MB, rel=0.03)
    shares = [source.account.received for source in sources]
    assert shares[0] == pytest.approx(shares[1], rel=0.02)
    crediting.close(sources[0].account)
    receive_until(3.7)
    assert receive_until(4.7) == pytest.approx(1 * MB, rel=0.03)
    crediting.set_budget(None)
    assert sources[1].account.coming >= min(sources[1].account.demand, AHEAD_BYTES)
