"""Who gets a place where places are few: connections that have not proved themselves, and peers.

Rules of this file:
1. Of the machine that would hold most, the one that was quiet longest makes room: who fills the places from one machine
   takes from himself.
2. Ties go against the machine that came first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

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


def displaced(places: Mapping[Holder, tuple[str, float]], newcomer: str, *, takes_from_equals: bool) -> Holder | None:
    """Who makes room for somebody from ``newcomer``'s machine. ``places``: who is there, from which machine, and heard
    of last at which time, the first comer first. None: nobody, the newcomer is refused.

    ``takes_from_equals``: also from a machine that holds as little as the newcomer's, and from the newcomer's own."""
    counts = Counter(machine for machine, _ in places.values())
    counts[newcomer] += 1
    largest = max(counts, key=lambda machine: counts[machine])
    if counts[largest] <= counts[newcomer] and not takes_from_equals:
        return None
    heard = {holder: heard_at for holder, (machine, heard_at) in places.items() if machine == largest}
    return min(heard, key=lambda holder: heard[holder], default=None)
