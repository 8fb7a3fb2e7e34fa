"""The schedule and the turns; time is a number."""

from __future__ import annotations

import pytest

from p2pdiloco.net.traffic_shaping import (
    DEBT_S,
    PEER_TURN_BYTES,
    SLICE_LEAST,
    SLICE_MOST,
    SLICE_SLOW,
    SLICE_UNLIMITED,
    FairScheduler,
    Pacer,
    slice_bytes,
)

MB = 1_000_000


def send_for(schedule: Pacer, seconds: float, *, slice_size: int, lateness_s: float = 0.0) -> list[tuple[float, int]]:
    """Slices as a driver sends them that always wakes ``lateness_s`` late."""
    now, sent = 0.0, []
    while now < seconds:
        while schedule.is_ready(now):
            schedule.charge(slice_size, now)
            sent.append((now, slice_size))
        now = max(now, schedule.ready_at()) + lateness_s
    return sent


@pytest.mark.parametrize("mbit", [100, 1000, 2500])
@pytest.mark.parametrize("lateness_s", [0.0, 0.0004, 0.001, 0.005])
def test_the_rate_is_kept_over_any_second_however_late_the_driver(mbit: int, lateness_s: float) -> None:
    rate = mbit * 1e6 / 8
    sent = send_for(Pacer(rate), 4.0, slice_size=slice_bytes(rate), lateness_s=lateness_s + 1e-9)
    for begin in (0.0, 0.1, 0.77, 1.5, 2.9):
        in_a_second = sum(count for at, count in sent if begin <= at < begin + 1.0)
        assert abs(in_a_second / rate - 1.0) < 0.03


def test_what_is_late_is_made_up_for_only_within_the_burst() -> None:
    schedule = Pacer(1000.0, burst_s=0.1)
    schedule.charge(1, 0.0)
    sent = 0
    while schedule.is_ready(50.0):
        schedule.charge(10, 50.0)
        sent += 10
    assert 100 <= sent <= 110


def test_control_is_charged_and_its_debt_is_bounded() -> None:
    schedule = Pacer(1000.0)
    schedule.charge_control(500, 0.0)
    assert schedule.ready_at() == pytest.approx(0.5, abs=0.02)
    schedule.charge_control(10**9, 0.0)
    assert schedule.ready_at() == DEBT_S
    schedule.charge(2000, DEBT_S)
    schedule.charge_control(1, DEBT_S)
    assert schedule.ready_at() == DEBT_S + 2.0


def test_a_debt_stays_the_same_in_bytes_when_the_rate_changes() -> None:
    schedule = Pacer(1000.0, burst_s=0.0)
    schedule.charge(500, 0.0)
    schedule.set_rate(2000.0, 0.0)
    assert schedule.ready_at() == pytest.approx(0.25)
    schedule.set_rate(None, 0.0)
    schedule.charge(10**12, 0.0)
    assert schedule.is_ready(0.0)


def test_slices_are_short_in_time_within_their_bounds() -> None:
    assert slice_bytes(None) == SLICE_UNLIMITED
    assert slice_bytes(1e12) == SLICE_MOST
    assert slice_bytes(1.0 * MB) == SLICE_LEAST
    assert slice_bytes(8000.0) == 2000, "a heartbeat waits for a quarter of a second"
    assert slice_bytes(1.0) == SLICE_SLOW
    assert slice_bytes(50 * MB) == 100_000


def serve(shares: FairScheduler[str], owners: dict[str, str], seconds: float, start: float = 0.0) -> dict[str, int]:
    """Everybody always has something; bytes sent by member."""
    now, sent = start, dict.fromkeys(owners, 0)
    while now < start + seconds:
        while (choice := shares.next(now)) is not None:
            member, most = choice
            shares.charge(owners[member], member, most, now)
            sent[member] += most
        at = shares.next_at()
        assert at is not None
        now = max(at, now) + 1e-6
    return sent


