"""Dials on others' word: what is in vain has a budget, what proves itself has none."""

from __future__ import annotations

from p2pdiloco.net.abuse_limits import A_MINUTE, ALL_A_MINUTE, KNOWN_PLACES, MINUTE_S, DialRateLimit
from p2pdiloco.protocol.ids import PeerId

BOB = PeerId("bob")


def test_a_machine_is_dialled_so_often_in_vain_and_again_after_a_minute() -> None:
    dials = DialRateLimit()
    tries = [dials.begin(PeerId(str(port)), "1.1.1.1", port, 0.0) for port in range(1000)]
    assert tries == [True] * A_MINUTE + [False] * (1000 - A_MINUTE)
    assert dials.begin(BOB, "1.1.1.2", 1, 0.0), "another machine is not meant"
    assert not dials.begin(BOB, "1.1.1.1", 1, MINUTE_S - 1)
    assert dials.begin(BOB, "1.1.1.1", 1, MINUTE_S)


def test_one_line_of_ipv6_is_one_machine() -> None:
    dials = DialRateLimit()
    assert sum(dials.begin(BOB, f"2606:4700::{number:x}", 1, 0.0) for number in range(1, 200)) == A_MINUTE


def test_all_machines_together_have_a_bound_too() -> None:
    dials = DialRateLimit()
    assert sum(dials.begin(BOB, f"1.1.{n // 250}.{n % 250}", 1, 0.0) for n in range(5000)) == ALL_A_MINUTE


def test_a_site_whose_peers_answer_is_dialled_as_often_as_one_likes() -> None:
    dials = DialRateLimit()
    for port in range(500):
        peer = PeerId(str(port))
        assert dials.begin(peer, "1.1.1.1", port, 0.0)
        dials.proved(peer, "1.1.1.1", port)
    assert dials.begin(PeerId("new"), "1.1.1.1", 999, 0.0)


def test_where_a_peer_was_it_is_looked_for_without_end_and_others_are_not() -> None:
    dials = DialRateLimit()
    assert dials.begin(BOB, "1.1.1.1", 7, 0.0)
    dials.proved(BOB, "1.1.1.1", 7)
    while dials.begin(PeerId("forged"), "1.1.1.1", 9, 0.0):
        pass
    assert all(dials.begin(BOB, "1.1.1.1", 7, 0.0) for _ in range(100))
    assert not dials.begin(PeerId("forged"), "1.1.1.1", 7, 0.0)


def test_what_is_remembered_is_bounded() -> None:
    dials = DialRateLimit()
    for number in range(KNOWN_PLACES + 5):
        dials.proved(PeerId(str(number)), "1.1.1.1", 1)
    assert len(dials._proved) == KNOWN_PLACES
