"""Credit-based flow control: a receiver grants each sender bulk data according to its download budget and memory.

A credit is a count of payload bytes (those in chunks, dropped ones included) since the connection's start, like QUIC's
MAX_DATA. It only grows, and both ends count the same bytes. Every connection starts with FIRST_CREDIT.

The receiver keeps an account for each connection:

    outstanding   bytes that were granted, and are neither received nor taken by the handler; bounded by a window
    demand        bytes announced by START frames and not yet received. Streams are announced before there is credit
                  for them, so the receiver knows which senders want to send

Without a download budget, an account is topped up to its demand plus AHEAD_BYTES as it empties. With a budget, grants
follow a schedule of the budget's rate, in slices, in turn to the peers with demand only. The window is then the content
of the path: rate x (round trip + SLACK_S). So no more than the budget is granted in any second, and the windows bound
the bytes that were granted and have not arrived.

Rules of this file:
1. The module is pure: time is a number.
2. No deadlock: an account with demand and room is granted something at a known time, whatever other accounts do. Grants
   to a lost connection are forgotten with it.
3. Back-pressure is ``untaken``: bytes that the handler has not taken count as outstanding. The handler must be able to
   take them without receiving more bulk data.
"""

from __future__ import annotations

from collections.abc import Hashable

from msgspec import Struct

from p2pdiloco.net.frames import FIRST_CREDIT, FrameError
from p2pdiloco.net.traffic_shaping import Pacer

AHEAD_BYTES = 4 << 20
"""Bytes granted beyond the demand without a budget, so that a payload need not wait for a round trip."""
SLACK_S = 0.02
"""Reaction time of both ends."""
SLICE_S = 0.004
SLICE_LEAST, SLICE_MOST = 16 << 10, 1 << 20


class Account(Struct, eq=False):
    """Account of one connection's sender.

    The endpoint keeps ``received``, ``demand``, ``untaken`` and ``round_trip_s`` up to date.
    """

    peer: Hashable
    granted: int = FIRST_CREDIT
    received: int = 0
    demand: int = 0
    untaken: int = 0
    round_trip_s: float = 0.0

    @property
    def coming(self) -> int:
        """Bytes that were granted and are not received."""
        return self.granted - self.received

    @property
    def outstanding(self) -> int:
        """Bytes that were granted and are not received, or not taken by the user."""
        return self.coming + self.untaken


