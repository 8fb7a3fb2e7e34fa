"""Limits against unknown and hostile peers: places, a blocklist, dials, handshakes, reputation.

Everything here is pure: time is a number, and all memory is bounded.

Rules of places (for connections that have not proved themselves, and for peers):
1. When all places are taken, the machine that would hold most of them loses one. The one unused for longest goes. So a
   machine that fills the places takes them from itself.
2. Ties go against the machine that came first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Generic, TypeVar

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.timing import DecayingCounter, RateLimiter, TokenBucket

Holder = TypeVar("Holder")


def machine_of(host: str) -> str:
    """Return the machine that an address counts for: an IPv4 address, or the /64 network of an IPv6 address.

    Providers assign a whole /64 to one line.
    """
    if ":" not in host:
        return host
    head, gap, tail = host.partition("::")
    groups = head.split(":") if head else []
    if gap:
        rest = tail.split(":") if tail else []
        groups += ["0"] * (8 - len(groups) - len(rest)) + rest
    return ":".join(groups[:4])


class Room(Generic[Holder]):
    """A fixed number of places. When full, a newcomer displaces the oldest holder of the machine with most places."""

    def __init__(self, places: int) -> None:
        self._places = places
        self.holders: dict[Holder, str] = {}
        """All holders with their machines, the oldest first."""
        self._by_machine: dict[str, dict[Holder, None]] = {}

    def __len__(self) -> int:
        return len(self.holders)

    def enter(self, newcomer: Holder, machine: str) -> Holder | None:
        """Give ``newcomer`` a place. Return the holder that loses its own, or None if a place was free."""
        out = None
        if len(self.holders) >= self._places:
            largest = max(self._by_machine, key=lambda one: len(self._by_machine[one]) + (one == machine))
            out = next(iter(self._by_machine[largest]))
            self.leave(out)
        self.holders[newcomer] = machine
        self._by_machine.setdefault(machine, {})[newcomer] = None
        return out

    def leave(self, holder: Holder) -> None:
        """Free the place of ``holder``, if it has one."""
        machine = self.holders.pop(holder, None)
        if machine is not None:
            del self._by_machine[machine][holder]
            if not self._by_machine[machine]:
                del self._by_machine[machine]


def displaced(places: Mapping[Holder, tuple[str, float]], newcomer: str) -> Holder | None:
    """Return the holder that makes room for a newcomer from the machine ``newcomer``.

    ``places`` maps each holder to its machine and to the time it was last heard; the oldest holder comes first. The
    result is None if no machine holds more places than the newcomer's; the newcomer is then refused.
    """
    counts = Counter(machine for machine, _ in places.values())
    counts[newcomer] += 1
    largest = max(counts, key=lambda machine: counts[machine])
    if counts[largest] <= counts[newcomer]:
        return None
    heard = {holder: heard_at for holder, (machine, heard_at) in places.items() if machine == largest}
    return min(heard, key=lambda holder: heard[holder])


# -- Blocklist by failures ---------------------------------------------------------------------------------------------
# A machine with many recent failures is blocked for a while: for its own failures only, and not for ever. Some of its
# failures still count when the time is over. So a machine that continues is blocked again sooner, and one that has
# stopped is forgotten.


FORGOTTEN_S = 60.0
"""Half-life of a machine's failures."""
MACHINES = 1024
"""Maximum number of machines whose failures are remembered."""
SHUT_OUT = 256
"""Maximum number of blocked machines; another one replaces the one that was blocked first."""


class Exclusion:
    """Blocks machines (``machine_of``) for ``time_s`` seconds after ``failures`` recent failures."""

    def __init__(self, *, failures: int, time_s: float) -> None:
        self._most = failures
        self._time_s = time_s
        self._failures: DecayingCounter[str] = DecayingCounter(FORGOTTEN_S, max_keys=MACHINES)
        self._until: dict[str, float] = {}
        """Time until which each machine is blocked, the earliest first."""

    def failed(self, machine: str, now: float) -> bool:
        """Count a failure. Return whether it makes the machine blocked."""
        if self._failures.add(machine, now) < self._most or self.has(machine, now):
            return False
        self._until.pop(machine, None)
        self._until[machine] = now + self._time_s
        if len(self._until) > SHUT_OUT:
            del self._until[next(iter(self._until))]
        return True

    def has(self, machine: str, now: float) -> bool:
        """Return whether the machine is blocked."""
        return self._until.get(machine, now) > now

    def machines(self, now: float) -> list[str]:
        """Return all machines that are blocked now."""
        self._until = {machine: until for machine, until in self._until.items() if until > now}
        return list(self._until)

    def ends(self) -> float | None:
        """Return the time at which the next block ends, or None if no machine is blocked."""
        return next(iter(self._until.values()), None)


# -- Rate limit for dials of addresses learned from others -------------------------------------------------------------
# Every reader of a record dials the addresses in it, so published records must not be able to cause many dials.
# 1. Unsuccessful dials are limited, for each machine and in total. A dial counts as unsuccessful until a peer has
#    proved itself there.
# 2. An address at which a peer has proved itself is dialled without limit: it is not the victim of a forged record.


