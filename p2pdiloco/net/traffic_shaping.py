"""Upload budget: which connection writes bulk data next, and how fast the kernel may send it.

Two mechanisms keep the budget. The schedule in user space, in this module, is exact over all peers. Bulk data is handed
to sockets at the budget's rate; control data is written at once and counted, so that bulk yields to it. The kernel's
pacing per socket smooths the traffic, and limits it while this process is late. Each socket is paced at the budget plus
PACING_HEADROOM. Late data can thus catch up, and the kernel's queues stay empty; control data would wait there behind
bulk data.

Rules of this file:
1. The module is pure: time is a number; connections and peers are any hashable names.
2. A turn writes at least TURN_BYTES and at most a chunk more. That is one or two tenths of a millisecond of encryption,
   so that incoming and outgoing control data waits no longer.
3. Pacing follows the budget only when that has changed by more than PACING_STEP.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import ceil
from typing import Generic, TypeVar

# -- Pacer -------------------------------------------------------------------------------------------------------------
# A rate kept by an absolute schedule: late data may catch up, within a bounded burst.
#
# Rules of this file:
# 1. The module is pure: time is a number (seconds on any monotonic clock).
# 2. Urgent data (control) is charged without asking. Its debt is bounded, so that other data is not starved for ever.
# 3. A rate of None is no limit and costs nothing.


BURST_S = 0.012
"""Longest delay that may be caught up: longer than timers are late, and well under 3 % of a second."""
DEBT_S = 1.0
"""Maximum debt of control data in the schedule."""
SLICE_S = 0.002
"""Approximate duration of a slice, which is how long data that overtakes it waits."""
SLICE_LEAST, SLICE_MOST = 16 << 10, 128 << 10
"""One TLS record; what is encrypted and decrypted in a tenth of a millisecond. Slices of at most 64 KiB took 15 % more
CPU (benchmarks/notes.md, control under bulk)."""
SLICE_SLOW_S, SLICE_SLOW = 0.25, 1 << 10
"""Longest duration of a slice below 64 kB/s, down to a packet."""
SLICE_UNLIMITED = 256 << 10
"""Slice without a budget: one chunk, for a tenth less CPU."""


class Pacer:
    """Pacer of one rate in bytes per second, by the rules above."""

    def __init__(self, bytes_per_s: float | None = None, *, burst_s: float = BURST_S) -> None:
        assert bytes_per_s is None or bytes_per_s > 0
        self.bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._paid_s = float("-inf")
        """Time at which the schedule has paid for all charged bytes."""

    def set_rate(self, bytes_per_s: float | None, now: float) -> None:
        """Change the rate. A debt stays the same in bytes; unused time at the old rate does not count any more."""
        assert bytes_per_s is None or bytes_per_s > 0
        debt_bytes = max(0.0, self._paid_s - now) * (self.bytes_per_s or 0.0)
        self.bytes_per_s = bytes_per_s
        self._paid_s = now + min(DEBT_S, debt_bytes / bytes_per_s) if bytes_per_s else float("-inf")

    def charge(self, count: int, now: float) -> None:
        """Charge ``count`` bytes that were sent when the schedule was ready."""
        if self.bytes_per_s is not None:
            self._paid_s = max(self._paid_s, now - self._burst_s) + count / self.bytes_per_s

    def charge_control(self, count: int, now: float) -> None:
        """Charge ``count`` bytes that were sent without asking."""
        if self.bytes_per_s is not None:
            paid_s = max(self._paid_s, now - self._burst_s) + count / self.bytes_per_s
            self._paid_s = max(self._paid_s, min(paid_s, now + DEBT_S))

    def ready_at(self) -> float:
        """Return the time from which the next slice may be sent; a past time means at once."""
        return self._paid_s

    def is_ready(self, now: float) -> bool:
        return self._paid_s <= now


def slice_bytes(bytes_per_s: float | None) -> int:
    """Return the number of bytes to send at once at this rate."""
    if bytes_per_s is None:
        return SLICE_UNLIMITED
    least = min(SLICE_LEAST, max(SLICE_SLOW, ceil(bytes_per_s * SLICE_SLOW_S)))
    return min(SLICE_MOST, max(least, ceil(bytes_per_s * SLICE_S)))


# -- Fair scheduler ----------------------------------------------------------------------------------------------------
# Choice of the next sender: one budget over all peers, equal turns in bytes.
#
# Rules of this file:
# 1. The module is pure: time is a number; peers and members (connections) are any hashable names.
# 2. The choice never depends on hash order: ties go to the peer that has waited longest.
# 3. ``next`` chooses, ``charge`` counts. A choice that sends nothing is not charged.
# 4. Payloads to several peers go one after the other, not side by side: so the first can pass a commit on when a fourth
#    of the time has passed, and not all at the end. A peer that cannot send ends its turn, and one whose data are not
#    urgent, such as states, after each slice.


PEER_TURN_BYTES = 4 << 20
"""Most bytes that a peer is sent in its turn: four times a shard's payload in four bits (``schedule.max_shard``). A
payload of two turns would be with nobody before it is with all. A commit also has 180 bytes for each learner."""
Member = TypeVar("Member", bound=Hashable)


class _Peer(Generic[Member]):
    """Account of one peer."""

    __slots__ = ("members", "served")

    def __init__(self) -> None:
        self.served = 0.0
        self.members: dict[Member, None] = {}
        """Members that can send now, the next one first."""


class FairScheduler(Generic[Member]):
    """Fair scheduler of one budget over all peers, by the rules above."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.total = Pacer(bytes_per_s)
        """The budget of all peers together."""
        self._peers: dict[Hashable, _Peer[Member]] = {}
        self._ready: dict[Hashable, _Peer[Member]] = {}
        """Peers with members that can send."""
        self._level = 0.0
        """Bytes served to the last chosen peer, before its turn."""
        self._turn: _Peer[Member] | None = None
        self._turn_ends = 0.0
        """Bytes served to that peer when its turn ends."""

    def add(self, peer: Hashable, member: Member) -> None:
        """Record that ``member`` of ``peer`` can send."""
        account = self._peers.setdefault(peer, _Peer())
        if not account.members:
            self._ready[peer] = account
        account.members.setdefault(member, None)

    def remove(self, peer: Hashable, member: Member) -> None:
        """Record that ``member`` cannot send: it has no data, or must wait for something else."""
        account = self._peers.get(peer)
        if account is None or member not in account.members:
            return
        del account.members[member]
        if not account.members:
            del self._ready[peer]

    def forget(self, peer: Hashable) -> None:
        """Forget a peer."""
        if (account := self._peers.pop(peer, None)) is not None:
            account.members.clear()
        self._ready.pop(peer, None)

    def next(self, now: float) -> tuple[Member, int] | None:
        """Return the member to send next and its maximum bytes; None if none may send now."""
        if not self._ready or not self.total.is_ready(now):
            return None
        turn = self._turn
        if turn is None or not turn.members or turn.served >= self._turn_ends:
            self._turn = turn = min(self._ready.values(), key=lambda account: account.served)
            self._level = turn.served = max(self._level, turn.served)
            self._turn_ends = turn.served + PEER_TURN_BYTES
        return next(iter(turn.members)), slice_bytes(self.total.bytes_per_s)

    def next_at(self) -> float | None:
        """Return the earliest time at which ``next`` may have a result; None if no member can send."""
        return self.total.ready_at() if self._ready else None

    def charge(self, peer: Hashable, member: Member | None, count: int, now: float, *, ends_turn: bool = False) -> None:
        """Charge ``count`` bytes sent to ``peer``. ``member`` is the one whose turn it was; None for control data."""
        if ends_turn:
            self._turn = None
        if member is None:
            self.total.charge_control(count, now)
        else:
            self.total.charge(count, now)
        account = self._peers.get(peer)
        if account is None:
            return
        account.served += count
        if member in account.members:
            del account.members[member]
            account.members[member] = None
            # Move the peer behind others that have been served as much.
            del self._ready[peer]
            self._ready[peer] = account


