"""What bounded memories forget: the oldest first, and what was used again is not old."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from p2pdiloco.discovery import call_deadlines, directory
from p2pdiloco.net import abuse_limits, endpoint, multipath
from p2pdiloco.net.frames import Part, Start, Use
from p2pdiloco.peer import state_client
from p2pdiloco.protocol.ids import Digest, PeerId
from p2pdiloco.timing import DecayingCounter, RateLimiter


class Memory(NamedTuple):
    """A memory of ``most`` keys."""

    most: int
    put: Callable[[int], object]
    """What makes it remember a key, or use it again."""
    has: Callable[[int], bool]
    is_renewed: bool = True
    """A key that is used again is the newest; else it keeps its age."""


def rate_limiter() -> Memory:
    buckets: RateLimiter[int] = RateLimiter(burst=3.0, per_s=0.0, max_keys=8)
    return Memory(8, lambda key: buckets.take(key, 0.0), lambda key: buckets.available(key, 0.0) < 3.0)


def decaying_counter() -> Memory:
    counter: DecayingCounter[int] = DecayingCounter(10.0, max_keys=8)
    return Memory(8, lambda key: counter.add(key, 0.0), lambda key: counter.count(key, 0.0) > 0.0)


def blocked_machines() -> Memory:
    """One that is blocked already is not blocked for longer."""
    blocks = abuse_limits.Exclusion(failures=1, time_s=60.0)
    return Memory(
        abuse_limits.SHUT_OUT,
        lambda key: blocks.failed(f"10.0.{key // 256}.{key % 256}", 0.0),
        lambda key: blocks.has(f"10.0.{key // 256}.{key % 256}", 1.0),
        is_renewed=False,
    )


def blamed_peers() -> Memory:
    reputation = abuse_limits.Reputation()
    return Memory(
        abuse_limits.REMEMBERED,
        lambda key: reputation.blame(PeerId(str(key)), 2 * abuse_limits.LIMIT, 0.0),
        lambda key: reputation.is_shut_out(PeerId(str(key)), 1.0),
    )


def places_of_peers() -> Memory:
    """Of one machine: only what is known may be dialled when its budget is spent."""
    dials = abuse_limits.DialRateLimit()
    while dials.begin(PeerId("other"), "192.0.2.1", 1, 0.0):
        pass

    def prove(key: int) -> None:
        dials.proved(PeerId("ann"), "192.0.2.1", 2 + key)
        while dials.begin(PeerId("other"), "192.0.2.1", 1, 0.0):
            pass

    return Memory(abuse_limits.KNOWN_PLACES, prove, lambda key: dials.begin(PeerId("ann"), "192.0.2.1", 2 + key, 0.0))


def round_trips() -> Memory:
    """Each of its own length: who is not remembered has the deadline of a typical one."""
    calls = call_deadlines.CallDeadlines()
    return Memory(
        call_deadlines.NODES_LIMIT,
        lambda key: calls.record(key, 0.001 * (1 + key)),
        lambda key: calls.deadline_s(key) != calls.deadline_s("nobody"),
    )


def addresses_of_peers() -> Memory:
    book = directory.AddressBook()
    return Memory(
        directory.ENTRY_LIMIT,
        lambda key: book.add(PeerId(str(key)), ["/ip4/192.0.2.1/tcp/1"]),
        lambda key: bool(book.addresses_of(PeerId(str(key)))),
    )


def pinged_peers() -> Memory:
    pings = directory.PingSchedule(1.0)
    return Memory(
        directory.PEERS_MOST,
        lambda key: pings.record_result(PeerId(str(key)), 0.0, is_answered=True),
        lambda key: pings.has_answered(PeerId(str(key))),
    )


def ended_lives() -> Memory:
    past = endpoint.PastIncarnations()
    return Memory(
        endpoint.PEERS,
        lambda key: past.record_end(PeerId(str(key)), b"life"),
        lambda key: past.has_ended(PeerId(str(key)), b"life"),
    )


def payloads_that_are_over() -> Memory:
    receiver = multipath.Reassembler(allocate=lambda size: memoryview(bytearray(size)))

    def part(key: int) -> Start:
        return Start(Use.MESSAGE, 0, 1, Part(key, 2, 0))

    return Memory(
        multipath.REMEMBERED,
        lambda key: receiver.refuse(part(key)),
        lambda key: receiver.state_of(part(key)) is multipath.PayloadState.OVER,
        is_renewed=False,
    )


def wrong_chunks() -> Memory:
    """Of each a donor: who is remembered is not asked again once somebody else has shown the right one."""
    times = [0.0]
    donors = state_client.DonorBlocklist(lambda: times[0])

    def is_remembered(key: int) -> bool:
        times[0] = 1e6
        donors.record_right(PeerId("witness"), (Digest("head"), key))
        return donors.is_blocked(PeerId(str(key)))

    return Memory(
        state_client.REMEMBERED,
        lambda key: donors.record_wrong(PeerId(str(key)), (Digest("head"), key)),
        is_remembered,
        is_renewed=False,
    )


MEMORIES = (
    rate_limiter,
    decaying_counter,
    blocked_machines,
    blamed_peers,
    places_of_peers,
    round_trips,
    addresses_of_peers,
    pinged_peers,
    ended_lives,
    payloads_that_are_over,
    wrong_chunks,
)


@pytest.mark.parametrize("make", MEMORIES, ids=lambda make: make.__name__)
def test_the_oldest_is_forgotten_and_what_was_used_again_stays(make: Callable[[], Memory]) -> None:
    memory = make()
    for key in range(memory.most):
        memory.put(key)
    memory.put(0)
    memory.put(memory.most)
    first, second = (1, 0) if memory.is_renewed else (0, 1)
    assert not memory.has(first)
    assert memory.has(second)
    assert memory.has(memory.most // 2)
    assert memory.has(memory.most), "what came last is never what goes"
