"""Who gets a place where places are few, and what malformed bodies cost."""

from __future__ import annotations

import pytest

from p2pdiloco.net.abuse_limits import (
    BODY,
    LIMIT,
    REMEMBERED,
    SHUT_OUT_S,
    WEARS_OFF_PER_S,
    Reputation,
    Room,
    displaced,
    machine_of,
)
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.endpoint import Endpoint
from p2pdiloco.net.events import Closing, Connected, ConnectionId, Disconnected, Event
from p2pdiloco.net.handshake import HandshakeFactory, Role
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.protocol.ids import PeerId

FINGERPRINT = bytes(32)


def endpoint(name: str, **limits: int) -> Endpoint:
    handshake_factory = HandshakeFactory(
        peer=PeerId(name),
        run="run",
        version=1,
        life=name.encode().ljust(16, b"."),
        sign=lambda data: name.encode(),
        verify=lambda peer, data, proof: proof == peer.encode(),
        nonce=lambda: name.encode().ljust(32, b"."),
    )
    return Endpoint(handshake_factory, TransportLimits(lanes=1, **limits))


def exchange(ends: dict[Endpoint, ConnectionId], now: float) -> dict[Endpoint, list[Event]]:
    """Until both are quiet; what each told."""
    told: dict[Endpoint, list[Event]] = {end: [] for end in ends}
    for _ in range(20):
        for here, there in (tuple(ends), tuple(ends)[::-1]):
            told[here] += here.events(now)
            for connection, piece in here.to_send(now):
                if connection == ends[here]:
                    there.receive_data(ends[there], piece.head + bytes(piece.chunk), now)
    return told


def join(victim: Endpoint, name: str, host: str, now: float) -> tuple[Connection, list[Event]]:
    """Somebody connects to ``victim``; its connection there, and what that told."""
    other = endpoint(name)
    ends = {
        victim: victim.add_connection(Role.LISTENER, now, host=host),
        other: other.add_connection(Role.DIALLER, now, host="10.0.0.1"),
    }
    connection = victim.connection(ends[victim])
    for one, its in ends.items():
        one.handle_tls_established(its, FINGERPRINT, now)
    return connection, exchange(ends, now)[victim]


def test_the_oldest_half_open_connection_makes_room() -> None:
    victim = endpoint("victim", handshakes=64)
    idle = [victim.add_connection(Role.LISTENER, float(number), host=f"10.0.1.{number}") for number in range(64)]
    newcomer, told = join(victim, "newcomer", "10.0.0.2", 100.0)
    assert newcomer.is_open
    assert Connected(newcomer.id) in told
    assert Closing(idle[0], False) in told
    assert [victim.connection(one).is_over for one in idle].count(True) == 1


def test_who_opens_many_from_one_machine_takes_from_himself() -> None:
    victim = endpoint("victim", handshakes=64)
    honest = victim.add_connection(Role.LISTENER, 0.0, host="10.0.0.2")
    for number in range(500):
        victim.add_connection(Role.LISTENER, 1.0 + number, host="10.6.6.6")
    list(victim.events(600.0))
    assert not victim.connection(honest).is_over


def test_a_newcomer_takes_a_place_of_the_machine_that_holds_most() -> None:
    victim = endpoint("victim", connections=8)
    sybils = [join(victim, f"sybil {number}", "10.6.6.6", float(number))[0] for number in range(8)]
    assert all(sybil.is_open for sybil in sybils)
    newcomer, told = join(victim, "newcomer", "10.0.0.2", 100.0)
    assert Connected(newcomer.id) in told
    assert any(isinstance(event, Disconnected) and event.connection == sybils[0].id for event in told)
    assert not sybils[0].is_open
    assert len(victim.serving) == 8
    ninth, told = join(victim, "sybil 9", "10.6.6.6", 101.0)
    assert Connected(ninth.id) not in told
    assert not ninth.is_open
    assert newcomer.is_open


@pytest.mark.parametrize(
    ("places", "newcomer", "out"),
    [
        ({}, "a", None),
        ({1: ("a", 5.0)}, "a", None),
        ({1: ("a", 5.0), 2: ("b", 1.0)}, "c", None),
        ({1: ("b", 0.0), 2: ("a", 5.0), 3: ("a", 1.0)}, "b", None),
        ({1: ("b", 0.0), 2: ("a", 5.0), 3: ("a", 1.0)}, "c", 3),
    ],
)
def test_who_makes_room(places: dict[int, tuple[str, float]], newcomer: str, out: int | None) -> None:
    assert displaced(places, newcomer) == out


def test_in_a_room_somebody_always_goes_and_first_of_the_machine_that_would_hold_most() -> None:
    room: Room[str] = Room(3)
    assert [room.enter(one, one[0]) for one in ("a1", "b1", "b2", "c1", "c2")] == [None, None, None, "b1", "c1"]
    assert list(room.holders) == ["a1", "b2", "c2"]
    assert room.enter("d1", "d") == "a1", "they hold as many: the one that came first"
    room.leave("c2")
    room.leave("c2")
    assert len(room) == 2
    assert room.enter("e1", "e") is None


def test_an_ipv6_line_is_one_machine() -> None:
    assert machine_of("203.0.113.5") == "203.0.113.5"
    assert machine_of("2001:db8:1:2::9") == machine_of("2001:db8:1:2:3:4:5:6") == "2001:db8:1:2"
    assert machine_of("2001:db8::9") == "2001:db8:0:0"
    assert machine_of("::1") == "0:0:0:0"


def test_bodies_that_cannot_be_read_cost_the_connection_and_for_a_while_the_next() -> None:
    victim = endpoint("victim")
    liar, _ = join(victim, "liar", "10.6.6.6", 0.0)
    for _ in range(int(LIMIT / BODY) - 1):
        victim.blame(PeerId("liar"), 0.0)
    assert liar.is_open
    victim.blame(PeerId("liar"), 0.0)
    assert not liar.is_open
    victim.handle_connection_lost(liar.id, "closed", 1.0)
    again, told = join(victim, "liar", "10.6.6.6", 2.0)
    assert Connected(again.id) not in told
    assert "could not be parsed" in again.reason
    assert join(victim, "somebody else", "10.6.6.6", 2.0)[0].is_open
    assert join(victim, "liar", "10.6.6.6", 2.0 + SHUT_OUT_S)[0].is_open


def test_a_rare_defect_is_forgiven_and_what_is_remembered_is_bounded() -> None:
    scores = Reputation()
    for number in range(1000):
        assert not scores.blame(PeerId("honest"), BODY, number * BODY / WEARS_OFF_PER_S)
    for number in range(2 * REMEMBERED):
        scores.blame(PeerId(str(number)), BODY, 0.0)
        scores.blame(PeerId(f"bad {number}"), LIMIT, 0.0)
    assert len(scores._points) <= REMEMBERED
    assert len(scores._shut_out) <= REMEMBERED
