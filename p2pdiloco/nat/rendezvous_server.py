"""Rendezvous server: reports observed addresses to peers, dials them back, introduces pairs of peers, and relays.

nat/introducer.py decides about introductions; this module has the sockets, the timer and the requests.

Rules of this file:
1. A peer is dialled back only at the address from which its connection comes, within a rate limit.
2. Only registered peers are called, over their existing connection.
3. A line holds a socket until its pair ends, at most PAIR_S seconds unless it is relayed. Lines that have not sent a
   ticket yet have a separate limit; when it is reached, the host with the most of them loses one.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from msgspec import Struct

from p2pdiloco.nat import messages as intro
from p2pdiloco.nat.introducer import Hang, Introducer, Joined, NotIntroducedError, Say
from p2pdiloco.net.abuse_limits import Room, machine_of
from p2pdiloco.net.traffic_shaping import Pacer
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.timing import RateLimiter
from p2pdiloco.transport import addresses, sockets
from p2pdiloco.transport.tls_connection import Channel
from p2pdiloco.transport.transport import Transport
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import encode
from p2pdiloco.wire.directory_records import RELAYS
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused

# -- Relay -------------------------------------------------------------------------------------------------------------
# Relays bytes between two sockets, without reading them, within a budget that all pairs share.
# Rules of this section:
# 1. ``splice`` moves the bytes inside the kernel; they never enter this process.
# 2. Directions take turns: of n directions with data to send, each gets 1/n of the budget. Data worth TICK_S is sent at
#    once and paid for afterwards, since the wake-up is most of the cost of a turn.
# 3. Small pieces may overtake now and then, so that heartbeats and requests of one pair do not wait behind the bulk
#    data of another. They count against the budget all the same.
# 4. The end of one direction is passed on; the pair ends when both directions have ended.


F_SETPIPE_SZ = 1031
LARGEST_BYTES = 1 << 20
SMALL_BYTES = 16 << 10
# Data worth this much time is sent at once; a single turn is never worth more. Two turns of 1 MiB per wake-up take 0.39
# CPU seconds a GB for four pairs; turns of 833 kB, each with its own wake-up, took 0.64 (benchmarks/notes.md).
TICK_S = 0.3
ROUND_S = 0.8
SHORTEST_TURN_S = 0.02
# Minimum time between two overtaking pieces of one direction.
AHEAD_S = 0.05
# Debt beyond which small pieces wait, too. Must exceed 2 * TICK_S, the most that turns can owe.
MOST_DEBT_S = 0.75
# Burst allowance of an idle budget.
BURST_S = 0.02


class Budget:
    """A limit in bytes per second (None: unlimited) that all directions share, in the order of their requests."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._pacer = Pacer(bytes_per_s, burst_s=BURST_S)
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        # Number of directions that were waiting when turns were last given.
        self._sharing = 0

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the limit. It counts from the next turn on."""
        self._pacer.set_rate(bytes_per_s, asyncio.get_running_loop().time())

    @property
    def turn_bytes(self) -> int:
        """Number of bytes that a direction should take at a time."""
        if self._pacer.bytes_per_s is None:
            return LARGEST_BYTES
        sharing = max(1, self._sharing, len(self._waiting))
        turn_s = min(TICK_S, max(SHORTEST_TURN_S, ROUND_S / sharing))
        return min(LARGEST_BYTES, max(SMALL_BYTES, int(self._pacer.bytes_per_s * turn_s)))

    def take_ahead(self, count: int) -> bool:
        """Take ``count`` bytes without waiting; return False if the debt is too large."""
        now = asyncio.get_running_loop().time()
        if self._pacer.ready_at() - now > MOST_DEBT_S:
            return False
        self._pacer.charge(count, now)
        return True

    async def take(self, count: int) -> None:
        """Wait until ``count`` bytes may be sent."""
        if self._pacer.bytes_per_s is None:
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_at(max(loop.time(), self._pacer.ready_at()), self._give_turns)
        self._waiting.append((count, turn))
        await turn

    def _give_turns(self) -> None:
        """Give turns worth TICK_S to the directions that waited longest; the others wait until these are paid for."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._sharing = len(self._waiting)
        while self._waiting and self._pacer.ready_at() < now + TICK_S:
            count, turn = self._waiting.popleft()
            if not turn.done():
                self._pacer.charge(count, now)
                turn.set_result(None)
        if self._waiting:
            loop.call_at(self._pacer.ready_at(), self._give_turns)


