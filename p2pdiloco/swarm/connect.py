"""Connects to a peer by its record: its addresses first (happy eyeballs), then its rendezvous servers.

Rules of this file:
1. At most ADDRESSES are dialled, a new one every STAGGER_S, within the dialler's budget. The first connection cancels
   the other attempts.
2. A private address is dialled only if the peer may be in the same network: others observe it at that address, or
   observe both peers at the same host (one router), or have not observed one of them yet. A loopback address is dialled
   only if there is no other.
3. If an address may answer, the attempt through a rendezvous server starts a little later, otherwise at once. If the
   record names no server, this peer asks its own ones, later still: usually such a peer can be dialled, or dials us.
4. The error names the reasons of all attempts, newest first.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Coroutine, Sequence
from typing import Any

from p2pdiloco.nat.rendezvous_client import RendezvousClient
from p2pdiloco.net.handshake import HandshakeError
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport import addresses
from p2pdiloco.transport.addresses import Address
from p2pdiloco.transport.dialer import Dialler
from p2pdiloco.transport.transport import DialError, PeerRefused, Transport, WrongPeerError
from p2pdiloco.wire.directory_records import PeerRecord

ADDRESSES = 8
STAGGER_S = 0.2
# Delay of the rendezvous after the start of the last dial. HOME_S applies if all addresses are private, since those
# answer quickly or never.
MEETING_S, HOME_S = 0.4, 0.1
# Further delay if the record names no rendezvous server.
UNNAMED_S = 2.0
DIAL_S = 8.0


class ConnectFallback:
    """Connects to peers: by their addresses, and through rendezvous servers where these do not answer."""

    def __init__(self, transport: Transport, dialler: Dialler, rendezvous: RendezvousClient) -> None:
        self._transport = transport
        self._dialler = dialler
        self._rendezvous = rendezvous

    async def connect(self, peer: PeerId, record: PeerRecord) -> PeerId:
        """Connect to ``peer``.

        Raises:
            PeerRefused: the peer answered, and refused this one.
            WrongPeerError: another peer answers at the peer's only address.
            DialError: any other failure, with the reasons of all attempts.
        """
        where = dialable(record, frozenset(self._rendezvous.observed_hosts))
        reasons: list[str] = []
        named = (address if "/p2p/" in address else f"{address}/p2p/{peer}" for address in where)
        ways: list[tuple[float, Coroutine[Any, Any, PeerId]]] = [
            (number * STAGGER_S, self._dialler.dial(self._transport, address, DIAL_S))
            for number, address in enumerate(named)
        ]
        if record.points or self._rendezvous.attended:
            later_s = HOME_S if all(map(_is_private, where)) else MEETING_S
            delay_s = len(where) * STAGGER_S + later_s if where else 0.0
            delay_s += 0.0 if record.points else UNNAMED_S
            ways.append((delay_s, self._connect_by_rendezvous(peer, record.points)))
        if not ways:
            if not record.addresses:
                raise DialError("it publishes no address")
            told = ", ".join(record.addresses)
            raise DialError(f"{told} is in another network, and the peer uses no rendezvous server")
        wrong_peer: WrongPeerError | None = None
        running = {asyncio.create_task(_run_after(delay_s, way), name=f"way to {peer}") for delay_s, way in ways}
        pending = running
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for way in done:
                    error = way.exception()
                    if error is None:
                        return way.result()
                    if isinstance(error, PeerRefused):
                        raise error
                    if not isinstance(error, (DialError, ValueError)):
                        raise error
                    wrong_peer = error if isinstance(error, WrongPeerError) else wrong_peer
                    reasons.insert(0, str(error))
        finally:
            for way in running:
                way.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if wrong_peer is not None and len(where) == 1 and not record.points:
            raise wrong_peer
        raise DialError("; ".join(dict.fromkeys(reasons)))

    async def connect_directly(self, peer: PeerId, record: PeerRecord) -> PeerId:
        """Replace a relayed connection to ``peer`` by a direct one.

        Raises:
            DialError: no direct connection was established.
        """
        return await self._connect_by_rendezvous(peer, record.points, may_relay=False)

    async def _connect_by_rendezvous(self, peer: PeerId, points: Sequence[str], *, may_relay: bool = True) -> PeerId:
        try:
            return await self._rendezvous.connect(peer, points, may_relay=may_relay)
        except HandshakeError as error:
            raise DialError(f"hole punching succeeded, but the handshake failed: {error}") from error


def dialable(record: PeerRecord, seen: frozenset[str]) -> list[str]:
    """Return the addresses of a record that may answer from here, best first.

    seen: hosts at which others observe this peer.
    """
    found: list[tuple[int, str]] = []
    local: list[str] = []
    for text in record.addresses[: 2 * ADDRESSES]:
        try:
            address = addresses.parse(text)
        except ValueError:
            continue
        rank = _rank(address, record.seen, seen)
        if rank == 0:
            local.append(text)
        elif rank is not None:
            found.append((rank, text))
    return [text for _, text in sorted(found, key=lambda one: one[0])][:ADDRESSES] or local[:ADDRESSES]


def _rank(address: Address, theirs: Sequence[str], ours: frozenset[str]) -> int | None:
    """Return the rank of an address, lower is better, or None if it must not be dialled.

    0 is loopback, 1 the same private network, 2 global IPv6, 3 anything else."""
    if address.family in ("dns", "dns4"):
        return 3
    ip = ipaddress.ip_address(address.host)
    if ip.is_loopback:
        return 0
    if ip.is_unspecified or ip.is_multicast or ip.is_link_local:
        return None
    if ip.is_global:
        return 2 if ip.version == 6 else 3
    if not theirs or not ours or address.host in theirs:
        return 3
    return 1 if ours.intersection(theirs) else None


def _is_private(text: str) -> bool:
    address = addresses.parse(text)
    return address.family not in ("dns", "dns4") and not ipaddress.ip_address(address.host).is_global


async def _run_after(delay_s: float, way: Coroutine[Any, Any, PeerId]) -> PeerId:
    try:
        await asyncio.sleep(delay_s)
    except BaseException:
        way.close()  # it was never awaited, which asyncio would complain about
        raise
    return await way
