"""Dials of addresses learned from others, within the limits of net/abuse_limits.py.

Rules of this file:
1. A name counts as the machines that it resolves to. These are dialled, not the name. So a directory full of names of
   one machine allows no more dials than one address, and a name is never resolved twice with different results.
2. An address named by a rendezvous server is dialled on its word (``may_dial``). The dial counts as failed until a peer
   has proved itself there.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from p2pdiloco.net.abuse_limits import DialRateLimit
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport import addresses
from p2pdiloco.transport.addresses import Address
from p2pdiloco.transport.transport import DialError, PeerRefused, Transport

MACHINES = 4
"""Maximum number of machines of one name that are dialled."""


class Dialler:
    """Dials within the limits. A process has one, so dials of peers and of rendezvous servers count together."""

    def __init__(self) -> None:
        self._dials = DialRateLimit()

    def may_dial(self, peer: PeerId, address: Address) -> bool:
        """Return whether ``peer`` may be dialled at that numeric address, which was learned from others.

        The dial counts as failed until ``record_success``.
        """
        return self._dials.begin(peer, address.host, address.port, asyncio.get_running_loop().time())

    def record_success(self, peer: PeerId, address: Address) -> None:
        """Record that ``peer`` has proved itself at ``address``, so that the dial does not count as failed."""
        self._dials.proved(peer, address.host, address.port)

    async def dial(self, transport: Transport, address: str, timeout_s: float) -> PeerId:
        """Connect ``transport`` to the peer that ``address`` names.

        Raises:
            ValueError: ``address`` is not a multiaddr with a peer id.
            PeerRefused: the peer refused the connection.
            DialError: any other failure, also that too many dials of that machine have failed.
        """
        place = addresses.parse(address)
        if place.peer is None:
            raise ValueError(f"{address} lacks the peer id")
        if place.peer in transport.peers():
            return place.peer
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        failure = DialError(f"{place}: no answer within {timeout_s:g} s")
        for machine in await machines(place, timeout_s):
            if (left_s := ends - loop.time()) <= 0.0:
                break
            try:
                return await self._dial(transport, place.peer, machine, left_s)
            except PeerRefused:
                raise
            except DialError as error:
                failure = error
        raise failure

    async def _dial(self, transport: Transport, wanted: PeerId, machine: Address, timeout_s: float) -> PeerId:
        if not self.may_dial(wanted, machine):
            raise DialError(f"{machine.host} is not dialled for a while: too many dials there have failed")
        try:
            peer = await transport.dial(str(machine), timeout_s)
        except PeerRefused:
            self.record_success(wanted, machine)
            raise
        self.record_success(peer, machine)
        return peer


async def machines(place: Address, timeout_s: float) -> Sequence[Address]:
    """Return the numeric addresses that ``place`` stands for, at most MACHINES.

    Raises:
        DialError: its name cannot be resolved, or has no address.
    """
    if place.family in ("ip4", "ip6"):
        return (place,)
    family = socket.AF_INET if place.family == "dns4" else socket.AF_UNSPEC
    try:
        async with asyncio.timeout(timeout_s):
            found = await asyncio.get_running_loop().getaddrinfo(
                place.host, place.port, family=family, type=socket.SOCK_STREAM
            )
    except TimeoutError:
        raise DialError(f"{place.host} cannot be resolved within {timeout_s:g} s") from None
    except OSError as error:
        raise DialError(f"{place.host} cannot be resolved: {error.strerror}") from error
    hosts = dict.fromkeys(str(where[0]) for *_, where in found)
    if not hosts:
        raise DialError(f"{place.host} has no address")
    return [addresses.of_socket(host, place.port, place.peer) for host in hosts][:MACHINES]
