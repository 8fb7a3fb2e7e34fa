"""All sockets at which one process accepts peers.

Rules of this file:
1. Where any free port is asked for, one number is taken for all of them, if it can be had.
2. IPv4 and IPv6 have a socket each.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from p2pdiloco.runtime import addresses, sockets
from p2pdiloco.runtime.addresses import Address


class Listeners:
    """See the module's rules. ``wanted``: multiaddrs; "" or none: nothing is accepted."""

    def __init__(self, wanted: str | Sequence[str]) -> None:
        texts = [wanted] if isinstance(wanted, str) else wanted
        self._wanted = [addresses.parse(text) for text in texts if text]
        self._sockets: list[socket.socket] = []

    def __iter__(self) -> Iterator[socket.socket]:
        return iter(self._sockets)

    def open(self) -> None:
        """Listen.

        Raises:
            OSError: an address is taken or not ours.
            ValueError: one is a name.
        """
        try:
            for one in self._wanted:
                self._sockets.append(self._opened(one))
        except BaseException:
            self.close()
            raise

    def _opened(self, wanted: Address) -> socket.socket:
        if self._sockets and not wanted.port:
            with suppress(OSError):
                return sockets.listen(msgspec.structs.replace(wanted, port=self._sockets[0].getsockname()[1]))
        return sockets.listen(wanted)

    def addresses(self) -> list[Address]:
        """Where others may reach us: for a wildcard every address of this machine, loopback last."""
        found = [address for one in self._sockets for address in sockets.local_addresses(one)]
        return sorted(dict.fromkeys(found), key=lambda address: sockets.is_loopback(address.host))

    def close(self) -> None:
        """Accept nobody any more."""
        for one in self._sockets:
            one.close()
        self._sockets.clear()
