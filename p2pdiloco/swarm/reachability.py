"""How this peer stands in the network: it asks meeting points how it is seen and whether it can be dialled, and attends
them, so that others can meet it.

Rules of this file:
1. Nobody has to say whether a peer can be dialled: who has dialled it knows. One that did is enough; if all that tried
   failed, it cannot be.
2. Bootstraps are asked first, then members that can be dialled; at most POINTS are attended, anew when one is gone.
3. What was found is told to the user in one sentence, and again when it changes.
4. A router is asked for a port where this machine has a private address and its user has announced none.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from p2pdiloco.discovery.directory import Directory
from p2pdiloco.nat.port_mapping import Lease, PortMapping
from p2pdiloco.nat.rendezvous_client import POINTS, RendezvousClient
from p2pdiloco.nat.rendezvous_server import RendezvousServer
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.swarm.connect import ConnectFallback
from p2pdiloco.swarm.lookup_policy import KnownPoints
from p2pdiloco.transport import addresses, sockets
from p2pdiloco.transport.dialer import Dialler
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import DialError, Observer, Transport
from p2pdiloco.util import logs
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.control_messages import decode_as
from p2pdiloco.wire.directory_records import PeerRecord, PointRecord

log = logs.get("whereabouts")

LOOK_S = 2.0
RENEW_S = 120.0
"""After which a meeting point is asked again how we are seen."""
PAUSE_S = 15.0
"""Before one that did not answer is asked again."""
MOST_ADDRESSES = 16
ASKED = 8
"""Of the meeting points in the directory."""
TRIED = 2
"""Addresses of one."""
PLACES = 4
"""At which a record says that we can be met."""


class Reachability:
    """See the module's rules; ``async with`` it, within the transport. ``announced``: addresses that the user says are
    ours. ``members``: what is known of the others. ``is_missing``: whether somebody is not connected who should be."""

    def __init__(
        self,
        identity: Identity,
        directory: Directory,
        transport: Transport,
        *,
        announced: Sequence[str],
        relay_bytes_per_s: float | None,
        maps_port: bool,
        members: Callable[[], Mapping[PeerId, PeerRecord]],
        is_missing: Callable[[], bool],
        troubles: dict[str, str] | None = None,
    ) -> None:
        """``troubles``: see ``Tasks``."""
        self._directory = directory
        self._known_points = KnownPoints(directory, is_missing)
        self._transport = transport
        self._announced = list(announced)
        self._members = members
        self._tasks = Tasks(troubles)
        dialler = Dialler()
        self._outside = Transport(identity, listen="", run="", version=WIRE_VERSION, handler=Observer(), observes=True)
        self._rendezvous = RendezvousClient(
            transport, self._outside, dialler, self._tasks, lambda peer: peer in members()
        )
        self._rendezvous.points_of = lambda peer: members()[peer].points if peer in members() else ()
        self.point = RendezvousServer(transport, relay_bytes_per_s)
        self.ladder = ConnectFallback(transport, dialler, self._rendezvous, lambda: self.seen)
        self._asked_at: dict[PeerId, float] = {}
        self._said = ""
        self._is_directory_told = False
        self._maps_port = maps_port
        self._router: PortMapping | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        await self._outside.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)
        if self._router is not None:
            await self._router.give_back()
        await self._outside.__aexit__(kind, error, trace)

    def record(self) -> PeerRecord:
        """What others are told of how to reach us."""
        own = self._announced or list(dict.fromkeys([*self._outside_addresses(), *self._transport.listen_addresses()]))
        return PeerRecord(
            tuple(own[:MOST_ADDRESSES]), seen=self.seen, points=self.points, is_point=self.is_dialable is True
        )

    @property
    def seen(self) -> tuple[str, ...]:
        """The hosts as which meeting points see us."""
        found = (told.host for told in self._rendezvous.told)
        return tuple(dict.fromkeys(found))[:POINTS]

    @property
    def is_dialable(self) -> bool | None:
        """Whether others have dialled us back; None: nobody has tried."""
        return self._dialled(0)

    @property
    def is_directory_dialable(self) -> bool | None:
        """The same of our node of the directory, which newcomers ask first."""
        return self._dialled(1)

    def _dialled(self, port: int) -> bool | None:
        """By what half of those say who have tried ``port``, the first or the second: others have come through."""
        answers = self._answers(port)
        return 2 * sum(answers) >= len(answers) if answers else None

    def _answers(self, port: int) -> list[bool]:
        return [told.answers[port] for told in self._rendezvous.told if len(told.answers) > port]

    @property
    def points(self) -> tuple[str, ...]:
        """Where we can be met; nowhere, if all who have tried say that we can be dialled anyway. One may lie, or
        others may not come through where it does."""
        if self.is_dialable and all(self._answers(0)):
            return ()
        attended = self._rendezvous.attended.values()
        return tuple([one.address for one in attended] + [text for one in attended for text in one.elsewhere])[:PLACES]

    @property
    def port(self) -> int:
        """At which our transport listens."""
        return next((addresses.parse(text).port for text in self._transport.listen_addresses()), 0)

    @property
    def _lease(self) -> Lease | None:
        return None if self._router is None else self._router.lease

    @property
    def outside_port(self) -> int:
        """At which others may reach our transport: the router's, if it has given one."""
        return self.port if self._lease is None else self._lease.port

    def _outside_addresses(self) -> list[str]:
        """Multiaddrs at which others have reached us."""
        if not self.is_dialable:
            return []
        hosts = (told.host for told in self._rendezvous.told if told.answers[:1] == (True,))
        port = self.outside_port
        return [str(addresses.of_socket(host, port, self._transport.peer_id)) for host in dict.fromkeys(hosts)]

    async def mapped(self) -> None:
        """Wait until the router has given a port.

        Raises:
            TimeoutError: it gives none.
        """
        if self._router is not None:
            await self._router.asked.wait()
        if self._lease is None:
            raise TimeoutError

    def _ask_router(self) -> None:
        """For a port, where there may be a router."""
        hosts = (ipaddress.ip_address(addresses.parse(text).host) for text in self._transport.listen_addresses())
        if self._maps_port and not self._announced and any(not ip.is_global and not ip.is_loopback for ip in hosts):
            self._router = PortMapping(self.port)
            self._tasks.keep(partial(self._router.keep, self._asked_at.clear), name="router")

    async def keep(self, say: Callable[[str], None]) -> None:
        """Attend, until cancelled; ``say`` tells the user."""
        loop = asyncio.get_running_loop()
        if self._router is None:
            self._ask_router()
        while True:
            self._rendezvous.forget()
            for peer, where in (await self._candidates()).items():
                is_attended = peer in self._rendezvous.attended
                if len(self._rendezvous.attended) >= POINTS and not is_attended:
                    continue
                if loop.time() - self._asked_at.get(peer, -RENEW_S) >= (RENEW_S if is_attended else PAUSE_S):
                    self._asked_at[peer] = loop.time()
                    await self._attend(where, say)
            await asyncio.sleep(LOOK_S)

    async def _candidates(self) -> dict[PeerId, list[str]]:
        """The addresses of each, best first; those that are met already first."""
        told: dict[PeerId, Sequence[str]] = {}
        records = await self._known_points.records(self._rendezvous.attended, asyncio.get_running_loop().time())
        for peer, body in list(records.items())[:ASKED]:
            with suppress(ValueError):
                told[peer] = decode_as(body, PointRecord).addresses
        for peer, record in self._members().items():
            if record.is_point:
                told.setdefault(peer, record.addresses)
        found = {peer: _named(texts, peer) for peer, texts in told.items() if peer != self._transport.peer_id}
        attended = self._rendezvous.attended
        return {peer: found[peer] for peer in sorted(found, key=lambda peer: peer not in attended) if found[peer]}

    async def _attend(self, where: Sequence[str], say: Callable[[str], None]) -> None:
        directory_port = next(
            (addresses.parse(line).port for line in self._directory.visible_addresses() if "/tcp/" in line), 0
        )
        ports = tuple(port for port in (self.outside_port, directory_port) if port)
        for text in where[:TRIED]:
            elsewhere = tuple(other for other in where[:TRIED] if other != text)
            try:
                attendance = await self._rendezvous.attend(text, ports, self.point.token, elsewhere)
                break
            except DialError as error:
                log.debug("a meeting point does not answer", address=text, reason=str(error))
        else:
            return
        answers = attendance.told.answers
        if len(answers) > 1 and not answers[1] and not self._is_directory_told:
            self._is_directory_told = True
            self._directory.serve_nobody()
        sentence = self.sentence()
        if sentence != self._said:
            self._said = sentence
            log.info("whereabouts", found=sentence)
            say(sentence)

    def sentence(self) -> str:
        """For the user."""
        seen, lease = ", ".join(self.seen) or "nobody knows which address", self._lease
        if self.is_dialable:
            mapped = f": the router maps it to this machine ({lease.by})" if lease else ""
            return f"{', '.join(f'{host}:{self.outside_port}' for host in self.seen)} answers from outside{mapped}"
        if self.is_dialable is None:
            return f"seen as {seen}; nobody has dialled back yet"
        via = f"{len(self._rendezvous.attended)} meeting point{'s' * (len(self._rendezvous.attended) > 1)}"
        how = f"seen as {seen}, and cannot be dialled there: others are met through {via}, by punching or a relay"
        if lease is None:
            return f"{how} (a port forwarded to {self.port}, with --listen and --announce, would do without)"
        if lease.host and lease.host not in self.seen:
            return (
                f"{how} (the router maps its port {lease.port}, but its own address is {lease.host}: behind a "
                "carrier's NAT forwarding does not help)"
            )
        return f"{how} (the router maps its port {lease.port}, and nobody gets in there)"


