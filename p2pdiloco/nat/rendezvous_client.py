"""Rendezvous client: registers this peer with rendezvous servers, and connects to other peers through theirs.

Rules of this file:
1. Signalling uses ordinary connections, on which both keys are proved: the run's transport to members of the run, and
   ``outside``, which names no run, to other servers (a bootstrap).
2. This peer follows a call if it is registered with that server and the rate limit permits. A call costs one line and a
   few dials of one address. Both count against the dialler's budget until they succeed: otherwise a false rendezvous
   server could make this peer dial a third host until that host blocks it (net/abuse_limits.py).
3. This peer is registered with at most POINTS servers. To connect to a peer, it asks at most POINTS servers of that
   peer's record, connected ones first, then those with which this peer is registered: the other peer may have
   registered there since its record was published.
4. The last observations of this peer stay valid until newer ones replace them, even if no server is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from msgspec import Struct

from p2pdiloco.nat import hole_punching
from p2pdiloco.nat import messages as intro
from p2pdiloco.net.handshake import Dialled, HandshakeError, Role
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.timing import TokenBucket
from p2pdiloco.transport import addresses, sockets
from p2pdiloco.transport.addresses import Address
from p2pdiloco.transport.connection_setup import Met
from p2pdiloco.transport.dialer import Dialler, machines
from p2pdiloco.transport.transport import DialError, Transport
from p2pdiloco.util import logs
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.control_messages import decode_as, encode
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused

log = logs.get("meeting")

POINTS = 3
ATTEND_S = 8.0
ASK_S = 8.0
DIAL_S = 5.0
# Calls that this peer follows: at most 120 in any minute (burst plus rate).
CALL_BURST, CALLS_PER_S = 40, 80 / 60
CALLS_AT_ONCE = 16


class Registration(Struct, frozen=True):
    """A rendezvous server with which this peer is registered, and the server's observation of this peer."""

    address: str
    observation: intro.Attended
    elsewhere: tuple[str, ...] = ()
    """Further addresses of the server, for peers that cannot dial the first."""


