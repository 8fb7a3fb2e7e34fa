"""Reachability of this peer: rendezvous servers observe its address, dial it back, and connect other peers to it.

Rules of this file:
1. Rendezvous servers dial this peer back. It counts as dialable if at least half of those that tried succeeded.
2. A bootstrap comes first, so that one server at least is not chosen by what members say of themselves; then all are
   drawn by the room that they have for relayed pairs (``drawn_points``). This peer is registered with the first POINTS
   that answer, also when a better one comes later.
3. The user is told the result in one sentence, and again when it changes.
4. The router is asked to map a port if this machine has a private address and the user has announced no address.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Literal, Self

import msgspec

from p2pdiloco.discovery.directory import Directory
from p2pdiloco.nat.port_mapping import Lease, PortMapping
from p2pdiloco.nat.rendezvous_client import POINTS, RendezvousClient
from p2pdiloco.nat.rendezvous_server import USUAL_RELAYS, RendezvousServer
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.ownership import ranked
from p2pdiloco.swarm.connect import ConnectFallback
from p2pdiloco.swarm.known_peers import KnownPeers
from p2pdiloco.swarm.lookup_policy import KnownPoints, LookupPolicy
from p2pdiloco.transport import addresses, sockets
from p2pdiloco.transport.dialer import Dialler
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import DialError, Observer, Transport
from p2pdiloco.util import logs
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.control_messages import decode_as
from p2pdiloco.wire.directory_records import PeerRecord, PointRecord

log = logs.get("reachability")

LOOK_S = 2.0
# Interval at which the registration with a server, and its observation of this peer, are renewed.
RENEW_S = 120.0
# Pause before a server that did not answer is asked again.
PAUSE_S = 15.0
MOST_ADDRESSES = 16
# Maximum number of servers from the directory that are asked.
ASKED = 8
# Number of addresses of one server that are tried.
TRIED = 2
# Maximum number of server addresses in this peer's record.
PLACES = 4


class Reachability:
    """Determines and improves this peer's reachability. Use as ``async with`` while the transport serves."""

    def __init__(
        self,
        identity: Identity,
        directory: Directory,
        transport: Transport,
        known: KnownPeers,
        lookup: LookupPolicy,
        *,
        announced: Sequence[str],
        relay_bytes_per_s: float | Literal["auto"] | None,
        maps_port: bool,
        payload_rate: Callable[[], tuple[float, int]] = lambda: (0.0, 0),
        troubles: dict[str, str] | None = None,
    ) -> None:
        """
        Args:
            known: the other peers of the run.
            announced: this peer's addresses, if the user gave any.
            relay_bytes_per_s: limit of relaying, as for ``RendezvousServer``.
            maps_port: whether the router may be asked to map a port.
            payload_rate: returns bytes per second of payloads that this peer sends, and the number of its peers.
            troubles: problems of the tasks, see ``Tasks``.
        """
        self._directory = directory
        self._transport = transport
        self._known = known
        self._known_points = KnownPoints(directory, lookup)
        self._announced = list(announced)
        self._tasks = Tasks(troubles)
        self._outside = Transport(identity, listen="", run="", version=WIRE_VERSION, observes=True)
        dialler = Dialler()
        self.client = RendezvousClient(
            transport, self._outside, dialler, self._tasks, known.__contains__, known.points_of
        )
        self.server = RendezvousServer(transport, relay_bytes_per_s)
        self.connector = ConnectFallback(transport, dialler, self.client)
        self._told_room = self.server.introducer.pairs_most
        self._asked_at: dict[PeerId, float] = {}
        self._said = ""
        self._is_directory_told = False
        self._maps_port = maps_port
        self._payload_rate = payload_rate
        self._router: PortMapping | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._outside.serve(Observer()))
            stack.push_async_callback(self._give_back_port)
            await stack.enter_async_context(self._tasks)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _give_back_port(self) -> None:
        if self._router is not None:
            await self._router.release()

    def record(self) -> PeerRecord:
        """Return this peer's record: how others can reach it."""
        own = self._announced or list(dict.fromkeys([*self._outside_addresses(), *self._transport.listen_addresses()]))
        return PeerRecord(
            tuple(own[:MOST_ADDRESSES]),
            seen=self.client.observed_hosts,
            points=self.points,
            is_point=self.is_dialable is True,
            room=self._told_room,
        )

    @property
    def is_dialable(self) -> bool | None:
        """True if others can dial this peer; None: nobody has tried."""
        return self._is_port_dialable(0)

    @property
    def is_directory_dialable(self) -> bool | None:
        """True if others can dial this peer's directory node, which newcomers ask first; None: nobody has tried."""
        return self._is_port_dialable(1)

    def _is_port_dialable(self, port: int) -> bool | None:
        """Return whether at least half of the dial-backs to ``port`` succeeded; None: there were none.

        port: 0 for the transport's port, 1 for that of the directory node.
        """
        answers = self._port_answers(port)
        return 2 * sum(answers) >= len(answers) if answers else None

    def _port_answers(self, port: int) -> list[bool]:
        return [seen.answers[port] for seen in self.client.observations if len(seen.answers) > port]

    @property
    def points(self) -> tuple[str, ...]:
        """Addresses of the servers with which this peer is registered; empty if all dial-backs succeeded.

        All must succeed, since a single server may lie, or reach this peer where others cannot."""
        if self.is_dialable and all(self._port_answers(0)):
            return ()
        attended = self.client.attended.values()
        return tuple([one.address for one in attended] + [text for one in attended for text in one.elsewhere])[:PLACES]

    @property
    def port(self) -> int:
        """Port on which the transport listens, or 0."""
        return next((addresses.parse(text).port for text in self._transport.listen_addresses()), 0)

    @property
    def _lease(self) -> Lease | None:
        return None if self._router is None else self._router.lease

    @property
    def outside_port(self) -> int:
        """Port at which others may reach the transport: the router's mapped port, if there is one."""
        return self.port if self._lease is None else self._lease.port

    def _outside_addresses(self) -> list[str]:
        """Return the multiaddrs at which dial-backs have succeeded."""
        if not self.is_dialable:
            return []
        hosts = (seen.host for seen in self.client.observations if seen.answers[:1] == (True,))
        port = self.outside_port
        return [str(addresses.of_socket(host, port, self._transport.peer_id)) for host in dict.fromkeys(hosts)]

    async def wait_for_mapping(self) -> None:
        """Wait until the router has mapped a port.

        Raises:
            TimeoutError: it does not map one.
        """
        if self._router is not None:
            await self._router.asked.wait()
        if self._lease is None:
            raise TimeoutError

    def _start_port_mapping(self) -> None:
        """Start to ask the router for a port, if rule 4 applies."""
        hosts = (ipaddress.ip_address(addresses.parse(text).host) for text in self._transport.listen_addresses())
        if self._maps_port and not self._announced and any(not ip.is_global and not ip.is_loopback for ip in hosts):
            self._router = PortMapping(self.port)
            self._tasks.keep(partial(self._router.keep, self._asked_at.clear), name="router")

    async def keep(self, say: Callable[[str], None]) -> None:
        """Stay registered with rendezvous servers until cancelled. ``say`` shows a sentence to the user."""
        loop = asyncio.get_running_loop()
        if self._router is None:
            self._start_port_mapping()
        while True:
            self.server.follow_line(*self._payload_rate())
            # Records are sent to many: a new one if there is half as much room, or twice.
            if not self._told_room < 2 * (room := self.server.introducer.pairs_most) < 4 * self._told_room:
                self._told_room = room
            self.client.forget_disconnected()
            candidates = await self._candidates()
            attended = len(self.client.attended.keys() - candidates.keys())
            for peer, where in candidates.items():
                if attended >= POINTS:
                    self.client.leave(peer)
                    continue
                pause_s = RENEW_S if peer in self.client.attended else PAUSE_S
                if loop.time() - self._asked_at.get(peer, -RENEW_S) >= pause_s:
                    self._asked_at[peer] = loop.time()
                    await self._attend(where, say)
                attended += peer in self.client.attended
            await asyncio.sleep(LOOK_S)

    async def _candidates(self) -> dict[PeerId, list[str]]:
        """Return the addresses of each rendezvous server, best first."""
        offered: dict[PeerId, Sequence[str]] = {}
        records = await self._known_points.records(self.client.attended, asyncio.get_running_loop().time())
        for peer, body in list(records.items())[:ASKED]:
            with suppress(ValueError):
                offered[peer] = decode_as(body, PointRecord).addresses
        first, rooms = [*offered][:1], dict.fromkeys(offered, USUAL_RELAYS)
        for peer, record in self._known.records().items():
            if record.is_point:
                offered.setdefault(peer, record.addresses)
                rooms[peer] = record.room
        rooms.pop(me := self._transport.peer_id, None)
        order = dict.fromkeys((*(peer for peer in first if peer != me), *drawn_points(me, rooms)))
        found = {peer: _addresses_with_id(offered[peer], peer) for peer in order}
        return {peer: texts for peer, texts in found.items() if texts}

    async def _attend(self, where: Sequence[str], say: Callable[[str], None]) -> None:
        directory_port = next(
            (addresses.parse(line).port for line in self._directory.visible_addresses() if "/tcp/" in line), 0
        )
        ports = tuple(port for port in (self.outside_port, directory_port) if port)
        for text in where[:TRIED]:
            elsewhere = tuple(other for other in where[:TRIED] if other != text)
            try:
                registration = await self.client.attend(text, ports, self.server.token, elsewhere)
                break
            except DialError as error:
                log.debug("a rendezvous server does not answer", address=text, reason=str(error))
        else:
            return
        answers = registration.observation.answers
        if len(answers) > 1 and not answers[1] and not self._is_directory_told:
            self._is_directory_told = True
            self._directory.stop_serving()
        sentence = self.describe()
        if sentence != self._said:
            self._said = sentence
            log.info("reachability has changed", found=sentence)
            say(sentence)

    def describe(self) -> str:
        """Return a sentence for the user about this peer's reachability."""
        seen, lease = ", ".join(self.client.observed_hosts) or "an unknown address", self._lease
        if self.is_dialable:
            mapped = f", which the router maps to this machine ({lease.by})" if lease else ""
            places = ", ".join(f"{host}:{self.outside_port}" for host in self.client.observed_hosts)
            return f"reachable from outside at {places}{mapped}"
        if self.is_dialable is None:
            return f"seen as {seen}; no dial-back yet"
        via = f"{len(self.client.attended)} rendezvous server{'s' * (len(self.client.attended) > 1)}"
        how = f"seen as {seen}, but not reachable there: peers connect through {via}, by hole punching or a relay"
        if lease is None:
            return f"{how} (not needed if a port is forwarded to {self.port}, with --listen and --announce)"
        if lease.host and lease.host not in self.client.observed_hosts:
            return (
                f"{how} (the router maps its port {lease.port}, but its own address is {lease.host}: behind a "
                "carrier's NAT, forwarding does not help)"
            )
        return f"{how} (the router maps its port {lease.port}, but connections to it fail)"