class Relay:
    """Relays bytes between pairs of sockets within one shared budget."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.budget = Budget(bytes_per_s)
        self.carried_bytes = 0

    async def carry(self, a: socket.socket, b: socket.socket, carried: list[int]) -> None:
        """Relay until both directions have ended, or one has failed.

        ``carried`` counts the bytes from each socket. The sockets must be non-blocking; the caller closes them."""
        ways = [asyncio.create_task(self._pump(a, b, carried, 0)), asyncio.create_task(self._pump(b, a, carried, 1))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, source: socket.socket, target: socket.socket, carried: list[int], side: int) -> None:
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # above the user's limit for pipes: the pipe stays smaller, and so do the pieces
            fcntl.fcntl(writer, F_SETPIPE_SZ, LARGEST_BYTES)
        loop, ahead_at = asyncio.get_running_loop(), 0.0
        try:
            while count := await _splice(source.fileno(), writer, self.budget.turn_bytes, source.fileno()):
                is_ahead = count <= SMALL_BYTES and loop.time() - ahead_at >= AHEAD_S
                if is_ahead and self.budget.take_ahead(count):
                    ahead_at = loop.time()
                else:
                    await self.budget.take(count)
                self.carried_bytes += count
                carried[side] += count
                while count:
                    count -= await _splice(reader, target.fileno(), count, target.fileno(), writes=True)
            target.shutdown(socket.SHUT_WR)
        finally:
            os.close(reader)
            os.close(writer)


async def _splice(source: int, target: int, count: int, awaited: int, *, writes: bool = False) -> int:
    """Move up to ``count`` bytes; return how many, or 0 if the source has ended.

    ``awaited`` is the socket of the two descriptors, which is waited for."""
    while True:
        try:
            return os.splice(source, target, count)
        except BlockingIOError:
            await _ready(awaited, writes=writes)


async def _ready(descriptor: int, *, writes: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    add: Callable[..., None] = loop.add_writer if writes else loop.add_reader
    remove: Callable[[int], bool] = loop.remove_writer if writes else loop.remove_reader
    add(descriptor, tell)
    try:
        await ready
    finally:
        remove(descriptor)


# -- Rendezvous server -------------------------------------------------------------------------------------------------


log = logs.get("meeting")

# Number of relayed pairs for which there is room while the line's rate is unknown.
USUAL_RELAYS = 64
# A relayed pair has two sockets and two pipes: six descriptors. All pairs together take half of the process's.
PAIR_SHARE = 12
# Share of the line that is relayed at least while it is used, however much this peer sends itself.
LEAST_SHARE = 1 / 4
# The largest budget by default, unless that share is more.
USUAL_BYTES_PER_S = 50e6 / 8
# Share of the budget that relayed pairs fill on average, beyond which others look for another relay: rounds are uneven.
FULL = 1 / 2
OPENING_S = 5.0
# Timeout for a called peer to agree.
CALL_S = 4.0
DIAL_BACK_S = 2.0
# Dial-backs to one host: at most 12 in any minute (burst plus rate).
DIAL_BURST, DIALS_PER_S = 8, 4 / 60
DIALS_AT_ONCE = 16
# Maximum number of lines that have not sent a ticket yet.
BEGINNING = 96


def relay_limits(most: float | Literal["auto"], line: float, own: float, peers: int) -> tuple[float, int]:
    """Return the budget of a relay, and the number of pairs for which it has room.

    All rates are in bytes per second.

    Args:
        most: largest budget; "auto": ``USUAL_BYTES_PER_S``, or ``LEAST_SHARE`` of the line if that is more.
        line: what the line carries upwards.
        own: what this peer sends itself on average, to its ``peers``; each of these sends as much.
    """
    least, pair = LEAST_SHARE * line, 2.0 * own / max(1, peers)
    budget = min(max(USUAL_BYTES_PER_S, least) if most == "auto" else most, max(least, line - own))
    return budget, RELAYS if FULL * budget >= RELAYS * pair else int(FULL * budget / pair)


def relay_places() -> int:
    """Return ``RELAYS``, or fewer if the process may open few descriptors (``RLIMIT_NOFILE``)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return RELAYS if soft == resource.RLIM_INFINITY else min(RELAYS, soft // PAIR_SHARE)


class _Line(Struct, eq=False):
    raw: socket.socket
    reading: asyncio.Future[bytes] | None = None
    is_over: bool = False
    carried: asyncio.Task[None] | None = None
    """The task that relays the pair, if it is relayed."""


class RendezvousServer:
    """A rendezvous server on ``transport``.

    bytes_per_s: limit of all relayed pairs together; "auto": as in ``relay_limits``; None: unlimited; 0: no relaying.
    """

    def __init__(self, transport: Transport, bytes_per_s: float | Literal["auto"] | None) -> None:
        self._transport = transport
        self._most = bytes_per_s
        self.relay = Relay(USUAL_BYTES_PER_S if bytes_per_s == "auto" else bytes_per_s or None)
        self.introducer = Introducer(0 if bytes_per_s == 0 else relay_places(), USUAL_RELAYS)
        # Proves to a server that dials back that it has reached this peer and not another one.
        self.token = os.urandom(intro.TICKET_BYTES)
        self._knows_line = False
        self._attending: dict[PeerId, None] = {}
        self._lines: dict[object, _Line] = {}
        self._beginning: Room[_Line] = Room(BEGINNING)
        self._timer: asyncio.TimerHandle | None = None
        self._dials: RateLimiter[str] = RateLimiter(burst=DIAL_BURST, per_s=DIALS_PER_S)
        self._dialling = asyncio.Semaphore(DIALS_AT_ONCE)
        transport.setup.takers[intro.OPENING[:1]] = self.serve_line
        transport.answer_requests(intro.Attend, self._answer_attend)
        transport.answer_requests(intro.Meet, self._answer_meet)

    def follow_line(self, own: float, peers: int) -> None:
        """Relay no more than the line leaves, once its rate is known; ``relay_limits`` has the arguments.

        Pairs that came before that and have no room end once, the latest first: other relays may have room for them.
        """
        if self._most and (line := self._transport.line_bytes_per_s):
            budget, self.introducer.room = relay_limits(self._most, line, own, peers)
            self.relay.budget.set_rate(budget)
            carried = dict.fromkeys(line.carried for line in self._lines.values() if line.carried is not None)
            for pair in [] if self._knows_line else [*carried][self.introducer.room :]:
                pair.cancel()
            self._knows_line = True

    # -- requests ----------------------------------------------------------------------------------------------------

    def _channel_of(self, peer: PeerId) -> Channel:
        channel = self._transport.channel_of(peer)
        if channel is None:
            raise RequestRefused("the sender is not connected")
        return channel

    async def _answer_attend(self, peer: PeerId, request: intro.Attend) -> Answer:
        channel = self._channel_of(peer)
        here = set(self._transport.peers())
        self._attending = {known: None for known in self._attending if known in here}
        self._attending[peer] = None
        answers = await asyncio.gather(
            *(
                self._dial_back(channel.connection.host, port, request.token if not number else b"")
                for number, port in enumerate(request.ports)
            )
        )
        reachable = tuple(bool(answer) for answer in answers) if None not in answers else ()
        return Answer(encode(intro.Attended(channel.address.host, channel.address.port, reachable)))

    async def _answer_meet(self, asker: PeerId, request: intro.Meet) -> Answer:
        host, wanted = self._channel_of(asker).connection.host, PeerId(request.peer)
        if wanted not in self._attending or self._transport.channel_of(wanted) is None:
            raise RequestRefused(f"{wanted} is not registered here")
        loop = asyncio.get_running_loop()
        own, theirs = os.urandom(intro.TICKET_BYTES), os.urandom(intro.TICKET_BYTES)
        try:
            self.introducer.ask(asker, host, wanted, (own, theirs), loop.time())
        except NotIntroducedError as error:
            raise RequestRefused(str(error)) from None
        self._apply_events()
        try:
            called = intro.Called(asker, theirs, not request.dials)
            await self._transport.request(wanted, encode(called), timeout_s=CALL_S)
        except RequestError as error:
            self.introducer.withdraw(own, loop.time())
            self._apply_events()
            raise RequestRefused(f"{wanted} did not follow the call: {error}") from error
        return Answer(encode(intro.Introduced(own)))

    async def _dial_back(self, host: str, port: int, token: bytes) -> bool | None:
        """Return whether ``port`` of ``host`` answers, or None if the rate limit for that host is reached."""
        loop = asyncio.get_running_loop()
        if not self._dials.take(machine_of(host), loop.time()):
            return None
        raw = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            raw.setblocking(False)
            async with self._dialling, asyncio.timeout(DIAL_BACK_S):
                await loop.sock_connect(raw, (host, port))
                if not token:
                    return True
                await loop.sock_sendall(raw, intro.encode_opening(token, 0, intro.PROBE))
                return await loop.sock_recv(raw, intro.TICKET_BYTES) == intro.echo(token)
        except (OSError, TimeoutError):
            return False
        finally:
            raw.close()

    # -- lines -------------------------------------------------------------------------------------------------------

    async def serve_line(self, raw: socket.socket) -> bool:
        """Serve a line until it ends, and close it. Return whether it sent a valid ticket or token."""
        key, line, loop = object(), _Line(raw), asyncio.get_running_loop()
        is_good = False
        try:
            host, port = raw.getpeername()[:2]
            host = host.removeprefix("::ffff:")
            if (out := self._beginning.enter(line, machine_of(host))) is not None:
                sockets.hang_up(out.raw)
            self._lines[key] = line
            async with asyncio.timeout(OPENING_S):
                data = b""
                while len(data) < intro.OPENING_BYTES:
                    # If the line is closed, fill up with zeros, which do not decode.
                    data += await loop.sock_recv(raw, intro.OPENING_BYTES - len(data)) or b"\0" * intro.OPENING_BYTES
            start, local_port, ticket = intro.decode_opening(data)
            if start == intro.PROBE:
                if is_good := ticket == self.token:
                    await loop.sock_sendall(raw, intro.echo(ticket))
                return is_good
            is_good = self.introducer.handle_opened(key, ticket, host, port, local_port, loop.time())
            self._beginning.leave(line)
            self._apply_events()
            await self._listen(key, line)
        except (OSError, TimeoutError, ValueError) as error:
            log.debug("a line ended", reason=str(error))
        finally:
            self._beginning.leave(line)
            self._lines.pop(key, None)
            self.introducer.handle_closed(key, loop.time())
            self._apply_events()
            raw.close()
        return is_good

    async def _listen(self, key: object, line: _Line) -> None:
        """Pass the data of a line to the introducer until the line ends or is relayed; then wait for the relay."""
        loop = asyncio.get_running_loop()
        while not line.is_over and line.carried is None:
            line.reading = reading = asyncio.ensure_future(loop.sock_recv(line.raw, intro.TICKET_BYTES))
            try:
                await asyncio.wait([reading])
            finally:
                reading.cancel()
            if reading.cancelled() or not (data := reading.result()):
                break
            self.introducer.handle_data(key, data, loop.time())
            self._apply_events()
        if line.carried is not None:
            try:
                await asyncio.wait([line.carried])
            finally:
                line.carried.cancel()

    def _apply_events(self) -> None:
        """Carry out the outputs of the introducer and set the timer."""
        for event in self.introducer.events():
            match event:
                case Say(key, data) if key in self._lines:
                    try:
                        self._lines[key].raw.send(data)
                    except OSError:
                        self._hang_up(self._lines[key])
                case Hang(key) if key in self._lines:
                    self._hang_up(self._lines[key])
                case Joined((first, second)):
                    carrying = asyncio.get_running_loop().create_task(self._relay_pair((first, second)), name="relay")
                    for key in (first, second):
                        if key in self._lines:
                            self._lines[key].carried = carrying
                case _:
                    pass
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self.introducer.next_deadline()) is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._wake)

    @staticmethod
    def _hang_up(line: _Line) -> None:
        line.is_over = True
        if line.reading is not None:
            line.reading.cancel()

    def _wake(self) -> None:
        self.introducer.wake(asyncio.get_running_loop().time())
        self._apply_events()

    async def _relay_pair(self, keys: tuple[object, object]) -> None:
        lines = [self._lines[key] for key in keys if key in self._lines]
        hosts = "-".join(addresses.of_socket(*line.raw.getpeername()[:2]).host for line in lines)
        carried = [0, 0]
        try:
            if len(lines) == len(keys):
                readings = [line.reading for line in lines if line.reading is not None]
                # ``splice`` must be the only reader from here on, or it would miss bytes.
                for reading in readings:
                    reading.cancel()
                await asyncio.gather(*readings, return_exceptions=True)
                log.info("relaying", between=hosts, pairs=self.introducer.relayed_pairs)
                await self.relay.carry(lines[0].raw, lines[1].raw, carried)
        except OSError as error:
            log.debug("a relayed pair failed", reason=str(error))
        finally:
            self.introducer.handle_relay_ended(keys)
            log.info("relayed", between=hosts, bytes=sum(carried))
