"""Carries bytes between two sockets, unread, within a budget that all pairs share.

Rules of this file:
1. ``splice`` moves them inside the kernel: they never come into this process (measured: docs/connectivity.md).
2. Whoever wants to send takes its turn, and turns come round: of n directions that have something, each gets an n-th of
   the budget. What TICK_S is worth goes at once and is earned afterwards: most of a turn's cost is that of waking up.
3. What is small does not wait for others' turns, now and then: heartbeats and requests of one pair do not stand behind
   another's bulk. It is paid for all the same.
4. A direction that ends is passed on as an end; the pair is over when both have.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

F_SETPIPE_SZ = 1031
LARGEST_BYTES = 1 << 20
SMALL_BYTES = 16 << 10
TICK_S = 0.3
"""What goes at once is worth so much; a single turn never more."""
ROUND_S = 0.8
SHORTEST_TURN_S = 0.02
AHEAD_S = 0.05
"""Between two small pieces of one direction that do not wait."""
MOST_DEBT_S = 0.75
"""Beyond which what is small waits, too; turns owe less than two TICK_S."""
BURST_S = 0.02
"""What an idle budget saves up."""


class Budget:
    """Bytes per second; None: no limit. Turns are taken in the order in which they were asked for."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        """When what was taken will have been earned."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._sharing = 0
        """How many waited when turns were last given."""

    @property
    def turn_bytes(self) -> int:
        """How much to take at a time."""
        if self._bytes_per_s is None:
            return LARGEST_BYTES
        sharing = max(1, self._sharing, len(self._waiting))
        turn_s = min(TICK_S, max(SHORTEST_TURN_S, ROUND_S / sharing))
        return min(LARGEST_BYTES, max(SMALL_BYTES, int(self._bytes_per_s * turn_s)))

    def take_ahead(self, count: int) -> bool:
        """Take ``count`` bytes without waiting, if too much is not owed."""
        if self._bytes_per_s is None:
            return True
        now = asyncio.get_running_loop().time()
        if self._free_at - now > MOST_DEBT_S:
            return False
        self._owe(count, now)
        return True

    async def take(self, count: int) -> None:
        """Wait until ``count`` bytes may go."""
        if self._bytes_per_s is None:
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_at(self._free_at, self._give_turns)
        self._waiting.append((count, turn))
        await turn

    def _give_turns(self) -> None:
        """As many as TICK_S is worth, to who has waited longest; the others when these are earned."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._sharing = len(self._waiting)
        while self._waiting and self._free_at < now + TICK_S:
            count, turn = self._waiting.popleft()
            if not turn.done():
                self._owe(count, now)
                turn.set_result(None)
        if self._waiting:
            loop.call_at(self._free_at, self._give_turns)

    def _owe(self, count: int, now: float) -> None:
        assert self._bytes_per_s is not None
        self._free_at = max(self._free_at, now - BURST_S) + count / self._bytes_per_s


class Relay:
    """See the module's rules."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._budget = Budget(bytes_per_s)
        self.carried_bytes = 0

    async def carry(self, a: socket.socket, b: socket.socket, carried: list[int]) -> None:
        """Until both directions have ended, or one has failed. ``carried``: bytes from each so far, kept up here. The
        sockets are not blocking; the caller closes them."""
        ways = [asyncio.create_task(self._pump(a, b, carried, 0)), asyncio.create_task(self._pump(b, a, carried, 1))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, source: socket.socket, target: socket.socket, carried: list[int], side: int) -> None:
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # beyond what this user's pipes may hold: smaller pieces
            fcntl.fcntl(writer, F_SETPIPE_SZ, LARGEST_BYTES)
        loop, ahead_at = asyncio.get_running_loop(), 0.0
        try:
            while count := await _splice(source.fileno(), writer, self._budget.turn_bytes, source.fileno()):
                is_ahead = count <= SMALL_BYTES and loop.time() - ahead_at >= AHEAD_S
                if is_ahead and self._budget.take_ahead(count):
                    ahead_at = loop.time()
                else:
                    await self._budget.take(count)
                self.carried_bytes += count
                carried[side] += count
                while count:
                    count -= await _splice(reader, target.fileno(), count, target.fileno(), writes=True)
            target.shutdown(socket.SHUT_WR)
        finally:
            os.close(reader)
            os.close(writer)


async def _splice(source: int, target: int, count: int, awaited: int, *, writes: bool = False) -> int:
    """Bytes moved; 0: the source has ended. ``awaited``: the socket of the two."""
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
