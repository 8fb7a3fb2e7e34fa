"""The up budget: whose bulk is written next, and how fast the kernel may send it.

Two things keep the budget. The schedule in user space (net/shares.py) is exact over all peers: bulk is handed to
sockets at the budget's rate and no faster; control is written at once and counted, so that bulk yields to it. The
kernel's pacing per socket smooths what was handed over, and takes over when this process is late: each socket is paced
at the peer's share of the budget, and PACING_HEADROOM more, so that what is late can be made up for and the kernel's
queues stay empty, where control would wait behind bulk.

Rules of this file:
1. Pure: time is a number; connections and peers are any hashable names.
2. A turn writes at least TURN_BYTES and at most a chunk more: a tenth of a millisecond or two of encryption, so that
   control that comes in or goes out waits no longer.
3. Pacing follows the shares at most every REFRESH_S, and only when a rate has changed by more than PACING_STEP.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from p2pdiloco.net.shares import Shares, pacing_rates

TURN_BYTES = 128 << 10
REFRESH_S = 0.02
IDLE_REFRESHES = 50
"""Peers that sent nothing for so long are not counted in the shares."""
PACING_HEADROOM = 1.25
PACING_STEP = 0.05
PACING_LEAST = 1_000_000.0
"""Bytes per second. The kernel's pacing holds control back too, so below this it is left to the schedule."""
SMOOTHING = 0.3
PASSED_LEAST_S = 0.001
"""Event loops count in milliseconds: two refreshes may seem to be at once."""

Sender = TypeVar("Sender", bound=Hashable)


class Shaper(Generic[Sender]):
    """See the module's rules. ``next`` says who sends, ``wrote`` or ``cannot`` what came of it."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._shares: Shares[Sender] = Shares(bytes_per_s)
        self._senders: dict[Sender, Hashable] = {}
        """Every connection, and whose it is."""
        self._paced: dict[Sender, float | None] = {}
        self._news: dict[Sender, float | None] = {}
        self._rates: dict[Hashable, float] = {}
        """Bytes per second of late, of peers that sent bulk lately."""
        self._quiet: dict[Hashable, int] = {}
        self._counted: dict[Hashable, int] = {}
        """Bulk bytes since the last refresh."""
        self._refreshed_at = float("-inf")

    @property
    def bytes_per_s(self) -> float | None:
        return self._shares.bytes_per_s

    def set_budget(self, bytes_per_s: float | None, now: float) -> None:
        """Bytes per second over all peers; None: no limit."""
        self._shares.set_budget(bytes_per_s, now)
        self._refresh(now)

    def set_cap(self, peer: Hashable, bytes_per_s: float | None, now: float) -> None:
        """Bytes per second to one peer, until it disconnects; None: no limit of its own."""
        self._shares.set_cap(peer, bytes_per_s, now)
        self._refresh(now)

    def open(self, peer: Hashable, sender: Sender) -> None:
        """A connection is there. It is paced before it sends the first chunk."""
        self._senders[sender] = peer
        self._pace(sender, self._limit_of(peer))

    def close(self, sender: Sender) -> None:
        """The connection is gone, and with a peer's last one its cap."""
        peer = self._senders.pop(sender, None)
        self._paced.pop(sender, None)
        self._news.pop(sender, None)
        if peer is None:
            return
        self._shares.remove(peer, sender)
        if peer not in self._senders.values():
            self._shares.forget(peer)
            for counts in (self._rates, self._quiet, self._counted):
                counts.pop(peer, None)

    def ready(self, sender: Sender) -> None:
        """``sender`` has bulk, and may be able to write it."""
        if (peer := self._senders.get(sender)) is not None:
            self._shares.add(peer, sender)

    def wrote_control(self, sender: Sender, count: int, now: float) -> None:
        """Control went out at once; bulk yields to it."""
        self._shares.charge(self._senders.get(sender), None, count, now)

    def next_at(self) -> float | None:
        """When ``next`` may have somebody; None: not before somebody is ready."""
        return self._shares.next_at()

    def next(self, now: float) -> tuple[Sender, int] | None:
        """Who writes a chunk now, and of how many bytes at most."""
        return self._shares.next(now)

    def wrote(self, sender: Sender, count: int, now: float) -> None:
        """``sender`` wrote ``count`` bytes of bulk in its turn."""
        peer = self._senders[sender]
        self._shares.charge(peer, sender, count, now)
        self._counted[peer] = self._counted.get(peer, 0) + count
        if self.bytes_per_s is not None and now - self._refreshed_at >= REFRESH_S:
            self._refresh(now)

    def cannot(self, sender: Sender) -> None:
        """``sender`` has nothing that it can write, until it is ready again."""
        self._shares.remove(self._senders[sender], sender)

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def news(self) -> dict[Sender, float | None]:
        """At which rates sockets are to be paced from now on."""
        news, self._news = self._news, {}
        return news

    def _refresh(self, now: float) -> None:
        """Measure what the peers took of late, and pace their sockets by it."""
        passed_s = max(now - self._refreshed_at, PASSED_LEAST_S)
        self._refreshed_at = now
        for peer in set(self._rates) | set(self._counted):
            count = self._counted.get(peer, 0)
            self._quiet[peer] = 0 if count else self._quiet.get(peer, 0) + 1
            old = self._rates.get(peer, 0.0)
            self._rates[peer] = old + SMOOTHING * (count / passed_s - old)
            if self._quiet[peer] > IDLE_REFRESHES:
                del self._rates[peer], self._quiet[peer]
        self._counted.clear()
        budget = self.bytes_per_s
        caps = {peer: self._shares.cap_of(peer) for peer in self._rates}
        shares = pacing_rates(budget, self._rates, caps) if budget is not None else {}
        for sender, peer in self._senders.items():
            self._pace(sender, shares.get(peer, self._limit_of(peer)))

    def _limit_of(self, peer: Hashable) -> float | None:
        """Of a peer that sends nothing at present."""
        limits = [limit for limit in (self.bytes_per_s, self._shares.cap_of(peer)) if limit is not None]
        return min(limits, default=None)

    def _pace(self, sender: Sender, share: float | None) -> None:
        rate = max(PACING_LEAST, share * PACING_HEADROOM) if share is not None else None
        old = self._paced.get(sender)
        is_same = rate is old if rate is None or old is None else abs(rate - old) <= PACING_STEP * old
        if not is_same:
            self._paced[sender] = self._news[sender] = rate
