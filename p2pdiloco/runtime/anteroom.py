"""Where sockets wait that were accepted: until they have said what they are, and until it is their turn.

Rules of this file:
1. Nothing is made for a stranger before it has said a whole greeting (a TLS ClientHello): a socket and a line in a
   table are all it costs. Whose turn it is then, net/abuse_limits.py says.
2. Who says nothing, says it in crumbs, or something else, is closed; by the first byte others may take what is no
   connection of ours, and say afterwards whether anything came of it.
3. The kernel wakes us for a whole greeting, not for each byte (SO_RCVLOWAT).
4. A machine of which many were turned away, here or by who took them, is shut out for a while, by the kernel where it
   does that (runtime/sieve.py). Handshakes that fail shut nobody out: they are paid from a budget
   (net/abuse_limits.py), and a newcomer may share an address with many.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from p2pdiloco.net.abuse_limits import Exclusion, Reception, Room, machine_of
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.runtime import logs, sieve
from p2pdiloco.runtime.tasks import Tasks

log = logs.get("transport")

ACCEPT_PAUSE_S = 0.2
"""After the machine ran out of file descriptors."""
AT_ONCE = 64
"""Sockets that are accepted before anything else is done."""
HEAD_BYTES = 5
"""Of a TLS record: kind, version, length."""
HANDSHAKE_RECORD = b"\x16\x03"
RECORD_BYTES = 1 << 14
SIEVE_S = 0.1
"""After a machine is shut out: others go with it."""

Taker = Callable[[socket.socket], Awaitable[bool]]
"""Takes, and closes, a socket on which somebody speaks another protocol; whether anything came of it."""


class Visitor:
    """A socket that waits."""

    def __init__(self, raw: socket.socket, host: str, since: float) -> None:
        self.raw = raw
        self.host = host
        self.since = since
        self.wanted_bytes = 0
        """Of which the kernel tells; 0: it is not asked."""


class Anteroom:
    """See the module's rules. ``let_in``: proves who greets, closes the socket if nothing comes of it, and returns
    whether something has. ``turned_away``: is told of each that is closed here: its host and why. ``takers``: by the
    first byte of what is no connection."""

    def __init__(
        self,
        let_in: Callable[[socket.socket], Awaitable[bool]],
        turned_away: Callable[[str, str], None],
        *,
        takers: dict[bytes, Taker],
        limits: TransportLimits,
        tasks: Tasks,
    ) -> None:
        self._let_in = let_in
        self._turned_away = turned_away
        self._takers = takers
        self._wait_s = limits.connection.handshake_s
        self._tasks = tasks
        self._silent: Room[Visitor] = Room(limits.silent)
        self._reception: Reception[Visitor] = Reception(
            per_s=limits.failures_per_s, at_once=limits.failures_at_once, places=limits.silent
        )
        self._exclusion = Exclusion(failures=limits.shut_out_after, time_s=limits.shut_out_s)
        self._sieving: asyncio.TimerHandle | None = None
        """When machines are shut out, or heard again."""
        self._shut_out = 0
        """Machines, when last that was done."""
        self._listeners: set[socket.socket] = set()
        self._turn: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Accept, until cancelled."""
        loop = asyncio.get_running_loop()
        self._listeners.add(listener)
        self._sieve()
        self._resume(listener)
        try:
            await loop.create_future()
        finally:
            self._listeners.discard(listener)
            loop.remove_reader(listener.fileno())
            self._empty()

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(AT_ONCE):
            try:
                raw, where = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                log.warning("cannot accept", error=str(error))
                loop.remove_reader(listener.fileno())
                loop.call_later(ACCEPT_PAUSE_S, self._resume, listener)
                return
            machine, now = machine_of(where[0]), loop.time()
            if self._sieving is not None:
                sieve.lift(raw)
            if self._exclusion.has(machine, now):
                raw.close()
                continue
            raw.setblocking(False)
            visitor = Visitor(raw, where[0], now)
            out = self._silent.enter(visitor, machine)
            if out is not None:
                self._turn_away(out, "it made room for a newcomer: it took long to say what it is")
            if self._sweep is None:
                self._sweep = loop.call_later(self._wait_s, self._look_for_the_slow)
            self._look(visitor)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _look(self, visitor: Visitor) -> None:
        """At what it has said so far."""
        try:
            said = visitor.raw.recv(HEAD_BYTES, socket.MSG_PEEK)
            taker = self._takers.get(said[:1])
            if not said:
                self._turn_away(visitor, "it went without a word")
            elif visitor.wanted_bytes == HEAD_BYTES > len(said):
                self._turn_away(visitor, "it went in the middle of its greeting")
            elif taker is not None:
                self._silent.leave(visitor)
                self._unwatch(visitor)
                self._tasks.spawn(self._give(taker, visitor), name="take one")
            elif not said.startswith(HANDSHAKE_RECORD[: len(said)]):
                self._turn_away(visitor, "what it says is not our TLS")
            elif len(said) < HEAD_BYTES:
                self._await(visitor, HEAD_BYTES)
            elif (length := HEAD_BYTES + int.from_bytes(said[3:5], "big")) > HEAD_BYTES + RECORD_BYTES:
                self._turn_away(visitor, "what it says is not our TLS")
            elif len(visitor.raw.recv(length, socket.MSG_PEEK)) == length:
                self._greets(visitor)
            elif visitor.wanted_bytes == length:
                self._turn_away(visitor, "it went in the middle of its greeting")
            else:
                self._await(visitor, length)
        except BlockingIOError:
            self._await(visitor, 1)
        except OSError as error:
            self._turn_away(visitor, str(error))

    def _await(self, visitor: Visitor, wanted_bytes: int) -> None:
        if wanted_bytes > 1:
            visitor.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted_bytes)
        if not visitor.wanted_bytes:
            asyncio.get_running_loop().add_reader(visitor.raw.fileno(), self._look, visitor)
        visitor.wanted_bytes = wanted_bytes

    def _unwatch(self, visitor: Visitor) -> None:
        if visitor.wanted_bytes:
            visitor.wanted_bytes = 0
            asyncio.get_running_loop().remove_reader(visitor.raw.fileno())

    def _greets(self, visitor: Visitor) -> None:
        self._silent.leave(visitor)
        self._unwatch(visitor)
        out = self._reception.room.enter(visitor, machine_of(visitor.host))
        if out is not None:
            self._turn_away(out, "it made room for a newcomer: too many greet at once")
        self._next()

    def _next(self) -> None:
        """Answer whose turn it is."""
        loop = asyncio.get_running_loop()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        while (visitor := self._reception.next(loop.time())) is not None:
            self._tasks.spawn(self._answer(visitor), name="accept one")
        due_s = self._reception.due(loop.time())
        if due_s is not None:
            self._turn = loop.call_later(due_s, self._next)

    async def _answer(self, visitor: Visitor) -> None:
        with suppress(OSError):
            visitor.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        is_proved = False
        try:
            is_proved = await self._let_in(visitor.raw)
        finally:
            now = asyncio.get_running_loop().time()
            self._reception.ended(machine_of(visitor.host), now, is_proved=is_proved)
        self._next()

    async def _give(self, taker: Taker, visitor: Visitor) -> None:
        if not await taker(visitor.raw):
            self._came_to_nothing(visitor)

    def _look_for_the_slow(self) -> None:
        loop = asyncio.get_running_loop()
        too_long = loop.time() - self._wait_s
        for room, why in (
            (self._silent, f"it said nothing whole for {self._wait_s:.0f} s"),
            (self._reception.room, "too many greet at once"),
        ):
            for visitor in [visitor for visitor in room.holders if visitor.since <= too_long]:
                self._turn_away(visitor, why)
        since = [visitor.since for room in (self._silent, self._reception.room) for visitor in room.holders]
        self._sweep = loop.call_at(min(since) + self._wait_s, self._look_for_the_slow) if since else None

    def _turn_away(self, visitor: Visitor, why: str) -> None:
        self._silent.leave(visitor)
        self._reception.room.leave(visitor)
        self._unwatch(visitor)
        visitor.raw.close()
        self._turned_away(visitor.host, why)
        self._came_to_nothing(visitor)

    def _came_to_nothing(self, visitor: Visitor) -> None:
        loop, machine = asyncio.get_running_loop(), machine_of(visitor.host)
        if self._exclusion.failed(machine, loop.time()):
            soon = loop.time() + SIEVE_S
            if self._sieving is not None and self._sieving.when() > soon:
                self._sieving.cancel()
                self._sieving = None
            self._sieving = self._sieving or loop.call_at(soon, self._sieve)

    def _sieve(self) -> None:
        """Shut out who is to be, and have who was be heard again."""
        loop = asyncio.get_running_loop()
        machines = self._exclusion.machines(loop.time())
        by_kernel = [sieve.close_to(listener, machines) for listener in self._listeners]
        if len(machines) > self._shut_out:
            log.warning(
                "machines are not heard for a while: what came from them said nothing",
                number=len(machines),
                last=machines[-1],
                by="the kernel" if all(by_kernel) else "us, one by one",
            )
        self._shut_out = len(machines)
        ends = self._exclusion.ends()
        self._sieving = None if ends is None else loop.call_at(ends, self._sieve)

    def _empty(self) -> None:
        for timer in (self._turn, self._sweep, self._sieving):
            if timer is not None:
                timer.cancel()
        self._turn = self._sweep = self._sieving = None
        for room in (self._silent, self._reception.room):
            for visitor in list(room.holders):
                room.leave(visitor)
                self._unwatch(visitor)
                visitor.raw.close()
