"""Event bus between the components of a node: a component that publishes an event need not know its listeners.

An event is an immutable object, and its class is its kind. The bus is created before all components, so that one that
is built early can report to one that is built later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

Event = TypeVar("Event")


class EventBus:
    """Calls the listeners of an event's class, in the order in which they subscribed."""

    def __init__(self) -> None:
        self._listeners: defaultdict[type, list[Callable[[Any], None]]] = defaultdict(list)

    def subscribe(self, kind: type[Event], listener: Callable[[Event], None]) -> None:
        """Call ``listener`` with each event of class ``kind`` from now on."""
        self._listeners[kind].append(listener)

    def publish(self, event: object) -> None:
        """Call all listeners of the event's class. An exception in a listener propagates to the publisher."""
        for listener in self._listeners[type(event)]:
            listener(event)
