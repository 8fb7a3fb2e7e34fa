"""Who sends the next slice: one budget over all peers, caps per peer, equal turns in bytes.

Every peer has a count of what it was served. Of the peers that have something to send and are within their caps, the
one with the smallest count goes next; one that had nothing to send, or was at its cap, goes on at the others' level:
nobody saves up turns. The connections of one peer take turns among themselves.

Rules of this file:
1. Pure: time is a number; peers and members (connections) are any hashable names.
2. The choice never depends on hash order: ties go to who has waited longest.
3. ``next`` chooses, ``charge`` counts: what was not sent was not served.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from p2pdiloco.net.meter import Meter, slice_bytes

Member = TypeVar("Member", bound=Hashable)


class _Peer(Generic[Member]):
    """One peer's account."""

    __slots__ = ("cap", "members", "served")

    def __init__(self) -> None:
        self.served = 0.0
        self.cap = Meter()
        self.members: dict[Member, None] = {}
        """Those that can send now, the one whose turn it is first."""


class Shares(Generic[Member]):
    """See the module's rules."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._total = Meter(bytes_per_s)
        self._peers: dict[Hashable, _Peer[Member]] = {}
        self._ready: dict[Hashable, _Peer[Member]] = {}
        """Those with members that can send."""
        self._level = 0.0
        """What whoever was served last had been served."""

    @property
    def bytes_per_s(self) -> float | None:
        return self._total.bytes_per_s

    def set_budget(self, bytes_per_s: float | None, now: float) -> None:
        self._total.set_rate(bytes_per_s, now)

    def set_cap(self, peer: Hashable, bytes_per_s: float | None, now: float) -> None:
        """The cap stays until it is lifted or ``forget``."""
        self._account(peer).cap.set_rate(bytes_per_s, now)

    def cap_of(self, peer: Hashable) -> float | None:
        account = self._peers.get(peer)
        return account.cap.bytes_per_s if account is not None else None

    def add(self, peer: Hashable, member: Member) -> None:
        """``member`` of ``peer`` can send."""
        account = self._account(peer)
        if not account.members:
            self._ready[peer] = account
        account.members.setdefault(member, None)

    def remove(self, peer: Hashable, member: Member) -> None:
        """``member`` cannot send: it has nothing, or must wait for something else."""
        account = self._peers.get(peer)
        if account is None or member not in account.members:
            return
        del account.members[member]
        if not account.members:
            del self._ready[peer]

    def forget(self, peer: Hashable) -> None:
        """The peer is gone; its cap with it."""
        self._peers.pop(peer, None)
        self._ready.pop(peer, None)

    def next(self, now: float) -> tuple[Member, int] | None:
        """Who goes next, and with how many bytes at most; None: nobody now."""
        if not self._total.is_ready(now):
            return None
        able = [account for account in self._ready.values() if account.cap.is_ready(now)]
        if not able:
            return None
        chosen = able[0] if len(able) == 1 else min(able, key=lambda account: account.served)
        self._level = chosen.served = max(self._level, chosen.served)
        most = min(slice_bytes(self._total.bytes_per_s), slice_bytes(chosen.cap.bytes_per_s))
        return next(iter(chosen.members)), most

    def next_at(self) -> float | None:
        """When ``next`` may have somebody; None: not before somebody is added."""
        if not self._ready:
            return None
        if len(self._ready) == 1:
            return max(self._total.ready_at(), next(iter(self._ready.values())).cap.ready_at())
        return max(self._total.ready_at(), min(account.cap.ready_at() for account in self._ready.values()))

    def charge(self, peer: Hashable, member: Member | None, count: int, now: float) -> None:
        """``count`` bytes went out to ``peer``. ``member``: whose turn it was; None for control, which takes none."""
        account = self._peers.get(peer)
        for schedule in (self._total, account.cap) if account is not None else (self._total,):
            if member is None:
                schedule.charge_control(count, now)
            else:
                schedule.charge(count, now)
        if account is None:
            return
        account.served += count
        if member in account.members:
            del account.members[member]
            account.members[member] = None
            # Behind the others that have been served as much.
            del self._ready[peer]
            self._ready[peer] = account

    def _account(self, peer: Hashable) -> _Peer[Member]:
        return self._peers.setdefault(peer, _Peer())


def pacing_rates(
    budget: float, recent: Mapping[Hashable, float], caps: Mapping[Hashable, float | None]
) -> dict[Hashable, float]:
    """What each of the peers in ``recent`` (bytes per second of late) may be paced at: its equal share of ``budget``,
    or all that the others leave over, and never more than its cap."""
    if not recent:
        return {}
    used, share = sum(recent.values()), budget / len(recent)
    rates = {peer: max(share, budget - (used - rate)) for peer, rate in recent.items()}
    return {peer: min(rate, cap) if (cap := caps.get(peer)) is not None else rate for peer, rate in rates.items()}