VAIN_BURST, VAIN_PER_S = 16, 16 / 60
"""Limit on unsuccessful dials of one machine: at most 32 in a minute, too few for it to block this peer
(``TransportLimits.shut_out_after``)."""
ALL_VAIN_BURST, ALL_VAIN_PER_S = 512, 512 / 60
"""Limit on unsuccessful dials of all machines together: at most 1024 in a minute."""
KNOWN_PLACES = 4096


class DialRateLimit:
    """Decides whether an address learned from others may be dialled. A place is a host and its port."""

    def __init__(self) -> None:
        self._at_machine: RateLimiter[str] = RateLimiter(burst=VAIN_BURST, per_s=VAIN_PER_S)
        self._in_all = TokenBucket(burst=ALL_VAIN_BURST, per_s=ALL_VAIN_PER_S)
        self._proved: OrderedDict[tuple[PeerId, str, int], None] = OrderedDict()

    def begin(self, peer: PeerId, host: str, port: int, now: float) -> bool:
        """Count a dial of ``peer`` at this place, and return whether it may be made."""
        if (peer, host, port) in self._proved:
            return True
        if self._in_all.available(now) < 1.0 or not self._at_machine.take(machine_of(host), now):
            return False
        return self._in_all.take(now)

    def proved(self, peer: PeerId, host: str, port: int) -> None:
        """Record that ``peer`` has proved itself at this address."""
        place = (peer, host, port)
        if place not in self._proved and self._at_machine.give_back(machine_of(host)):
            self._in_all.give_back()
        self._proved[place] = None
        self._proved.move_to_end(place)
        if len(self._proved) > KNOWN_PLACES:
            self._proved.popitem(last=False)


# -- Handshake queue ---------------------------------------------------------------------------------------------------
# A handshake costs about twenty times as much as accepting a socket, so failed handshakes have a rate limit of their
# own (measured: benchmarks.hostile.arrivals).
# 1. A handshake takes a token and returns it if the other side proves itself. So admitted peers cost nothing, and a
#    flood costs no more than the rate.
# 2. The machine with the fewest recent failures goes first. So a flood, from however many machines, waits behind
#    machines that connect for the first time.


Visitor = TypeVar("Visitor")


class HandshakeQueue(Generic[Visitor]):
    """Queue of at most ``places`` visitors that wait for a handshake.

    Each handshake takes one of ``at_once`` tokens, which are refilled at ``per_s`` a second.
    """

    def __init__(self, *, per_s: float, at_once: int, places: int) -> None:
        self.room: Room[Visitor] = Room(places)
        """Waiting visitors."""
        self._tokens = TokenBucket(burst=at_once, per_s=per_s)
        self._failures: DecayingCounter[str] = DecayingCounter(FORGOTTEN_S, max_keys=MACHINES)

    def next(self, now: float) -> Visitor | None:
        """Remove and return the visitor to answer now; None if none waits, or no token is available."""
        if not self.room or not self._tokens.take(now):
            return None
        waiting = self.room.holders
        first = min(waiting, key=lambda visitor: self._failures.count(waiting[visitor], now))
        self.room.leave(first)
        return first

    def due(self, now: float) -> float | None:
        """Return the seconds until a visitor can be answered, or None if none waits."""
        return self._tokens.wait_s(now) if self.room else None

    def ended(self, machine: str, now: float, *, is_proved: bool) -> None:
        """Record the end of a handshake and whether the peer proved itself."""
        if is_proved:
            self._tokens.give_back()
        else:
            self._failures.add(machine, now)


# -- Reputation --------------------------------------------------------------------------------------------------------
# A peer gets penalty points for data that cannot be parsed. Too many points cost it the connection and block it for a
# while. Points decay, so that an honest peer with a rare defect stays.


LIMIT = 100.0
"""Penalty points at which a peer is disconnected."""
WEARS_OFF_PER_S = 0.5
BODY = 1.0
"""Penalty for a body that cannot be parsed."""
FORGED = 25.0
"""Penalty for a body whose digest or signature is wrong."""
FRAMES = 25.0
"""Penalty for frames that break the format, which also ends the connection."""
SHUT_OUT_S = 60.0
REMEMBERED = 4096


class Reputation:
    """Penalty points of each peer, and the peers that are blocked for them."""

    def __init__(self) -> None:
        self._points: RateLimiter[PeerId] = RateLimiter(burst=LIMIT, per_s=WEARS_OFF_PER_S, max_keys=REMEMBERED)
        self._shut_out: dict[PeerId, float] = {}
        """Time at which each peer's block ends, the earliest first."""

    def blame(self, peer: PeerId, points: float, now: float) -> bool:
        """Add penalty points to ``peer``. Return whether to disconnect it."""
        if self._points.take(peer, now, points) and self._points.available(peer, now) > 0.0:
            return False
        self._shut_out.pop(peer, None)
        self._shut_out[peer] = now + SHUT_OUT_S
        if len(self._shut_out) > REMEMBERED:
            del self._shut_out[next(iter(self._shut_out))]
        return True

    def is_shut_out(self, peer: PeerId, now: float) -> bool:
        """Return whether ``peer`` is blocked."""
        until = self._shut_out.get(peer)
        if until is not None and until <= now:
            del self._shut_out[peer]
        return peer in self._shut_out