# -- Traffic shaper ----------------------------------------------------------------------------------------------------
# Combines the fair scheduler with the kernel's pacing.


TURN_BYTES = 128 << 10
"""Bulk that is written in one turn of the event loop (benchmarks/notes.md, control under bulk)."""
PACING_HEADROOM = 1.25
"""Times the budget at which the kernel paces a socket. At 4 a request under bulk took 10 to 16 ms, because the
receiver's socket fills (benchmarks/notes.md, control under bulk)."""
PACING_STEP = 0.05
PACING_LEAST = 1_000_000.0
"""Minimum pacing rate in bytes per second. The kernel's pacing delays control, too, so the schedule alone limits lower
rates."""

Sender = TypeVar("Sender", bound=Hashable)


class Shaper(Generic[Sender]):
    """Shaper of all connections. ``next`` chooses a sender; report its result with ``wrote`` or ``cannot``."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._shares: FairScheduler[Sender] = FairScheduler(bytes_per_s)
        self._senders: dict[Sender, Hashable] = {}
        """All connections, with their peers."""
        self._paced: dict[Sender, float | None] = {}
        self._news: dict[Sender, float | None] = {}

    @property
    def bytes_per_s(self) -> float | None:
        return self._shares.total.bytes_per_s

    def set_budget(self, bytes_per_s: float | None, now: float) -> None:
        """Set the total rate in bytes per second; None: no limit."""
        self._shares.total.set_rate(bytes_per_s, now)
        for sender in self._senders:
            self._pace(sender)

    def open(self, peer: Hashable, sender: Sender) -> None:
        """Add a connection. It is paced before it sends its first chunk."""
        self._senders[sender] = peer
        self._pace(sender)

    def close(self, sender: Sender) -> None:
        """Remove a connection."""
        peer = self._senders.pop(sender, None)
        self._paced.pop(sender, None)
        self._news.pop(sender, None)
        if peer is None:
            return
        self._shares.remove(peer, sender)
        if peer not in self._senders.values():
            self._shares.forget(peer)

    def ready(self, sender: Sender) -> None:
        """Record that ``sender`` has bulk data and may be able to write it."""
        if (peer := self._senders.get(sender)) is not None:
            self._shares.add(peer, sender)

    def wrote_control(self, sender: Sender, count: int, now: float) -> None:
        """Charge control data that was written at once; bulk data yields to it."""
        self._shares.charge(self._senders.get(sender), None, count, now)

    def next_at(self) -> float | None:
        """Return the earliest time at which ``next`` may have a result; None if no sender is ready."""
        return self._shares.next_at()

    def next(self, now: float) -> tuple[Sender, int] | None:
        """Return the connection that writes a chunk now, and its maximum bytes; None if none may."""
        return self._shares.next(now)

    def wrote(self, sender: Sender, count: int, now: float, *, ends_turn: bool = False) -> None:
        """Record that ``sender`` wrote ``count`` bytes of bulk data in its turn, and whether that is over."""
        self._shares.charge(self._senders[sender], sender, count, now, ends_turn=ends_turn)

    def cannot(self, sender: Sender) -> None:
        """Record that ``sender`` cannot write until it is ready again."""
        self._shares.remove(self._senders[sender], sender)

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def news(self) -> dict[Sender, float | None]:
        """Return the rates at which to pace sockets from now on, since the last call."""
        news, self._news = self._news, {}
        return news

    def _pace(self, sender: Sender) -> None:
        budget = self.bytes_per_s
        rate = None if budget is None else max(PACING_LEAST, budget * PACING_HEADROOM)
        old = self._paced.get(sender)
        is_same = rate is old if rate is None or old is None else abs(rate - old) <= PACING_STEP * old
        if not is_same:
            self._paced[sender] = self._news[sender] = rate
