"""Whom a node asks for no state, and for how long."""

from __future__ import annotations

from p2pdiloco.peer.state_client import FIRST_S, REMEMBERED, DonorBlocklist
from p2pdiloco.protocol.ids import Digest, PeerId

A, B = PeerId("a"), PeerId("b")
CHUNK = (Digest("head"), 3)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0


def test_distrust_passes_and_doubles() -> None:
    clock = Clock()
    distrust = DonorBlocklist(lambda: clock.now)
    assert not distrust.is_blocked(A)
    for times in range(3):
        distrust.record_wrong(A, CHUNK)
        clock.now += FIRST_S * 2**times - 0.1
        assert distrust.is_blocked(A)
        clock.now += 0.2
        assert not distrust.is_blocked(A)
    assert not distrust.is_blocked(B)


def test_whom_another_donor_has_shown_to_be_wrong_is_not_asked_again() -> None:
    clock = Clock()
    distrust = DonorBlocklist(lambda: clock.now)
    distrust.record_wrong(A, CHUNK)
    distrust.record_right(B, (Digest("head"), 4))
    clock.now += 1e6
    assert not distrust.is_blocked(A), "that was another chunk"
    distrust.record_wrong(A, CHUNK)
    distrust.record_right(B, CHUNK)
    clock.now += 1e9
    assert distrust.is_blocked(A)
    assert not distrust.is_blocked(B)


def test_who_sends_the_right_chunk_after_a_wrong_one_is_no_witness_against_itself() -> None:
    """Else a newcomer never asks its only donor again, whose answer was spoilt once on the way (seed 70302)."""
    clock = Clock()
    distrust = DonorBlocklist(lambda: clock.now)
    distrust.record_wrong(A, CHUNK)
    clock.now += FIRST_S + 0.1
    distrust.record_right(A, CHUNK)
    assert not distrust.is_blocked(A)
    distrust.record_right(B, CHUNK)
    assert not distrust.is_blocked(A), "that matter is settled"


def test_what_waits_for_a_witness_is_bounded() -> None:
    distrust = DonorBlocklist(lambda: 0.0)
    for number in range(3 * REMEMBERED):
        distrust.record_wrong(PeerId(str(number)), (Digest("head"), number))
    assert len(distrust._wrong) == REMEMBERED
