"""Who hears of an event."""

from __future__ import annotations

from typing import NamedTuple

from p2pdiloco.util.event_bus import EventBus


class Joined(NamedTuple):
    peer: str


class Left(NamedTuple):
    peer: str


def test_listeners_of_an_events_class_hear_it_in_order_and_no_others() -> None:
    bus, heard = EventBus(), list[tuple[str, object]]()
    bus.publish(Joined("ann"))  # nobody listens yet
    bus.subscribe(Joined, lambda event: heard.append(("first", event)))
    bus.subscribe(Joined, lambda event: heard.append(("second", event)))
    bus.subscribe(Left, lambda event: heard.append(("left", event)))
    bus.publish(Joined("bob"))
    assert heard == [("first", Joined("bob")), ("second", Joined("bob"))]
