"""The receiving half of a connection's credit: what came and was taken, the other side may send more for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any

from p2pdiloco.runtime.crediting import Crediting
from p2pdiloco.runtime.sockets import Path
from p2pdiloco.wire.credit import Account
from p2pdiloco.wire.frames import encode_credit
from p2pdiloco.wire.inbox import Inbox

PATH_READ_S = 1.0
"""How often the kernel is asked for the round trip."""


class Receiving:
    """``tell`` sends a frame; ``path`` reads what the kernel knows of the connection."""

    def __init__(
        self, inbox: Inbox, crediting: Crediting, *, tell: Callable[[bytes], None], path: Callable[[], Path | None]
    ) -> None:
        self._inbox = inbox
        self._crediting = crediting
        self._tell = tell
        self._path = path
        self._path_read_at = float("-inf")
        self._account: Account | None = None

    def open(self, peer: Hashable) -> None:
        """The other side is proved to be ``peer``: it may get credit."""
        self._account = Account(peer)
        self._crediting.open(self._account, self._send_credit)

    def stop(self) -> None:
        """The connection is over."""
        if self._account is not None:
            self._crediting.close(self._account)

    def progressed(self) -> None:
        """Bytes came."""
        account, inbox = self._account, self._inbox
        if account is None or (account.received == inbox.arrived_bytes and account.demand == inbox.demand_bytes):
            return
        account.received, account.demand = inbox.arrived_bytes, inbox.demand_bytes
        self._crediting.progressed(account)

    def hold(self, size: int, taken: asyncio.Future[Any]) -> None:
        """Grant nothing for ``size`` bytes until the handler has taken them."""
        account = self._account
        if account is None:
            return

        def release(_: asyncio.Future[Any]) -> None:
            account.untaken -= size
            self._crediting.progressed(account)

        account.untaken += size
        taken.add_done_callback(release)

    def _send_credit(self) -> None:
        assert self._account is not None
        now = asyncio.get_running_loop().time()
        if now - self._path_read_at > PATH_READ_S:
            self._path_read_at = now
            if (path := self._path()) is not None:
                self._account.round_trip_s = path.round_trip_s
        self._inbox.granted = self._account.granted
        self._tell(encode_credit(self._account.granted))