def test_peers_share_equally_and_their_connections_among_themselves() -> None:
    shares: FairScheduler[str] = FairScheduler(10.0 * MB)
    owners = {"a1": "a", "a2": "a", "a3": "a", "b1": "b"}
    for member, peer in owners.items():
        shares.add(peer, member)
    sent = serve(shares, owners, 8.0)
    assert sent["b1"] == pytest.approx(40 * MB, abs=PEER_TURN_BYTES)
    for member in ("a1", "a2", "a3"):
        assert sent[member] == pytest.approx(40 * MB / 3, abs=PEER_TURN_BYTES / 3)


def test_who_comes_back_from_a_pause_has_saved_nothing_up() -> None:
    shares: FairScheduler[str] = FairScheduler(10.0 * MB)
    shares.add("b", "b1")
    serve(shares, {"b1": "b"}, 5.0)
    shares.add("a", "a1")
    sent = serve(shares, {"a1": "a", "b1": "b"}, 4.0, start=5.0)
    assert sent["a1"] == pytest.approx(sent["b1"], abs=PEER_TURN_BYTES)


def test_control_counts_so_that_bulk_yields() -> None:
    shares: FairScheduler[str] = FairScheduler(1.0 * MB)
    shares.add("a", "a1")
    for tenth in range(10):
        shares.charge("a", None, 50_000, tenth / 10)
        serve(shares, {"a1": "a"}, 0.1, start=tenth / 10)
    shares.charge("stranger", None, 50_000, 1.0)
    assert sum(serve(shares, {"a1": "a"}, 0.5, start=1.0).values()) == pytest.approx(450_000, rel=0.05)


def test_without_a_budget_everybody_may_always_send() -> None:
    shares: FairScheduler[str] = FairScheduler()
    assert shares.next(0.0) is None
    shares.add("a", "a1")
    shares.add("b", "b1")
    chosen, slices = [], PEER_TURN_BYTES // SLICE_UNLIMITED
    for _ in range(3 * slices):
        choice = shares.next(0.0)
        assert choice is not None
        chosen.append(choice[0])
        shares.charge(choice[0][0], choice[0], choice[1], 0.0)
    assert chosen == ["a1"] * slices + ["b1"] * slices + ["a1"] * slices
    shares.remove("a", "a1")
    shares.forget("b")
    assert shares.next(1.0) is None
    assert shares.next_at() is None


def test_payloads_to_several_peers_go_one_after_the_other() -> None:
    """Four peers are sent a commit of a full shard that names 1,024 learners: the first has it after a fourth of the
    time."""
    shares: FairScheduler[str] = FairScheduler(1.0 * MB)
    left, ended = dict.fromkeys("abcd", 1_200_000), {}
    for peer in left:
        shares.add(peer, peer)
    now = 0.0
    while left:
        while (choice := shares.next(now)) is not None:
            peer, most = choice
            count = min(most, left[peer])
            left[peer] -= count
            shares.charge(peer, peer, count, now)
            if not left[peer]:
                shares.remove(peer, peer)
                ended[peer] = now
                del left[peer]
        now = max(now, shares.next_at() or now) + 1e-6
    assert [round(at, 1) for at in ended.values()] == [1.2, 2.4, 3.6, 4.8]
    assert [*ended] == [*"abcd"]


def test_who_cannot_send_ends_its_turn_and_is_served_when_it_can() -> None:
    shares: FairScheduler[str] = FairScheduler()
    for peer in "ab":
        shares.add(peer, peer)
    assert shares.next(0.0) is not None
    shares.charge("a", "a", 1000, 0.0)
    assert shares.next(0.0) == ("a", SLICE_UNLIMITED)
    shares.charge("a", "a", 1000, 0.0, ends_turn=True)
    assert shares.next(0.0) == ("b", SLICE_UNLIMITED)
    shares.charge("b", "b", 5000, 0.0, ends_turn=True)
    assert shares.next(0.0) == ("a", SLICE_UNLIMITED)
    shares.remove("a", "a")
    assert shares.next(0.0) == ("b", SLICE_UNLIMITED)
    shares.forget("b")
    shares.add("a", "a")
    assert shares.next(0.0) == ("a", SLICE_UNLIMITED)
