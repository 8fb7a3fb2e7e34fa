"""A meeting point's decisions: bytes and times in, events out."""

from __future__ import annotations

import pytest

from p2pdiloco.nat.introducer import (
    AGAIN_S,
    ASKED_BURST,
    ASKED_PER_S,
    CALLED_BURST,
    CALLED_PER_S,
    PAIR_S,
    PAIRS,
    PAIRS_OF_PEER,
    Hang,
    Introducer,
    Joined,
    NotIntroducedError,
    Say,
)
from p2pdiloco.nat.messages import (
    OPENING,
    PROBE,
    REFUSED,
    RELAY,
    RELAYED,
    Attend,
    Called,
    Meet,
    Reachable,
    Seen,
    decode_opening,
    encode_opening,
    seen_size,
)
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.wire.control_messages import decode_as, encode
from p2pdiloco.wire.directory_records import PeerRecord

ANN, BOB = PeerId("ann"), PeerId("bob")
TICKETS = (b"a" * 16, b"b" * 16)


def asked(point: Introducer, now: float = 0.0, number: int = 0) -> tuple[bytes, bytes]:
    tickets = (number.to_bytes(16, "big"), number.to_bytes(16, "little")) if number else TICKETS
    point.ask(ANN, "5.0.0.1", BOB, tickets, now)
    return tickets


def both_open(point: Introducer, now: float = 0.0, *, seen_port: int = 2000) -> list[object]:
    asked(point, now)
    point.handle_opened("ann", TICKETS[0], "5.0.0.1", 1000, 1000, now)
    assert list(point.events()) == []
    point.handle_opened("bob", TICKETS[1], "5.0.0.2", seen_port, 2000, now)
    return list(point.events())


def seen_in(event: object) -> Seen:
    assert isinstance(event, Say)
    assert seen_size(event.data[:2]) == len(event.data) - 2
    return decode_as(event.data[2:], Seen)


def test_both_are_told_of_both_when_both_are_there():
    to_ann, to_bob = both_open(Introducer(relays=1))
    assert seen_in(to_ann) == Seen("5.0.0.1", 1000, "5.0.0.2", 2000, True)
    assert seen_in(to_bob) == Seen("5.0.0.2", 2000, "5.0.0.1", 1000, True)


def test_a_router_that_changes_ports_gives_little_hope():
    assert not seen_in(both_open(Introducer(relays=1), seen_port=3333)[0]).is_hopeful


def test_who_cannot_be_reached_directly_is_relayed_when_both_say_so():
    point = Introducer(relays=1)
    both_open(point)
    point.handle_data("ann", RELAY, 1.0)
    assert list(point.events()) == []
    point.handle_data("bob", RELAY, 1.0)
    assert list(point.events()) == [Say("ann", RELAYED), Say("bob", RELAYED), Joined(("ann", "bob"))]
    assert point.relayed_pairs == 1
    point.wake(1.0 + 2 * PAIR_S)
    assert list(point.events()) == []
    point.handle_relay_ended(("ann", "bob"))
    assert point.relayed_pairs == 0


def test_no_more_pairs_are_relayed_than_there_are_places():
    point = Introducer(relays=0)
    both_open(point)
    point.handle_data("ann", RELAY, 1.0)
    point.handle_data("bob", RELAY, 1.0)
    said = list(point.events())
    assert [event.line for event in said if isinstance(event, Hang)] == ["ann", "bob"]
    assert all(event.data.startswith(REFUSED) and b"does not relay" in event.data for event in said[::2])
    assert point.relayed_pairs == 0


def is_relayed(point: Introducer, now: float, asker: str = "ann", wanted: str = "bob") -> bool:
    """Whether a pair that needs a relay now gets one."""
    tickets = (f"{asker}{wanted}{now:8}".encode().ljust(16)[-16:], f"{now:16}".encode()[-16:])
    point.ask(PeerId(asker), f"host of {asker} {now}", PeerId(wanted), tickets, now)
    lines = [(asker, now), (wanted, now)]
    for line, ticket in zip(lines, tickets, strict=True):
        point.handle_opened(line, ticket, line[0], 1000, 1000, now)
    for line in lines:
        point.handle_data(line, RELAY, now)
    return any(isinstance(event, Joined) for event in point.events())


def test_a_relay_tells_of_no_more_room_than_it_has_places() -> None:
    """Each pair takes descriptors, however fast the line is."""
    point = Introducer(relays=85, room=64)
    assert point.pairs_most == 64
    point.room = 128
    assert point.pairs_most == 85
    assert Introducer(relays=0).pairs_most == 0


def test_a_pair_for_which_there_is_no_room_is_relayed_when_it_asks_again():
    """So it tries its other relays first, and a swarm whose only relay has a slow line keeps all its pairs."""
    point = Introducer(relays=4)
    point.room = 1
    assert is_relayed(point, 0.0)
    assert not is_relayed(point, 1.0, "ann", "cid")
    assert not is_relayed(point, 2.0, "cid", "ann"), "the other one has its own relays to try"
    assert is_relayed(point, AGAIN_S, "ann", "cid")
    assert not is_relayed(point, 2.0 + AGAIN_S, "cid", "ann"), "that is long ago"
    point.room = 3
    assert is_relayed(point, 3.0 + AGAIN_S, "ann", "dan")
    point.room = 0
    assert not is_relayed(point, 4.0 + AGAIN_S, "ann", "eve")
    assert is_relayed(point, 5.0 + AGAIN_S, "ann", "eve")
    assert point.relayed_pairs == 4
    assert not is_relayed(point, 6.0 + AGAIN_S, "ann", "fay")
    assert not is_relayed(point, 7.0 + AGAIN_S, "ann", "fay"), "no place is left"