class Granter:
    """Decides which account is granted how much, and when.

    window_bytes: maximum of outstanding bytes of one account.
    total_bytes: maximum of all accounts together, except that each gets at least FIRST_CREDIT.
    """

    def __init__(self, *, window_bytes: int, total_bytes: int, bytes_per_s: float | None = None) -> None:
        assert window_bytes >= FIRST_CREDIT
        self._window_bytes = window_bytes
        self._total_bytes = total_bytes
        self._schedule = Pacer(bytes_per_s)
        self._accounts: dict[Account, None] = {}
        """All accounts, in the order of their turns within a peer."""
        self._served: dict[Hashable, int] = {}
        """Bytes granted to each peer. A peer that returns from a pause starts at the level of the others."""
        self._level = 0

    @property
    def bytes_per_s(self) -> float | None:
        return self._schedule.bytes_per_s

    def set_budget(self, bytes_per_s: float | None, now: float) -> None:
        self._schedule.set_rate(bytes_per_s, now)

    def accounts(self) -> list[Account]:
        return list(self._accounts)

    def open(self, account: Account) -> None:
        self._accounts[account] = None

    def close(self, account: Account) -> None:
        """Forget an account. Bytes that were granted and not received will not come."""
        self._accounts.pop(account, None)
        if all(other.peer != account.peer for other in self._accounts):
            self._served.pop(account.peer, None)

    def top_up(self, account: Account) -> bool:
        """Grant ``account`` more, without a budget. Return whether it was granted something."""
        outstanding, most = account.outstanding, account.demand + AHEAD_BYTES
        if outstanding > most // 2:  # a cheap first test: the window is rarely narrower
            return False
        window = min(self._window(len(self._accounts)), most)
        if outstanding > window // 2:
            return False
        account.granted += window - outstanding
        return True

    def grant(self, now: float) -> list[Account]:
        """Grant what is due, with a budget. Return the accounts whose ``granted`` grew."""
        grown: dict[Account, None] = {}
        while self._schedule.is_ready(now) and (chosen := self._choose()) is not None:
            account, count = chosen
            account.granted += count
            self._schedule.charge(count, now)
            self._level = max(self._level, self._served.get(account.peer, 0))
            self._served[account.peer] = self._level + count
            del self._accounts[account]
            self._accounts[account] = None
            grown[account] = None
        return list(grown)

    def next_at(self) -> float | None:
        """Return when ``grant`` may have something to grant; None: not before an account changes."""
        if self._schedule.bytes_per_s is None or self._choose() is None:
            return None
        return self._schedule.ready_at()

    def _choose(self) -> tuple[Account, int] | None:
        """Return the next account and its bytes.

        Of the accounts with demand and room, it belongs to the peer that was granted least.
        """
        rate = self._schedule.bytes_per_s
        assert rate is not None
        wanting = [account for account in self._accounts if account.demand > account.coming]
        window = self._window(len(wanting))
        able: list[tuple[int, int, Account]] = []
        slice_bytes = int(min(SLICE_MOST, max(SLICE_LEAST, rate * SLICE_S)))
        for account in wanting:
            path = max(FIRST_CREDIT, 2 * slice_bytes, int(rate * (account.round_trip_s + SLACK_S)))
            count = min(slice_bytes, account.demand - account.coming)
            if account.outstanding + count <= max(count, min(window, path)):
                able.append((max(self._level, self._served.get(account.peer, 0)), count, account))
        if not able:
            return None
        _, count, account = min(able, key=lambda entry: entry[0])
        return account, count

    def _window(self, sharers: int) -> int:
        return min(self._window_bytes, max(FIRST_CREDIT, self._total_bytes // max(1, sharers)))


class Spending(Struct, eq=False):
    """Sender's side of one connection: the bytes that it may still send."""

    granted: int = FIRST_CREDIT
    sent: int = 0

    @property
    def left(self) -> int:
        return self.granted - self.sent

    def extend(self, granted: int) -> None:
        """Extend the credit to that of a CREDIT frame.

        Raises:
            FrameError: the new credit is smaller than the last.
        """
        if granted < self.granted:
            raise FrameError(f"a credit of {granted} bytes after one of {self.granted}")
        self.granted = granted


# -- Credit grants for the down budget ---------------------------------------------------------------------------------


class Grants:
    """Accounts of all connections, and the time of the next grant. ``Granter`` decides.

    Methods return the accounts whose ``granted`` grew; their senders must be told.
    """

    def __init__(self, granter: Granter) -> None:
        self._granter = granter
        self._accounts: set[Account] = set()
        self.bytes_per_s = granter.bytes_per_s
        """Download budget; None: no limit."""
        self.due_at: float | None = None
        """Time at which ``grant`` may have something to grant; None: not before an account changes."""

    def set_budget(self, bytes_per_s: float | None, now: float) -> list[Account]:
        """Set the total rate of all senders in bytes per second; None: no limit. Granted bytes may still come."""
        self._granter.set_budget(bytes_per_s, now)
        self.bytes_per_s = bytes_per_s
        self.due_at = None
        return list(dict.fromkeys(grown for account in self._granter.accounts() for grown in self.update(account, now)))

    def open(self, account: Account, now: float) -> list[Account]:
        self._granter.open(account)
        self._accounts.add(account)
        return self.update(account, now)

    def close(self, account: Account) -> None:
        self._granter.close(account)
        self._accounts.discard(account)

    def update(self, account: Account, now: float) -> list[Account]:
        """Grant more after bytes of ``account`` were received, announced or taken."""
        if account not in self._accounts or self.due_at is not None:
            return []
        if self.bytes_per_s is not None:
            return self.grant(now)
        return [account] if self._granter.top_up(account) else []

    def grant(self, now: float) -> list[Account]:
        """Grant what is due. Call this when ``due_at`` has come."""
        grown = self._granter.grant(now)
        self.due_at = self._granter.next_at()
        return grown
