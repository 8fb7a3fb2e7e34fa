"""How many lanes a pair has: dialled while there is bulk on a long path, closed when there was none for a while.

Only the side that dialled the primary connection dials lanes and closes them; it sees the bulk of both directions.

Rules of this file:
1. ``lanes_for`` says how many a path wants; a pair without bulk for IDLE_S keeps its primary alone.
2. Dials are bounded: DIALS at once, after failures with growing pauses.
3. Lanes that are closed say goodbye after what they carry; what the other side had on them it sends again elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from math import ceil
from typing import Literal

import msgspec

from p2pdiloco.runtime import logs
from p2pdiloco.runtime.addresses import Address
from p2pdiloco.runtime.connection import Connection
from p2pdiloco.runtime.lanes import LANES_LIMIT
from p2pdiloco.runtime.limits import TransportLimits
from p2pdiloco.runtime.sockets import DialError, Path
from p2pdiloco.runtime.tasks import Tasks
from p2pdiloco.wire.frames import Parting
from p2pdiloco.wire.handshake import Role

log = logs.get("transport")

WINDOW_BYTES = {"bbr": 2.9e6}
OTHER_WINDOW_BYTES = 3.7e6
SPARE = 2.0
"""Measured: 8 were needed where rate x round trip / window is 4 to 5, and 12 to 16 where it is 9 to 11."""
SUPPOSED_BYTES_PER_S = 125e6
"""Where no budget is given."""
DIALS = 4
LOOK_S, PAUSE_MOST_S = 1.0, 60.0
"""Between looks whether a lane is missing or idle; after failures."""

Dial = Callable[[Address, int, bytes], Awaitable[object]]
"""(address, lane, bond)"""


def lanes_for(wanted: int | Literal["auto"], path: Path | None, bytes_per_s: float | None) -> int:
    """Connections for a pair over ``path`` at ``bytes_per_s``: by its length, not by what waits on it."""
    if wanted != "auto":
        return min(max(1, wanted), LANES_LIMIT)
    if path is None or path.is_local:
        return 1
    window_bytes = WINDOW_BYTES.get(path.congestion, OTHER_WINDOW_BYTES)
    held_bytes = SPARE * (bytes_per_s or SUPPOSED_BYTES_PER_S) * path.least_round_trip_s
    return min(max(1, ceil(held_bytes / window_bytes)), LANES_LIMIT)


class Idleness:
    """Tells from a count that only grows whether it has stood still for ``idle_s``."""

    def __init__(self, idle_s: float, now: float) -> None:
        self._idle_s = idle_s
        self._count = 0
        self._grew_at = now

    def look(self, count: int, now: float) -> bool:
        """Whether it stands still since ``idle_s`` at least."""
        if count != self._count:
            self._count, self._grew_at = count, now
        return now - self._grew_at >= self._idle_s


class LaneKeeper:
    """The lanes of the pairs whose primary connection we dialled. ``connections``: all there are; ``rate``: what
    the user says that the link carries, bytes per second (what is measured over too few lanes would keep them few)."""

    def __init__(
        self,
        connections: Iterable[Connection],
        *,
        dial: Dial,
        rate: Callable[[], float | None],
        limits: TransportLimits,
        tasks: Tasks,
    ) -> None:
        self._connections = connections
        self._dial = dial
        self._rate = rate
        self._limits = limits
        self._tasks = tasks

    def bind(self, lane: Connection) -> None:
        """A lane is proved: it belongs to the connection whose dialler's nonce it names."""
        assert lane.local is not None
        assert lane.remote is not None
        bond = (lane.local if lane.role is Role.DIALLER else lane.remote).bond
        for primary in self._connections:
            if primary.is_open and primary.bond == bond and primary.peer == lane.peer and primary.role is lane.role:
                if not lane.become_lane_of(primary):
                    lane.part(Parting.LEAVING, f"{primary.lanes.count} lanes are enough")
                return
        lane.part(Parting.LEAVING, "a lane of a connection that is not here")

    def keep(self, primary: Connection, serves: Callable[[], bool]) -> None:
        """Dial and close lanes of ``primary`` while it ``serves`` its peer."""
        if primary.role is Role.DIALLER and self._limits.lanes != 1:
            self._tasks.spawn(self._keep(primary, serves), name=f"lanes of {primary.peer}")

    def members(self, primary: Connection) -> list[Connection]:
        """``primary`` and its lanes."""
        return [connection for connection in self._connections if connection.primary is primary]

    async def _keep(self, primary: Connection, serves: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        idleness = Idleness(self._limits.lane_idle_s, loop.time())
        numbers = itertools.count(1)
        pause_s = LOOK_S
        while not primary.gone.done():
            is_idle = idleness.look(self._bulk_bytes(primary), loop.time()) and not primary.queued_bytes
            if serves() and primary.is_open:
                if is_idle:
                    self._close(primary)
                elif (count := self._missing(primary)) > 0:
                    if await self._dial_some(primary, min(count, DIALS), numbers):
                        pause_s = LOOK_S
                        continue
                    pause_s = min(2 * pause_s, PAUSE_MOST_S)
            await asyncio.wait([primary.gone], timeout=pause_s)

    def _bulk_bytes(self, primary: Connection) -> int:
        """Of the pair so far. A lane that is lost takes its count away: that is a change too."""
        traffics = [connection.traffic for connection in self.members(primary)]
        return sum(traffic.sent_bulk + traffic.received_bulk for traffic in traffics)

    def _missing(self, primary: Connection) -> int:
        return lanes_for(self._limits.lanes, primary.path(), self._rate()) - primary.lanes.count

    def _close(self, primary: Connection) -> None:
        idle = [lane for lane in self.members(primary) if lane is not primary and lane.is_open]
        for lane in idle:
            lane.part(Parting.LEAVING, "the lane was idle")
        if idle:
            log.debug("idle lanes closed", peer=primary.peer, count=len(idle))

    async def _dial_some(self, primary: Connection, count: int, numbers: itertools.count[int]) -> bool:
        """Whether all came about."""
        target = msgspec.structs.replace(primary.address, peer=primary.peer)

        async def dial() -> None:
            async with asyncio.timeout(self._limits.connection.handshake_s):
                await self._dial(target, next(numbers) % 2**16 or 1, primary.bond)

        done = await asyncio.gather(*(dial() for _ in range(count)), return_exceptions=True)
        failures = [error for error in done if isinstance(error, BaseException)]
        for error in failures:
            if not isinstance(error, DialError | OSError):
                raise error
        if failures:
            log.info("lanes could not be dialled", count=len(failures), reason=str(failures[0]))
        return not failures