def drawn_points(me: PeerId, rooms: Mapping[PeerId, int]) -> tuple[PeerId, ...]:
    """Return rendezvous servers in an order that ``me`` draws: those with more room for relayed pairs sooner.

    ``rooms``: numbers of pairs.
    """
    return ranked(me, tuple((peer, 1.0 + room) for peer, room in sorted(rooms.items())))


def _addresses_with_id(texts: Sequence[str], peer: PeerId) -> list[str]:
    """Return addresses of ``peer`` with its id, one for each family: routable ones first, loopback ones last."""
    found: dict[str, addresses.Address] = {}
    for text in texts:
        with suppress(ValueError):
            address = msgspec.structs.replace(addresses.parse(text), peer=peer)
            best = found.setdefault(address.family, address)
            if sockets.is_loopback(best.host) and not sockets.is_loopback(address.host):
                found[address.family] = address
    where = sorted(found.values(), key=lambda one: (sockets.is_loopback(one.host), not sockets.has_route(one.host)))
    return [str(address) for address in where]


async def check_reachability(directory: Directory, listen: Sequence[str], patience_s: float) -> tuple[bool | None, str]:
    """Return whether a peer that listens at ``listen`` can be dialled, and a sentence for the user.

    Raises:
        OSError: the port is taken.
    """
    identity, said = Identity.ephemeral(), asyncio.Event()
    transport = Transport(identity, listen=listen, run="", version=WIRE_VERSION)
    reachability = Reachability(
        identity,
        directory,
        transport,
        KnownPeers(identity.peer_id),
        LookupPolicy(identity.peer_id, frozenset),
        announced=(),
        relay_bytes_per_s=0.0,
        maps_port=True,
    )
    async with transport.serve(Observer()), reachability:
        keeping = asyncio.create_task(reachability.keep(lambda _: said.set()), name="look around")
        try:
            await asyncio.wait_for(said.wait(), patience_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await reachability.wait_for_mapping()
                    said.clear()
                    await said.wait()
        except TimeoutError:
            return None, "no rendezvous server has answered, so there was no dial-back"
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        return reachability.is_dialable, reachability.describe()
