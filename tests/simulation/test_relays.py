"""Pairs of simulated volunteers that connect only over a relay: what it costs the relay, and what its end does."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.scale import relays, signatures, volunteers
from benchmarks.scale.relays import body_bytes
from benchmarks.scale.volunteers import Swarm, measure, options
from p2pdiloco.nat.rendezvous_server import LEAST_SHARE
from p2pdiloco.protocol.counted_tokens import TokenCounts
from p2pdiloco.protocol.ids import Digest, LearnerId, PeerId, ShardId
from p2pdiloco.protocol.messages import Commit, CommitHeader, Contributor, Leaving
from p2pdiloco.transport.sockets import DEAD_AFTER_S
from tests.machine_sim.network import Delivery, LinkQuality
from tests.machine_sim.shared_link_network import on_the_line
from tests.simulation.topologies import Pair

TINY = ["--shards", "2", "--seconds", "48"]
BYTES = 900_000
DELAY_S = 0.05
ANY = Leaving("a message")
SENT = BYTES + body_bytes(ANY)


def relayed(*words: str, peers: int) -> tuple[Swarm, Pair]:
    """Return a swarm whose peers have connected and whose learners rest, and one of its relayed pairs."""
    swarm = Swarm(peers, options([*TINY, *words]))
    swarm.network.default = LinkQuality(delay_s=DELAY_S, jitter_s=0.0, bytes_per_s=1e9)
    swarm.world.conditions.is_frozen = True
    swarm.world.run_until(10.0)
    return swarm, min(swarm.network.relay_of)


def arrivals(monkeypatch: pytest.MonkeyPatch, swarm: Swarm, pair: tuple[PeerId, PeerId], *sizes: int) -> list[float]:
    """Send payloads of so many bytes from one to the other, and return the seconds until each has arrived."""
    world, network, found, began_s = swarm.world, swarm.network, list[float](), swarm.world.now

    def deliver(delivery: Delivery) -> None:
        if delivery.message is ANY:
            found.append(world.now - began_s)

    with monkeypatch.context() as patch:
        patch.setattr(network, "_deliver", deliver)
        for size in sizes:
            network.send(world.processes[pair[0]].links[pair[1]], ANY, None, size)
        world.run_until(began_s + 2.0)
    return found


def is_connected(swarm: Swarm, pair: Pair) -> bool:
    """Whether the pair has a connection that carries messages."""
    link = swarm.world.processes[pair[0]].links.get(pair[1])
    return link is not None and link.connection.is_open and not link.is_dead


def test_a_relayed_payload_takes_two_paths_and_the_lines_of_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, pair = relayed("--unreachable", "0.3", peers=3)
    (relay,) = swarm.network.relay_of.values()
    line_s = on_the_line(SENT) * 8 / 50e6
    swarm.network.is_measured, sent = True, swarm.network.lines.uplink(relay).sent
    assert arrivals(monkeypatch, swarm, pair, 0, BYTES) == pytest.approx(
        [2 * DELAY_S, 2 * line_s + 2 * DELAY_S], abs=1e-3
    )
    assert swarm.network.lines.uplink(relay).sent - sent == pytest.approx(on_the_line(SENT), abs=5000)
    assert swarm.network.relayed_bytes == SENT
    direct = arrivals(monkeypatch, swarm, (pair[0], relay), 0, BYTES)
    assert direct == pytest.approx([DELAY_S, line_s + DELAY_S], abs=1e-3)
    assert swarm.network.relayed_bytes == SENT


def test_a_relay_keeps_to_its_budget_on_a_fast_line(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, pair = relayed("--unreachable", "0.3", "--up", "1000", "--down", "1000", "--told-lines", peers=3)
    first, second, third = arrivals(monkeypatch, swarm, pair, BYTES, BYTES, BYTES)
    turn_s = on_the_line(SENT) / (1000e6 / 8 * LEAST_SHARE)
    assert first < 2 * DELAY_S + 0.6 * turn_s
    assert third - first == pytest.approx(2 * turn_s, rel=0.1)
    assert second - first == pytest.approx(turn_s, rel=0.1)


def test_relays_behind_slow_lines_take_few_pairs_while_others_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volunteers, "MIXED", {(1.0, 100.0): 1, (50.0, 300.0): 1})
    swarm, _ = relayed("--unreachable", "0.3", "--mixed", "--told-lines", "--seed", "3", peers=16)
    network = swarm.network
    slow = {name for name, line in swarm.lines.items() if line.up_bytes_per_s < 1e6}
    taken = Counter(network.relay_of.values())
    assert 0 < len(network.relays & slow) < len(network.relays)
    assert sum(taken.values()) == len(network.unreachable)
    assert max(taken[name] for name in slow) < min(taken[name] for name in network.relays - slow)


def test_a_swarm_whose_only_relay_has_a_slow_line_keeps_all_pairs() -> None:
    swarm, _ = relayed("--unreachable", "0.3", "--up", "1", "--told-lines", peers=5)
    (relay,) = set(swarm.network.relay_of.values())
    assert swarm.network.limits(relay)[1] < len(swarm.network.relay_of) == len(swarm.network.unreachable)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_pair_whose_relay_goes_connects_over_another_one(*, is_silent: bool) -> None:
    swarm, pair = relayed("--unreachable", "0.05", peers=8)
    world, network = swarm.world, swarm.network
    relay, other = network.relay_of[pair], *(network.relays - {network.relay_of[pair]})
    if is_silent:
        world.pause(relay, 1000.0)
        network.silence(relay)
        world.run_until(world.now + DEAD_AFTER_S - 1.0)
        assert network.relay_of[pair] == relay
    else:
        world.crash(relay, keeps_disk=False, restart_s=None)
    assert not is_connected(swarm, pair)
    world.run_until(world.now + 5.0)
    assert (network.relay_of[pair], is_connected(swarm, pair)) == (other, True)


def test_pairs_stay_apart_while_all_places_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "RELAYS", 3)
    swarm, pair = relayed("--unreachable", "0.3", peers=8)
    network, world = swarm.network, swarm.world
    assert len(network.unreachable) == 8
    assert sorted(Counter(network.relay_of.values()).values()) == [3, 3]
    waiting = network.unreachable - network.relay_of.keys()
    assert not any(is_connected(swarm, one) for one in waiting)
    world.crash(pair[0], keeps_disk=False, restart_s=None)
    world.run_until(world.now + 10.0)
    assert len(network.relay_of) == min(6, sum(pair[0] not in one for one in network.unreachable))


def test_names_and_signatures_count_as_outside_of_the_simulator() -> None:
    contributors = tuple(Contributor(LearnerId(f"v{n:05}/1"), 0, 10**6, 0, 24, (), bytes(20)) for n in range(1000))
    digest = Digest("0" * 40)
    counts = TokenCounts(usual=tuple((2**63 + n, 1) for n in range(1000)))
    start = (ShardId(0), 1, digest, 24, PeerId("v00000"), contributors, 10**9, digest, digest, digest)
    header = CommitHeader(*start, counts=counts, factors=(100,) * 1000)
    real = signatures.measure(100)["header_kb"] * 10
    assert body_bytes(Commit(header)) / 1e3 == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("words", [[], ["--no-relays"]])
def test_the_share_of_relayed_bytes_is_told(words: list[str]) -> None:
    found = measure(8, options([*TINY, "--unreachable", "0.3", *words]))
    share = found["relayed_share"]
    assert share is not None
    assert (found["violations"], 0.1 < share < 0.5) == (0, not words)
