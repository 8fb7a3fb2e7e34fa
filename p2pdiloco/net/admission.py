"""Who gets a place where places are few: connections that have not proved themselves, and peers.

Rules of this file:
1. Of the machine that would hold most, the one that was quiet longest makes room: who fills the places from one machine
   takes from himself.
2. Ties go against the machine that came first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Generic, TypeVar

Holder = TypeVar("Holder")


def machine_of(host: str) -> str:
    """Whom an address stands for: one IPv4 address, or the /64 of an IPv6 one, which one line gets as a whole."""
    if ":" not in host:
        return host
    head, gap, tail = host.partition("::")
    groups = head.split(":") if head else []
    if gap:
        rest = tail.split(":") if tail else []
        groups += ["0"] * (8 - len(groups) - len(rest)) + rest
    return ":".join(groups[:4])


class Room(Generic[Holder]):
    """So many places, and somebody always goes for who comes: of the machine that would hold most, the first comer."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._holders: dict[Holder, str] = {}
        self._by_machine: dict[str, dict[Holder, None]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def holders(self) -> Mapping[Holder, str]:
        """And of which machine each is, the first comer first."""
        return self._holders

    def enter(self, newcomer: Holder, machine: str) -> Holder | None:
        """Somebody comes; who goes for it."""
        out = None
        if len(self._holders) >= self._places:
            largest = max(self._by_machine, key=lambda one: len(self._by_machine[one]) + (one == machine))
            out = next(iter(self._by_machine[largest]))
            self.leave(out)
        self._holders[newcomer] = machine
        self._by_machine.setdefault(machine, {})[newcomer] = None
        return out

    def leave(self, holder: Holder) -> None:
        """If it is there."""
        machine = self._holders.pop(holder, None)
        if machine is not None:
            del self._by_machine[machine][holder]
            if not self._by_machine[machine]:
                del self._by_machine[machine]


def displaced(places: Mapping[Holder, tuple[str, float]], newcomer: str) -> Holder | None:
    """Who makes room for somebody from ``newcomer``'s machine. ``places``: who is there, from which machine, and heard
    of last at which time, the first comer first. None: nobody, no machine holds more; the newcomer is refused."""
    counts = Counter(machine for machine, _ in places.values())
    counts[newcomer] += 1
    largest = max(counts, key=lambda machine: counts[machine])
    if counts[largest] <= counts[newcomer]:
        return None
    heard = {holder: heard_at for holder, (machine, heard_at) in places.items() if machine == largest}
    return min(heard, key=lambda holder: heard[holder])