class RendezvousClient:
    """Connects to peers through rendezvous servers, and follows the calls of those with which it is registered.

    transport: receives the resulting connections.
    is_member: returns whether a rendezvous server takes part in the run.
    points_of: returns addresses of a peer's rendezvous servers, for further connections to that peer.
    """

    def __init__(
        self,
        transport: Transport,
        outside: Transport,
        dialler: Dialler,
        tasks: Tasks,
        is_member: Callable[[PeerId], bool] = lambda _: False,
        points_of: Callable[[PeerId], Iterable[str]] = lambda _: (),
    ) -> None:
        self._transport = transport
        self._outside = outside
        self._dialler = dialler
        self._tasks = tasks
        self._is_member = is_member
        self._points_of = points_of
        self._congestion = TransportLimits().congestion
        self.attended: dict[PeerId, Registration] = {}
        # The servers that disconnected last. Their observations count while none is attended.
        self._left: dict[PeerId, Registration] = {}
        self._calls = TokenBucket(burst=CALL_BURST, per_s=CALLS_PER_S)
        self._coming = 0
        # Number of open requests by server. A connection outside the run is closed with the last one.
        self._asking: Counter[PeerId] = Counter()
        transport.setup.dial_met = self._reconnect
        for links in (transport, outside):
            links.answer_requests(intro.Called, self._answer_call)

    @property
    def observations(self) -> list[intro.Attended]:
        """Observations of this peer by rendezvous servers."""
        return [one.observation for one in (self.attended or self._left).values()]

    @property
    def observed_hosts(self) -> tuple[str, ...]:
        """External hosts of this peer, as rendezvous servers observe them."""
        return tuple(dict.fromkeys(told.host for told in self.observations))[:POINTS]

    # -- attending ---------------------------------------------------------------------------------------------------

    async def attend(
        self, text: str, ports: tuple[int, ...], token: bytes, elsewhere: tuple[str, ...] = ()
    ) -> Registration:
        """Register with the rendezvous server at ``text``, which may then call this peer.

        ports: ports that the server dials back.
        token: token by which the listener at the first port proves itself.

        Raises:
            DialError: the server does not answer, or refuses.
        """
        point = self._parse_point(text)
        assert point.peer is not None
        async with self._connect_to_point(point) as (links, where):
            try:
                body = encode(intro.Attend(ports, token))
                observation = decode_as(
                    (await links.request(point.peer, body, timeout_s=ATTEND_S)).body, intro.Attended
                )
            except (RequestError, ValueError) as error:
                raise DialError(f"rendezvous server {where}: {error}") from error
            registration = self.attended[point.peer] = Registration(text, observation, elsewhere)
            return registration

    def forget_disconnected(self) -> None:
        """Forget attended rendezvous servers whose connection has ended."""
        here = self._connected()
        if gone := {peer: one for peer, one in self.attended.items() if peer not in here}:
            self.attended = {peer: one for peer, one in self.attended.items() if peer in here}
            self._left = gone

    def leave(self, point: PeerId) -> None:
        """Do without the server ``point``, if this peer is registered there."""
        if self.attended.pop(point, None) is not None and not self._asking[point]:
            self._outside.disconnect(point, "registered elsewhere")

    def _connected(self) -> set[PeerId]:
        return {*self._transport.peers(), *self._outside.peers()}

    # -- meeting -----------------------------------------------------------------------------------------------------

    async def connect(self, peer: PeerId, points: Iterable[str], *, may_relay: bool = True) -> PeerId:
        """Connect to ``peer`` through one of its rendezvous servers.

        Raises:
            DialError: no server led to a connection; the message gives the reason of each.
            HandshakeError: another peer answers, or ``peer`` refuses this one.
        """
        met = await self._meet_at_any(peer, points, may_relay=may_relay)
        try:
            return await self._adopt(Role.DIALLER, met, Dialled(peer))
        except OSError as error:
            raise DialError(f"hole punching to {peer} succeeded, but the connection failed: {error}") from error

    async def _meet_at_any(self, peer: PeerId, points: Iterable[str], *, may_relay: bool) -> Met:
        reasons, known = [], []
        for text in points:
            try:
                known.append(self._parse_point(text))
            except DialError as error:
                reasons.append(str(error))
        here = self._connected()
        # Servers that are connected come first, then those to which this machine has a route.
        known.sort(key=lambda point: (point.peer not in here, not sockets.has_route(point.host)))
        named = known[:POINTS]
        asked = {point.peer for point in named}
        ours = [
            self._parse_point(one.address) for point, one in self.attended.items() if point in here - asked - {peer}
        ]
        for point in named + ours:
            try:
                return await self._meet_at(point, peer, may_relay=may_relay)
            except DialError as error:
                reasons.append(str(error))
        raise DialError("; ".join(reasons[::-1]) or "its record names no rendezvous server, and this peer uses none")

    async def _meet_at(self, point: Address, peer: PeerId, *, may_relay: bool) -> Met:
        assert point.peer is not None
        if point.peer == self._transport.peer_id:
            raise DialError("the peer is registered with this peer's rendezvous server, but did not respond")
        async with self._connect_to_point(point) as (links, where):
            try:
                answer = await links.request(point.peer, encode(intro.Meet(peer, True)), timeout_s=ASK_S)
                ticket = decode_as(answer.body, intro.Introduced).ticket
            except (RequestError, ValueError) as error:
                raise DialError(f"rendezvous server {where}: {error}") from error
        return await self._meet(where, point.peer, ticket, Role.DIALLER, peer, may_relay=may_relay)

    async def _meet(
        self, where: Address, point: PeerId, ticket: bytes, role: Role, peer: PeerId, *, may_relay: bool = True
    ) -> Met:
        """Connect to ``peer``. The dials of the line and of the peer count against the dialler's budget."""
        place = (await machines(where, DIAL_S))[0]
        if not self._dialler.may_dial(point, place):
            raise DialError(f"{place.host} is not dialled for a while: too many lines to it failed")

        def may_dial(other: Address) -> bool:
            # The host knows our ticket, so it is a real rendezvous server and the line did not hit a third party.
            self._dialler.record_success(point, place)
            return self._dialler.may_dial(peer, other)

        return await hole_punching.meet(
            place,
            ticket,
            role,
            may_relay=may_relay,
            congestion=self._congestion,
            narrow=self._transport.setup.narrow_paths,
            may_dial=may_dial,
        )

    async def _adopt(self, role: Role, met: Met, wanted: Dialled) -> PeerId:
        peer = await self._transport.setup.adopt(role, met, wanted)
        if not met.is_relayed:
            self._dialler.record_success(peer, met.address)
        return peer

    async def _reconnect(self, peer: PeerId, wanted: Dialled) -> PeerId:
        met = await self._meet_at_any(peer, self._points_of(peer), may_relay=False)
        return await self._adopt(Role.DIALLER, met, wanted)

    async def _answer_call(self, point: PeerId, request: intro.Called) -> Answer:
        """Follow a call by the server ``point``, or refuse it: another peer wants to connect."""
        registration = self.attended.get(point)
        if registration is None:
            raise RequestRefused("this peer is not registered here")
        if self._coming >= CALLS_AT_ONCE or not self._calls.take(asyncio.get_running_loop().time()):
            raise RequestRefused("this peer's rate limit for calls is reached")
        where = self._address_of(self._parse_point(registration.address), point)
        self._tasks.spawn(self._come_to_meeting(where, point, request), name="come to a meeting")
        return Answer(b"")

    async def _come_to_meeting(self, where: Address, point: PeerId, request: intro.Called) -> None:
        self._coming += 1
        try:
            role, peer = Role.DIALLER if request.dials else Role.LISTENER, PeerId(request.peer)
            await self._adopt(role, await self._meet(where, point, request.ticket, role, peer), Dialled(peer))
        except (DialError, HandshakeError, OSError) as error:
            log.debug("hole punching failed", peer=request.peer, reason=str(error))
        finally:
            self._coming -= 1

    # -- rendezvous servers --------------------------------------------------------------------------------------------

    @staticmethod
    def _parse_point(text: str) -> Address:
        try:
            point = addresses.parse(text)
        except ValueError as error:
            raise DialError(f"rendezvous server: {error}") from error
        if point.peer is None:
            raise DialError(f"rendezvous server {text} lacks the peer id")
        return point

    @asynccontextmanager
    async def _connect_to_point(self, point: Address) -> AsyncIterator[tuple[Transport, Address]]:
        """Connect to the server ``point``; yield the transport that has the connection, and the address for lines.

        A connection to a server outside the run is closed after the last request, unless this peer is registered
        there. So a record that names many servers does not fill this peer's connection slots."""
        assert point.peer is not None
        links = self._transport if self._is_member(point.peer) else self._outside
        if point.peer not in links.peers():
            try:
                await self._dialler.dial(links, str(point), DIAL_S)
            except ValueError as error:
                raise DialError(str(error)) from error
        self._asking[point.peer] += 1
        try:
            yield links, self._address_of(point, point.peer)
        finally:
            self._asking[point.peer] -= 1
            if not self._asking[point.peer]:
                del self._asking[point.peer]
                if links is self._outside and point.peer not in self.attended:
                    links.disconnect(point.peer, "no further requests")

    def _address_of(self, point: Address, peer: PeerId) -> Address:
        """Return the address at which ``peer`` was dialled, or ``point`` if it dialled this peer."""
        for links in (self._transport, self._outside):
            channel = links.channel_of(peer)
            if channel is not None and channel.connection.role is Role.DIALLER and not channel.is_met:
                return channel.address
        return point
