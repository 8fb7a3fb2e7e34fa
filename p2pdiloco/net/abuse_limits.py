"""Who gets a place where places are few: connections that have not proved themselves, and peers.

Rules of this file:
1. Of the machine that would hold most, the one that was quiet longest makes room: who fills the places from one machine
   takes from himself.
2. Ties go against the machine that came first.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from p2pdiloco.protocol.ids import PeerId

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
    """A fixed number of places. When full, a newcomer displaces the first comer of the machine that would hold most."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._holders: dict[Holder, str] = {}
        self._by_machine: dict[str, dict[Holder, None]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def holders(self) -> Mapping[Holder, str]:
        """All holders, the first comer first, with each one's machine."""
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


# -- Blocklist by failures ---------------------------------------------------------------------------------------------
# How often what came from a machine came to nothing lately, and whose connections are therefore not heard for a while.
# Rules of this file:
# 1. Pure: time is a number. What is remembered is bounded, whatever comes.
# 2. A machine is shut out for what it did, not for what others do, and not for ever: when its time is over it has some
#    of its failures left, so that one that goes on is out again sooner, and one that has stopped is forgotten.


FORGOTTEN_S = 60.0
"""In which a machine's failures halve."""
MACHINES = 1024
"""Whose failures are remembered."""
SHUT_OUT = 256
"""Machines at once; one more, and the one that has been out longest is heard again."""


class FailureBlocklist:
    """Recent failures of each machine (``net.admission.machine_of``), which fade with time."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}
        """Of a machine, and when it was that many; the one that failed longest ago first."""

    def of(self, machine: str, now: float) -> float:
        """Failures of ``machine`` that are not forgotten yet."""
        failures, at = self._counts.get(machine, (0.0, now))
        return failures * math.exp2((at - now) / FORGOTTEN_S)

    def add(self, machine: str, now: float) -> float:
        """One more; how many that makes."""
        failures = self.of(machine, now) + 1.0
        self._counts.pop(machine, None)
        self._counts[machine] = (failures, now)
        if len(self._counts) > MACHINES:
            del self._counts[next(iter(self._counts))]
        return failures


class Exclusion:
    """See the module's rules. ``failures``: that shut a machine out; ``time_s``: for how long."""

    def __init__(self, *, failures: int, time_s: float) -> None:
        self._most = failures
        self._time_s = time_s
        self._failures = FailureBlocklist()
        self._until: dict[str, float] = {}
        """The one that is heard first again first."""

    def failed(self, machine: str, now: float) -> bool:
        """Once more; whether the machine is out from now on, and was not before."""
        if self._failures.add(machine, now) < self._most or self.has(machine, now):
            return False
        self._until.pop(machine, None)
        self._until[machine] = now + self._time_s
        if len(self._until) > SHUT_OUT:
            del self._until[next(iter(self._until))]
        return True

    def has(self, machine: str, now: float) -> bool:
        """Is it out?"""
        return self._until.get(machine, now) > now

    def machines(self, now: float) -> list[str]:
        """All that are out; the others are forgotten."""
        self._until = {machine: until for machine, until in self._until.items() if until > now}
        return list(self._until)

    def ends(self) -> float | None:
        """When the next is heard again."""
        return next(iter(self._until.values()), None)


# -- Rate limit for dials on others' word ------------------------------------------------------------------------------
# Which dials may be made on others' word: whoever publishes an address has every reader dial it, so nobody's records
# may buy many.
#
# Rules of this file:
# 1. A machine at which dials come to nothing is dialled A_MINUTE times in one; all machines together ALL_A_MINUTE
#    times. What is under way counts as in vain until somebody has proved himself there.
# 2. Where a peer has proved itself, it is dialled as often as its caller likes: it is no victim of somebody's records.
# 3. Times in, answers out; bounded whatever is published.


A_MINUTE = 32
ALL_A_MINUTE = 1024
MINUTE_S = 60.0
KNOWN_PLACES = 4096


class DialRateLimit:
    """See the module's rules. A place is a host and its port."""

    def __init__(self) -> None:
        self._vain: deque[tuple[float, str]] = deque()
        """Begun when, at which machine; oldest first."""
        self._of_machine: Counter[str] = Counter()
        self._proved: OrderedDict[tuple[PeerId, str, int], None] = OrderedDict()

    def begin(self, peer: PeerId, host: str, port: int, now: float) -> bool:
        """Whether ``peer`` may be dialled there."""
        while self._vain and self._vain[0][0] <= now - MINUTE_S:
            self._forget(self._vain.popleft()[1])
        machine = machine_of(host)
        if (peer, host, port) in self._proved:
            return True
        if self._of_machine[machine] >= A_MINUTE or len(self._vain) >= ALL_A_MINUTE:
            return False
        self._vain.append((now, machine))
        self._of_machine[machine] += 1
        return True

    def proved(self, peer: PeerId, host: str, port: int) -> None:
        """Note that ``peer`` answered at this address."""
        place = (peer, host, port)
        if place not in self._proved:
            machine = machine_of(host)
            mine = next((one for one in reversed(self._vain) if one[1] == machine), None)
            if mine is not None:
                self._vain.remove(mine)
                self._forget(machine)
        self._proved[place] = None
        self._proved.move_to_end(place)
        if len(self._proved) > KNOWN_PLACES:
            self._proved.popitem(last=False)

    def _forget(self, machine: str) -> None:
        self._of_machine[machine] -= 1
        if not self._of_machine[machine]:
            del self._of_machine[machine]


# -- Handshake queue ---------------------------------------------------------------------------------------------------
# Whose greeting is answered next. A handshake costs some twenty times what accepting does, so those that fail have a
# budget of their own (measured: benchmarks.hostile.arrivals).
#
# Rules of this file:
# 1. Pure: time is a number.
# 2. A handshake takes one of so many tokens, which come back at a rate, and at once where the other side has proved
#    itself: whoever is let in costs nothing, and a flood not more than the rate.
# 3. The machine with the fewest failures lately goes first: who floods, from however many machines, goes behind who
#    comes for the first time.


Visitor = TypeVar("Visitor")


class HandshakeQueue(Generic[Visitor]):
    """See the module's rules."""

    def __init__(self, *, per_s: float, at_once: int, places: int) -> None:
        """``at_once``: tokens there are at most; ``per_s``: those that come back; ``places``: who may wait."""
        self.room: Room[Visitor] = Room(places)
        """Who waits."""
        self._per_s = per_s
        self._at_once = float(at_once)
        self._tokens = float(at_once)
        self._at = 0.0
        self._failures = FailureBlocklist()

    def next(self, now: float) -> Visitor | None:
        """Who is answered now, and leaves the room; None: nobody waits, or has to."""
        self._come(now)
        if not self.room or self._tokens < 1.0:
            return None
        waiting = self.room.holders
        first = min(waiting, key=lambda visitor: self._failures.of(waiting[visitor], now))
        self.room.leave(first)
        self._tokens -= 1.0
        return first

    def due(self, now: float) -> float | None:
        """Seconds until somebody who waits can be answered; None: nobody waits."""
        self._come(now)
        return max(0.0, (1.0 - self._tokens) / self._per_s) if self.room else None

    def ended(self, machine: str, now: float, *, is_proved: bool) -> None:
        """Note that a handshake ended, and whether the peer proved itself."""
        if is_proved:
            self._tokens = min(self._at_once, self._tokens + 1.0)
        else:
            self._failures.add(machine, now)

    def _come(self, now: float) -> None:
        self._tokens = min(self._at_once, self._tokens + max(0.0, now - self._at) * self._per_s)
        self._at = now


# -- Reputation --------------------------------------------------------------------------------------------------------
# What peers sent that could not be read costs them points, and too many of those the connection, and for a while the
# next one.
#
# Rules of this file:
# 1. Pure: time is a number. Points wear off with time, so that an honest peer with a rare defect stays.
# 2. Bounded: of REMEMBERED peers, those blamed longest ago are forgotten first.


LIMIT = 100.0
"""Points at which a peer is cut off."""
WEARS_OFF_PER_S = 0.5
BODY = 1.0
"""A body that cannot be read."""
FRAMES = 25.0
"""Frames that break the format; they end the connection as well."""
SHUT_OUT_S = 60.0
REMEMBERED = 4096


class Reputation:
    """See the module's rules."""

    def __init__(self) -> None:
        self._points: dict[PeerId, tuple[float, float]] = {}
        """Points, and as of when."""
        self._shut_out: dict[PeerId, float] = {}
        """Until when."""

    def blame(self, peer: PeerId, points: float, now: float) -> bool:
        """Whether that was too much: it is to be cut off."""
        had, at = self._points.pop(peer, (0.0, now))
        total = max(0.0, had - WEARS_OFF_PER_S * (now - at)) + points
        if total >= LIMIT:
            self._shut_out[peer] = now + SHUT_OUT_S
            _bound(self._shut_out)
            return True
        self._points[peer] = (total, now)
        _bound(self._points)
        return False

    def is_shut_out(self, peer: PeerId, now: float) -> bool:
        until = self._shut_out.get(peer)
        if until is not None and until <= now:
            del self._shut_out[peer]
        return peer in self._shut_out


def _bound(remembered: dict[PeerId, tuple[float, float]] | dict[PeerId, float]) -> None:
    if len(remembered) > REMEMBERED:
        del remembered[next(iter(remembered))]


# -- Rate limit for expensive requests ---------------------------------------------------------------------------------
# How much of what costs more to give than to ask for each asker gets.
# Rules of this file:
# 1. Pure: time is a number. So much at once, and then it comes back at a rate.
# 2. Bounded: of REMEMBERED askers, those that took longest ago are forgotten first.


class RequestRateLimit:
    """See the module's rules."""

    def __init__(self, *, at_once: float, per_s: float) -> None:
        self._at_once = at_once
        self._per_s = per_s
        self._taken: dict[Hashable, tuple[float, float]] = {}
        """How much, and as of when; who took longest ago first."""

    def take(self, who: Hashable, now: float) -> bool:
        """One; False: there is none for ``who`` now."""
        taken, at = self._taken.pop(who, (0.0, now))
        taken = max(0.0, taken - self._per_s * max(0.0, now - at))
        is_there = taken + 1.0 <= self._at_once
        self._taken[who] = (taken + is_there, now)
        if len(self._taken) > REMEMBERED:
            del self._taken[next(iter(self._taken))]
        return is_there
