"""The down budget: who is told how far its bulk may go (net/credit.py decides), and when to look again."""

from __future__ import annotations

from p2pdiloco.net.credit import Account, Granter


class Grants:
    """All connections' accounts. What returns accounts returns those whose ``granted`` grew: tell their senders."""

    def __init__(self, granter: Granter) -> None:
        self._granter = granter
        self._accounts: set[Account] = set()
        self.bytes_per_s = granter.bytes_per_s
        """The budget; None: no limit."""
        self.due_at: float | None = None
        """When ``grant`` may have something to grant; None: not before something happens."""

    def set_budget(self, bytes_per_s: float | None, now: float) -> list[Account]:
        """Bytes per second over all senders; None: no limit. What is granted already may still come."""
        self._granter.set_budget(bytes_per_s, now)
        self.bytes_per_s = bytes_per_s
        self.due_at = None
        return list(
            dict.fromkeys(grown for account in self._granter.accounts() for grown in self.progressed(account, now))
        )

    def open(self, account: Account, now: float) -> list[Account]:
        self._granter.open(account)
        self._accounts.add(account)
        return self.progressed(account, now)

    def close(self, account: Account) -> None:
        self._granter.close(account)
        self._accounts.discard(account)

    def progressed(self, account: Account, now: float) -> list[Account]:
        """Something was received, announced or taken."""
        if account not in self._accounts or self.due_at is not None:
            return []
        if self.bytes_per_s is not None:
            return self.grant(now)
        return [account] if self._granter.top_up(account) else []

    def grant(self, now: float) -> list[Account]:
        """``due_at`` is reached, or nothing was due."""
        grown = self._granter.grant(now)
        self.due_at = self._granter.next_at()
        return grown
