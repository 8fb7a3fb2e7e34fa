"""Client of meeting points: this peer attends some, so that it can be called, and meets other peers through theirs.

Rules of this file:
1. Signalling uses ordinary connections, so that both keys are proved: the run's own to members of the run, ``outside``,
   which names no run, to others (a bootstrap).
2. A peer that is called comes if it attends that meeting point and was not called too often. It risks one line and a
   few dials of one address. Both count in the dialler's budget until they succeed: otherwise anybody that claims to be
   a meeting point could make this peer dial a third machine until that one blocks it (net/abuse_limits.py).
3. At most POINTS are attended. To meet a peer, at most POINTS of those in its record are asked, connected ones first,
   then those that this peer attends: the other may attend there by now, whatever its record says.
4. What meeting points said about this peer stays valid until others say otherwise, even if none is left.
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
CALL_BURST, CALLS_PER_S = 40, 80 / 60
"""Calls that this peer follows: never more than 120 in a minute."""
CALLS_AT_ONCE = 16


class Attendance(Struct, frozen=True):
    """A meeting point that this peer attends, and what it told about this peer."""

    address: str
    observation: intro.Attended
    elsewhere: tuple[str, ...] = ()
    """Further addresses of the meeting point, for peers that cannot dial the first."""


class RendezvousClient:
    """See the module's rules.

    transport: gets the connections that come about.
    is_member: whether a meeting point takes part in the run.
    points_of: addresses of the meeting points at which a peer can be met, for further connections to it.
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
        self.attended: dict[PeerId, Attendance] = {}
        self._left: dict[PeerId, Attendance] = {}
        """Those that were attended last, before they were gone."""
        self._calls = TokenBucket(burst=CALL_BURST, per_s=CALLS_PER_S)
        self._coming = 0
        self._asking: Counter[PeerId] = Counter()
        """Requests to meeting points that are under way."""
        transport.redial_met_peers(self._reconnect)
        for links in (transport, outside):
            links.answer_requests(intro.Called, self._answer_call)

    @property
    def observations(self) -> list[intro.Attended]:
        """How meeting points observe this peer."""
        return [one.observation for one in (self.attended or self._left).values()]

    @property
    def observed_hosts(self) -> tuple[str, ...]:
        """Hosts as which meeting points see this peer."""
        return tuple(dict.fromkeys(told.host for told in self.observations))[:POINTS]

    # -- attending ---------------------------------------------------------------------------------------------------

    async def attend(
        self, text: str, ports: tuple[int, ...], token: bytes, elsewhere: tuple[str, ...] = ()
    ) -> Attendance:
        """Attend the meeting point at ``text``: it may call this peer, and tells how it sees it.

        Raises:
            DialError: it does not answer, or refuses.
        """
        point = self._parse_point(text)
        assert point.peer is not None
        async with self._connect_to_point(point) as (links, where):
            try:
                body = encode(intro.Attend(ports, token))
                told = decode_as((await links.request(point.peer, body, timeout_s=ATTEND_S)).body, intro.Attended)
            except (RequestError, ValueError) as error:
                raise DialError(f"meeting point {where}: {error}") from error
            attendance = self.attended[point.peer] = Attendance(text, told, elsewhere)
            return attendance

    def forget_disconnected(self) -> None:
        """Forget attended meeting points whose connection has ended."""
        here = self._connected()
        if gone := {peer: one for peer, one in self.attended.items() if peer not in here}:
            self.attended = {peer: one for peer, one in self.attended.items() if peer in here}
            self._left = gone

    def _connected(self) -> set[PeerId]:
        return {*self._transport.peers(), *self._outside.peers()}

    # -- meeting -----------------------------------------------------------------------------------------------------

    async def connect(self, peer: PeerId, points: Iterable[str], *, may_relay: bool = True) -> PeerId:
        """Connect to ``peer`` through one of its meeting points.

        Raises:
            DialError: no meeting point led to a connection; all reasons.
            HandshakeError: another peer answers, or ``peer`` refuses this one.
        """
        met = await self._meet_at_any(peer, points, may_relay=may_relay)
        try:
            return await self._adopt(Role.DIALLER, met, Dialled(peer))
        except OSError as error:
            raise DialError(f"{peer} was met, and the connection failed: {error}") from error

    async def _meet_at_any(self, peer: PeerId, points: Iterable[str], *, may_relay: bool) -> Met:
        reasons, known = [], []
        for text in points:
            try:
                known.append(self._parse_point(text))
            except DialError as error:
                reasons.append(str(error))
        here = self._connected()
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
        raise DialError("; ".join(reasons[::-1]) or "it names no meeting point, and we attend none")

    async def _meet_at(self, point: Address, peer: PeerId, *, may_relay: bool) -> Met:
        assert point.peer is not None
        if point.peer == self._transport.peer_id:
            raise DialError("it attends here, and did not come: it is dialled by nobody else")
        async with self._connect_to_point(point) as (links, where):
            try:
                answer = await links.request(point.peer, encode(intro.Meet(peer, True)), timeout_s=ASK_S)
                ticket = decode_as(answer.body, intro.Introduced).ticket
            except (RequestError, ValueError) as error:
                raise DialError(f"meeting point {where}: {error}") from error
        return await self._meet(where, point.peer, ticket, Role.DIALLER, peer, may_relay=may_relay)

    async def _meet(
        self, where: Address, point: PeerId, ticket: bytes, role: Role, peer: PeerId, *, may_relay: bool = True
    ) -> Met:
        """Meet ``peer``; the dials of the line and of the peer are within the dialler's budget."""
        place = (await machines(where, DIAL_S))[0]
        if not self._dialler.may_dial(point, place):
            raise DialError(f"{place.host} is left alone for a while: too many lines there came to nothing")

        def may_dial(other: Address) -> bool:
            self._dialler.record_success(point, place)  # it knows our ticket
            return self._dialler.may_dial(peer, other)

        return await hole_punching.meet(
            place,
            ticket,
            role,
            may_relay=may_relay,
            congestion=self._congestion,
            narrow=self._transport.setup.narrow_hosts,
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
        """``point`` calls this peer, since another one wants to meet it.

        Raises:
            RequestRefused: this peer does not come.
        """
        attendance = self.attended.get(point)
        if attendance is None:
            raise RequestRefused("this peer does not attend here")
        if self._coming >= CALLS_AT_ONCE or not self._calls.take(asyncio.get_running_loop().time()):
            raise RequestRefused("this peer was called too often")
        where = self._address_of(self._parse_point(attendance.address), point)
        self._tasks.spawn(self._come_to_meeting(where, point, request), name="come to a meeting")
        return Answer(b"")

    async def _come_to_meeting(self, where: Address, point: PeerId, request: intro.Called) -> None:
        self._coming += 1
        try:
            role, peer = Role.DIALLER if request.dials else Role.LISTENER, PeerId(request.peer)
            await self._adopt(role, await self._meet(where, point, request.ticket, role, peer), Dialled(peer))
        except (DialError, HandshakeError, OSError) as error:
            log.debug("nothing came of a meeting", peer=request.peer, reason=str(error))
        finally:
            self._coming -= 1

    # -- meeting points ----------------------------------------------------------------------------------------------

    @staticmethod
    def _parse_point(text: str) -> Address:
        try:
            point = addresses.parse(text)
        except ValueError as error:
            raise DialError(f"meeting point: {error}") from error
        if point.peer is None:
            raise DialError(f"meeting point {text} lacks the peer id")
        return point

    @asynccontextmanager
    async def _connect_to_point(self, point: Address) -> AsyncIterator[tuple[Transport, Address]]:
        """Connect to ``point``: the transport that has the connection, and the address for lines.

        A connection to a point outside the run lasts while it is attended or asked something: a record that names many
        points costs no places."""
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
                    links.disconnect(point.peer, "that was all")

    def _address_of(self, point: Address, peer: PeerId) -> Address:
        """Address of ``peer`` as it was dialled; ``point`` if it dialled this peer."""
        for links in (self._transport, self._outside):
            channel = links.channel_of(peer)
            if channel is not None and channel.connection.role is Role.DIALLER and not channel.is_met:
                return channel.address
        return point