def _named(texts: Sequence[str], peer: PeerId) -> list[str]:
    """A peer's addresses with its id: those that can be dialled from here first, this machine's last, one a family."""
    found: dict[str, addresses.Address] = {}
    for text in texts:
        with suppress(ValueError):
            address = msgspec.structs.replace(addresses.parse(text), peer=peer)
            best = found.setdefault(address.family, address)
            if sockets.is_loopback(best.host) and not sockets.is_loopback(address.host):
                found[address.family] = address
    where = sorted(found.values(), key=lambda one: (sockets.is_loopback(one.host), not sockets.has_route(one.host)))
    return [str(address) for address in where]


async def looked_up(directory: Directory, listen: Sequence[str], patience_s: float) -> tuple[bool | None, str]:
    """Whether a peer that listens at ``listen`` could be dialled, and the sentence for the user.

    Raises:
        OSError: the port is taken.
    """
    identity, said = Identity.ephemeral(), asyncio.Event()
    async with Transport(identity, listen=listen, run="", version=WIRE_VERSION, handler=Observer()) as transport:
        reachability = Reachability(
            identity,
            directory,
            transport,
            announced=(),
            relay_bytes_per_s=0.0,
            maps_port=True,
            members=dict,
            is_missing=lambda: True,
        )
        async with reachability:
            keeping = asyncio.create_task(reachability.keep(lambda _: said.set()), name="look around")
            try:
                await asyncio.wait_for(said.wait(), patience_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        await reachability.mapped()
                        said.clear()
                        await said.wait()
            except TimeoutError:
                return None, "no meeting point has answered, so nobody has dialled back"
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
            return reachability.is_dialable, reachability.sentence()
