"""Who is live: heard in time, and hears us."""

from __future__ import annotations

import msgspec

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.membership import Membership
from p2pdiloco.protocol.messages import Heartbeat
from p2pdiloco.protocol.ownership import Owners

ME, OTHER = PeerId("me"), PeerId("other")
BEAT = Heartbeat(
    sequence=1,
    echo=0,
    echo_held_s=0.0,
    phase="training",
    is_participating=True,
    step=0,
    step_time_s=0.5,
    heads_mark=0,
    weight=1.0,
)


def met() -> Membership:
    membership = Membership(ME, 1.0)
    membership.connect(OTHER, 0.0)
    return membership


def hear(membership: Membership, now: float, **changes: object) -> None:
    membership.record_heartbeat(OTHER, msgspec.structs.replace(BEAT, **changes), now)


def test_a_connection_alone_makes_nobody_live() -> None:
    membership = met()
    assert membership.refresh(0.1) == ((), ())
    hear(membership, 0.2)
    assert membership.refresh(0.2) == ((OTHER,), ())
    assert membership.participating == {OTHER}


def test_who_is_silent_is_lost_and_comes_back_with_a_heartbeat() -> None:
    membership = met()
    hear(membership, 0.0)
    membership.refresh(0.0)
    assert membership.refresh(2.9) == ((), ())
    assert membership.refresh(3.1) == ((), (OTHER,))
    hear(membership, 3.2, sequence=2)
    assert membership.refresh(3.2) == ((OTHER,), ())


def test_a_one_way_cut_looks_the_same_from_both_ends() -> None:
    """We hear the other every second, but what it echoes is old: it does not hear us."""
    membership = met()
    for second in range(8):
        sequence = membership.next_sequence(float(second))
        echo = sequence if second < 2 else 2
        hear(membership, second + 0.1, sequence=second + 1, echo=echo, echo_held_s=max(0.0, second - 1.0))
        membership.refresh(second + 0.1)
    assert membership.live == ()


def test_deadlines_follow_the_measured_round_trip() -> None:
    membership = met()
    for second in range(20):
        sequence = membership.next_sequence(float(second))
        hear(membership, second + 0.8, sequence=second + 1, echo=sequence, echo_held_s=0.0)
    view = membership.peers[OTHER]
    assert 0.7 < view.round_trip_s < 0.9
    assert view.deadline_s(1.0) > 3.0 + 2 * view.round_trip_s


def test_what_was_queued_while_this_peer_stood_still_is_no_sample() -> None:
    """Several heartbeats are read at once then, each with an echo of its own."""
    membership = met()
    for second in range(3):
        hear(membership, second + 0.1, sequence=second + 1, echo=membership.next_sequence(float(second)))
    view = membership.peers[OTHER]
    before = view.round_trip_s
    echoes = [membership.next_sequence(3.0), membership.next_sequence(4.0)]
    membership.on_stall(14.0, 10.0)
    for number, echo in enumerate(echoes):
        hear(membership, 14.0, sequence=4 + number, echo=echo, echo_held_s=0.0)
    assert view.round_trip_s == before


def test_misses_while_a_peer_already_owns_last_do_not_prolong_that() -> None:
    """In one slow round it misses the takeover times of several shards."""
    owners = Owners(ME)
    owners.own_weight = 1.0
    owners.set_candidates([(OTHER, 1.0)], [])
    owners.rank(0.0, {})
    for _ in range(4):
        owners.on_turn_missed(OTHER, 0.0, 2.0, {})
    owners.rank(7.9, {})
    assert dict(owners.candidates)[OTHER] < 1e-6
    owners.rank(8.1, {})
    assert owners.candidates == owners.willing


def test_a_repeated_heartbeat_is_no_news() -> None:
    membership = met()
    assert membership.record_heartbeat(OTHER, BEAT, 0.0)
    assert not membership.record_heartbeat(OTHER, BEAT, 1.0)
    assert membership.peers[OTHER].heard_at == 0.0


def test_who_cannot_be_dialled_owns_only_if_nobody_else_can() -> None:
    membership = met()
    membership.owners.own_weight = 2.0
    hear(membership, 0.0, weight=0.0)
    membership.refresh(0.0)
    assert membership.owners.candidates == ((ME, 2.0),)
    membership.owners.own_weight = 0.0
    membership.refresh(0.0)
    assert membership.owners.candidates == ((ME, 1.0), (OTHER, 1.0))


def test_who_leaves_or_joins_owns_nothing() -> None:
    membership = met()
    membership.owners.own_weight = 1.0
    for sequence, phase in enumerate(("joining", "leaving"), start=1):
        hear(membership, 0.0, sequence=sequence, phase=phase)
        membership.refresh(0.0)
        assert membership.owners.candidates == ((ME, 1.0),)
    hear(membership, 0.0, sequence=3)
    membership.owners.is_leaving = True
    membership.refresh(0.0)
    assert membership.owners.candidates == ((OTHER, 1.0),)
