"""Dials what others have published, within the budget of net/dials.py."""

from __future__ import annotations

import asyncio

from p2pdiloco.net.dials import Dials
from p2pdiloco.protocol.identifiers import PeerId
from p2pdiloco.runtime import addresses
from p2pdiloco.runtime.transport import DialError, PeerRefused, Transport


class Dialler:
    """One a process: what is dialled for the run's peers and for meeting points counts together."""

    def __init__(self) -> None:
        self._dials = Dials()

    async def dial(self, transport: Transport, address: str, timeout_s: float) -> PeerId:
        """Connect ``transport`` to the peer that ``address`` names.

        Raises:
            ValueError: it is no multiaddr with a peer's id.
            PeerRefused: the peer said no.
            DialError: anything else; too many dials of that machine came to nothing.
        """
        place = addresses.parse(address)
        if place.peer is None:
            raise ValueError(f"{address} lacks the peer id")
        if place.peer in transport.peers():
            return place.peer
        if not self._dials.begin(place.peer, place.host, place.port, asyncio.get_running_loop().time()):
            raise DialError(f"{place.host} is left alone for a minute: too many dials there came to nothing")
        try:
            peer = await transport.dial(address, timeout_s)
        except PeerRefused:
            self._dials.proved(place.peer, place.host, place.port)
            raise
        self._dials.proved(peer, place.host, place.port)
        return peer
