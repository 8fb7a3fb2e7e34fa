"""Whose greeting is answered next."""

from __future__ import annotations

from p2pdiloco.net.abuse_limits import FORGOTTEN_S, HandshakeQueue


def reception(at_once: int = 4, per_s: float = 2.0, places: int = 8) -> HandshakeQueue[str]:
    return HandshakeQueue(per_s=per_s, at_once=at_once, places=places)


def answered(room: HandshakeQueue[str], now: float) -> list[str]:
    """All whose turn it is."""
    found = []
    while (visitor := room.next(now)) is not None:
        found.append(visitor)
    return found


def fill(room: HandshakeQueue[str], machine: str, number: int) -> None:
    for one in range(number):
        room.room.enter(f"{machine} {one}", machine)


def test_who_comes_to_nothing_has_a_budget_and_who_proves_itself_costs_none() -> None:
    room = reception()
    assert answered(room, 0.0) == []
    fill(room, "ann", 8)
    assert len(answered(room, 0.0)) == 4
    assert room.due(0.0) == 0.5
    assert answered(room, 0.4) == []
    assert answered(room, 0.5) == ["ann 4"]
    room.ended("ann", 0.6, is_proved=False)
    assert answered(room, 0.6) == []
    room.ended("ann", 0.7, is_proved=True)
    assert answered(room, 0.7) == ["ann 5"]
    for _ in range(99):
        room.ended("ann", 0.7, is_proved=True)
    fill(room, "bob", 8)
    assert len(answered(room, 0.7)) == 4, "no more at once for that"
    assert len(answered(room, 999.0)) == 4
    assert answered(room, 999.0) == []
    assert room.due(999.0) is None or room.room


def test_who_floods_from_many_machines_goes_behind_who_comes_for_the_first_time() -> None:
    room = reception(places=40)
    for number in range(30):
        room.ended(f"flood {number}", 0.0, is_proved=False)
        fill(room, f"flood {number}", 1)
    answered(room, 0.0)
    fill(room, "newcomer", 1)
    assert answered(room, 0.5) == ["newcomer 0"]


def test_a_machine_that_failed_long_ago_goes_before_one_that_failed_lately() -> None:
    room = reception(at_once=1)
    for _ in range(4):
        room.ended("once bad", 0.0, is_proved=False)
    room.ended("bad lately", 5 * FORGOTTEN_S, is_proved=False)
    fill(room, "bad lately", 1)
    fill(room, "once bad", 1)
    assert answered(room, 5 * FORGOTTEN_S) == ["once bad 0"]