def test_few_refused_pairs_are_remembered():
    point = Introducer(relays=1)
    point.room = 0
    for number in range(PAIRS + 1):
        assert not is_relayed(point, 0.1 * number, f"a{number}", f"b{number}")
    assert is_relayed(point, 0.1 * PAIRS + 1.0, f"a{PAIRS}", f"b{PAIRS}")
    assert not is_relayed(point, 0.1 * PAIRS + 2.0, "a0", "b0")


def test_a_ticket_serves_once_and_not_for_ever():
    point = Introducer(relays=1)
    asked(point)
    point.handle_opened("ann", TICKETS[0], "5.0.0.1", 1000, 1000, 0.0)
    point.handle_opened("eve", TICKETS[0], "5.0.0.9", 1000, 1000, 0.0)
    refusal, hang = point.events()
    assert (refusal.data[:1], hang) == (REFUSED, Hang("eve"))
    point.wake(PAIR_S)
    assert list(point.events()) == [Hang("ann")]
    point.handle_opened("bob", TICKETS[1], "5.0.0.2", 2000, 2000, PAIR_S)
    assert Hang("bob") in list(point.events())


def test_an_end_of_one_line_ends_the_other():
    point = Introducer(relays=1)
    both_open(point)
    point.handle_closed("ann", 1.0)
    assert list(point.events()) == [Hang("bob")]
    assert point.next_deadline() is None


@pytest.mark.parametrize("data", [b"RR", b"x", b"\x16", RELAYED])
def test_garbage_on_a_line_ends_the_pair(data):
    point = Introducer(relays=1)
    both_open(point)
    point.handle_data("ann", data, 1.0)
    assert set(point.events()) == {Hang("ann"), Hang("bob")}


def test_who_says_relay_before_the_other_is_there_is_hung_up_on():
    point = Introducer(relays=1)
    asked(point)
    point.handle_opened("ann", TICKETS[0], "5.0.0.1", 1000, 1000, 0.0)
    point.handle_data("ann", RELAY, 0.0)
    assert list(point.events()) == [Hang("ann")]


def test_who_is_called_may_say_no():
    point = Introducer(relays=1)
    asked(point)
    point.withdraw(TICKETS[1], 0.1)
    point.handle_opened("ann", TICKETS[0], "5.0.0.1", 1000, 1000, 0.2)
    assert Hang("ann") in list(point.events())


def test_a_peer_has_few_introductions_at_once_and_a_machine_few_a_minute():
    point = Introducer(relays=1)
    for number in range(1, PAIRS_OF_PEER + 1):
        asked(point, number=number)
    with pytest.raises(NotIntroducedError, match="in progress"):
        asked(point, number=99)
    introduced = PAIRS_OF_PEER
    for number in range(100, 700):
        now = (number - 100) / 10
        try:
            tickets = (number.to_bytes(16, "big"), number.to_bytes(16, "little"))
            point.ask(PeerId(f"ann {number}"), "5.0.0.1", PeerId(f"bob {number}"), tickets, now)
            introduced += 1
        except NotIntroducedError:
            continue
    assert introduced == int(ASKED_BURST + 59.9 * ASKED_PER_S)
    assert ASKED_BURST + 60 * ASKED_PER_S <= 60
    asked(point, 120.0, number=5000)


def test_nobody_is_called_more_often_than_so_often_a_minute_by_however_many():
    point = Introducer(relays=1)
    called = 0
    for number in range(1, 250):
        tickets = (number.to_bytes(16, "big"), number.to_bytes(16, "little"))
        try:
            point.ask(PeerId(f"eve {number}"), f"5.0.{number}.1", BOB, tickets, 0.0)
            called += 1
            point.withdraw(tickets[0], 0.0)
        except NotIntroducedError:
            pass
    assert called == CALLED_BURST
    assert CALLED_BURST + 60 * CALLED_PER_S <= 60


def test_pairs_in_all_are_bounded():
    point = Introducer(relays=1)
    for number in range(1, PAIRS + 1):
        tickets = (number.to_bytes(16, "big"), number.to_bytes(16, "little"))
        point.ask(PeerId(f"a{number}"), f"5.1.{number}.1", PeerId(f"b{number}"), tickets, 0.0)
    with pytest.raises(NotIntroducedError, match="in progress"):
        asked(point)
    asked(point, PAIR_S)


def test_requests_are_read_as_they_were_written():
    for request in (
        Attend((1,), b"t"),
        Meet("bob", True),
        Called("ann", b"t" * 16, False),
        Reachable(PeerRecord(("here",))),
    ):
        assert decode_as(encode(request), type(request)) == request


def test_an_opening_is_what_it_says():
    assert decode_opening(encode_opening(b"t" * 16, 4100)) == (OPENING, 4100, b"t" * 16)
    assert decode_opening(encode_opening(b"t" * 16, 0, PROBE))[0] == PROBE
    for bad in (b"", b"x" * 34, encode_opening(b"t" * 15, 1)):
        with pytest.raises(ValueError, match="first bytes of a line"):
            decode_opening(bad)
    with pytest.raises(ValueError, match="a Seen of"):
        seen_size(b"\xff\xff")
