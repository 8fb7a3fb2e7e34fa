"""Dials on others' word: what is in vain has a budget, what proves itself has none."""

from __future__ import annotations

from p2pdiloco.net.abuse_limits import ALL_VAIN_BURST, KNOWN_PLACES, VAIN_BURST, DialRateLimit
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.protocol.ids import PeerId

BOB = PeerId("bob")


def test_a_machine_is_dialled_so_often_in_vain_and_again_after_a_while() -> None:
    dials = DialRateLimit()
    tries = [dials.begin(PeerId(str(port)), "1.1.1.1", port, 0.0) for port in range(1000)]
    assert tries == [True] * VAIN_BURST + [False] * (1000 - VAIN_BURST)
    assert dials.begin(BOB, "1.1.1.2", 1, 0.0), "another machine is not meant"
    assert not dials.begin(BOB, "1.1.1.1", 1, 3.0)
    assert dials.begin(BOB, "1.1.1.1", 1, 4.0)


def test_no_minute_has_more_dials_in_vain_than_the_threat_model_says() -> None:
    """Which are too few for the machine to shut this peer out."""
    dials = DialRateLimit()
    times = [second / 4 for second in range(4 * 600)]
    began = [now for now in times if dials.begin(PeerId(str(now)), "1.1.1.1", 1, now)]
    most = max(sum(first <= now < first + 60.0 for now in began) for first in began)
    assert most <= 32 < TransportLimits().shut_out_after
    assert len(began) > 5 * VAIN_BURST, "but it is dialled again and again"


def test_one_line_of_ipv6_is_one_machine() -> None:
    dials = DialRateLimit()
    assert sum(dials.begin(BOB, f"2606:4700::{number:x}", 1, 0.0) for number in range(1, 200)) == VAIN_BURST


def test_all_machines_together_have_a_bound_too() -> None:
    dials = DialRateLimit()
    assert sum(dials.begin(BOB, f"1.1.{n // 250}.{n % 250}", 1, 0.0) for n in range(5000)) == ALL_VAIN_BURST


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


def test_who_proves_itself_without_having_been_dialled_gives_nothing_back() -> None:
    dials = DialRateLimit()
    for number in range(ALL_VAIN_BURST):
        assert dials.begin(BOB, f"1.1.{number // 250}.{number % 250}", 1, 0.0)
    for number in range(100):
        dials.proved(PeerId(str(number)), "6.6.6.6", 1)
    assert not dials.begin(BOB, "2.2.2.2", 1, 0.0)
    dials.proved(BOB, "1.1.0.1", 1)
    assert dials.begin(BOB, "2.2.2.2", 1, 0.0)


def test_who_proves_itself_again_gives_nothing_back_again() -> None:
    dials = DialRateLimit()
    while dials.begin(PeerId("forged"), "1.1.1.1", 9, 0.0):
        pass
    for _ in range(5):
        dials.proved(BOB, "1.1.1.1", 7)
    assert [dials.begin(PeerId("forged"), "1.1.1.1", 9, 0.0) for _ in range(3)] == [True, False, False]


def test_a_dial_that_is_refused_for_all_machines_costs_its_own_nothing() -> None:
    dials = DialRateLimit()
    for number in range(ALL_VAIN_BURST):
        assert dials.begin(BOB, f"1.1.{number // 250}.{number % 250}", 1, 0.0)
    assert not any(dials.begin(BOB, "2.2.2.2", port, 0.0) for port in range(100))
    assert all(dials.begin(BOB, "2.2.2.2", port, 2.0) for port in range(VAIN_BURST))


def test_what_is_remembered_is_bounded() -> None:
    dials = DialRateLimit()
    for number in range(KNOWN_PLACES + 5):
        dials.proved(PeerId(str(number)), "1.1.1.1", 1)
    assert len(dials._proved) == KNOWN_PLACES
