"""The down budget: tells senders how far their bulk may go (wire/credit.py decides), on one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pdiloco.runtime.clock import Clock, Timer
from p2pdiloco.wire.credit import Account, Granter


class Crediting:
    """All connections' accounts. ``open`` with a function that sends the account's ``granted`` to its sender."""

    def __init__(self, granter: Granter, clock: Callable[[], Clock] = asyncio.get_running_loop) -> None:
        self._granter = granter
        self._clock = clock
        self._timer = Timer(clock)
        self._tell: dict[Account, Callable[[], None]] = {}

    @property
    def bytes_per_s(self) -> float | None:
        return self._granter.bytes_per_s

    def set_budget(self, bytes_per_s: float | None) -> None:
        """Bytes per second over all senders; None: no limit. What is granted already may still come."""
        self._granter.set_budget(bytes_per_s, self._clock().time())
        self._timer.cancel()
        for account in self._granter.accounts():
            self.progressed(account)

    def open(self, account: Account, tell: Callable[[], None]) -> None:
        self._granter.open(account)
        self._tell[account] = tell
        self.progressed(account)

    def close(self, account: Account) -> None:
        self._granter.close(account)
        self._tell.pop(account, None)

    def progressed(self, account: Account) -> None:
        """Something was received, announced or taken."""
        if account not in self._tell or self._timer.is_set:
            return
        if self.bytes_per_s is not None:
            self._grant()
        elif self._granter.top_up(account):
            self._tell[account]()

    def _grant(self) -> None:
        for account in self._granter.grant(self._clock().time()):
            if (tell := self._tell.get(account)) is not None:
                tell()
        if (at := self._granter.next_at()) is not None:
            self._timer.set(at, self._grant)
