"""A relay's budget, in virtual time."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from p2pdiloco.nat import rendezvous_server
from p2pdiloco.nat.rendezvous_server import RELAYS, Budget, Relay, relay_limits, relay_places
from tests.peer_sim.loop import VirtualLoop


def run(work: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


def test_turns_come_in_order_and_are_earned_afterwards() -> None:
    async def work() -> None:
        loop, budget, ended = asyncio.get_running_loop(), Budget(1e6), []

        async def take(name: str, count: int) -> None:
            await budget.take(count)
            ended.append((name, round(loop.time(), 2)))

        await asyncio.gather(take("a", 200_000), take("b", 300_000), take("c", 100_000))
        await take("d", 1000)
        assert ended == [("a", 0.0), ("b", 0.0), ("c", 0.48), ("d", 0.58)], (
            "a tick is worth 300,000, or one turn more, and an idle budget has saved BURST_S"
        )

    run(work())


def test_of_many_each_gets_the_same_and_together_they_get_the_budget() -> None:
    async def work() -> None:
        loop, budget, got = asyncio.get_running_loop(), Budget(1e6), [0] * 5

        async def take(number: int) -> None:
            while loop.time() < 60.0:
                count = budget.turn_bytes
                await budget.take(count)
                got[number] += count

        await asyncio.gather(*map(take, range(len(got))))
        assert sum(got) == pytest.approx(60e6, rel=0.05)
        assert max(got) - min(got) < 1e6 * rendezvous_server.ROUND_S

    run(work())


def test_what_is_small_goes_ahead_and_is_paid_for_until_too_much_is_owed() -> None:
    async def work() -> None:
        loop, budget = asyncio.get_running_loop(), Budget(1e6)
        await budget.take(120_000)
        ahead = [budget.take_ahead(10_000) for _ in range(100)]
        assert loop.time() == 0.0
        assert ahead.count(True) == ahead.index(False) in (65, 66)  # 100 ms are owed for the bulk, 10 for each
        await budget.take(10_000)
        assert loop.time() == pytest.approx(0.12 - rendezvous_server.BURST_S + 0.01 * ahead.index(False))

    run(work())


def test_turns_are_long_for_one_and_short_for_many() -> None:
    async def work() -> None:
        budget = Budget(1e6)
        alone = budget.turn_bytes
        assert alone == int(1e6 * rendezvous_server.TICK_S)
        await budget.take(alone)
        tasks = [asyncio.create_task(budget.take(1000)) for _ in range(64)]
        await asyncio.sleep(0.0)
        assert budget.turn_bytes == int(1e6 * rendezvous_server.SHORTEST_TURN_S)
        await asyncio.gather(*tasks[:32])
        for one in tasks[32:]:
            one.cancel()
        await budget.take(1000)
        assert budget.turn_bytes == alone
        assert Budget(None).turn_bytes == rendezvous_server.LARGEST_BYTES

    run(work())


def test_a_changed_limit_counts_from_the_next_turn_on() -> None:
    async def work() -> None:
        loop, budget = asyncio.get_running_loop(), Budget(1e6)
        await budget.take(300_000)
        await budget.take(100_000)
        budget.set_rate(1e5)
        began = loop.time()
        await budget.take(1000)
        assert loop.time() - began == pytest.approx(1.0)

    run(work())


MBIT = 1e6 / 8


@pytest.mark.parametrize(
    ("line", "own", "peers", "budget", "pairs"),
    [
        (1000.0, 7.0, 63, 50.0, 112),  # a fast line: what the user allows
        (1000.0, 6.0, 63, 50.0, RELAYS),
        (20.0, 7.0, 63, 13.0, 29),  # what its own payloads leave, of which pairs fill half on average
        (8.0, 7.0, 63, 2.0, 4),  # a slow line: a quarter
        (8.0, 7.0, 7, 2.0, 0),
        (8.0, 0.0, 0, 8.0, RELAYS),  # a peer that is alone, or knows no step time
    ],
)
def test_a_relay_follows_its_line(line: float, own: float, peers: int, budget: float, pairs: int) -> None:
    found = relay_limits(50.0 * MBIT, line * MBIT, own * MBIT, peers)
    assert found == (pytest.approx(budget * MBIT), pairs)


@pytest.mark.parametrize(("line", "budget"), [(1000.0, 250.0), (200.0, 50.0), (100.0, 50.0), (20.0, 13.0), (8.0, 2.0)])
def test_without_a_limit_of_the_users_a_fast_line_gives_a_quarter(line: float, budget: float) -> None:
    assert relay_limits("auto", line * MBIT, 7.0 * MBIT, 63)[0] == pytest.approx(budget * MBIT)


@pytest.mark.parametrize(("soft", "places"), [(256, 21), (1024, 85), (65536, RELAYS), (resource.RLIM_INFINITY, RELAYS)])
def test_pairs_take_half_of_a_process_descriptors(monkeypatch: pytest.MonkeyPatch, soft: int, places: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert relay_places() == places


def test_a_pair_that_has_ended_leaves_no_descriptor_open() -> None:
    async def work() -> None:
        (a, ours), (b, theirs) = socket.socketpair(), socket.socketpair()
        with a, b, ours, theirs:
            for end in (a, b):
                end.setblocking(False)
            before = len(os.listdir("/proc/self/fd"))
            carrying = asyncio.create_task(Relay(None).carry(a, b, [0, 0]))
            ours.sendall(b"x")
            while not await asyncio.to_thread(theirs.recv, 1):
                pass
            for end in (ours, theirs):
                end.shutdown(socket.SHUT_WR)
            await carrying
            assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(work())
