"""What this process may send and be sent: set by the user, or (up) learned from what the kernel says was delivered.

Rules of this file:
1. "auto" counts acknowledged bytes of all connections but those that stay on this machine: they have no link. Kernels
   that do not tell them (all but Linux) leave the budget open.
2. The receiver's budget is not learned: senders slow down by what they see delivered.
3. While nothing waits, this looks IDLE_LOOK_S apart and measures nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Literal, Protocol

from p2pdiloco.runtime import logs
from p2pdiloco.runtime.crediting import Crediting
from p2pdiloco.runtime.limits import TransportLimits
from p2pdiloco.runtime.shaping import Shaper
from p2pdiloco.runtime.sockets import Path
from p2pdiloco.wire.capacity import Capacity
from p2pdiloco.wire.credit import Granter

log = logs.get("transport")

WINDOW_S, WINDOW_ROUND_TRIPS = 0.1, 4
"""A window is the longer of the two, so that what was changed at its beginning shows in it."""
LOOKS = 4
"""At the queues, in a window."""
IDLE_LOOK_S = 0.25
NEWS = 1.25
"""A change of the estimate by this factor is told."""

UpBudget = float | Literal["auto"] | None


class Measured(Protocol):
    """A connection, as seen from here."""

    def __hash__(self) -> int: ...

    def path(self) -> Path | None:
        """What the kernel knows of it."""

    @property
    def has_waiting_bulk(self) -> bool:
        """The link, and not the other side, is what it waits for."""


class Budgets:
    """See the module's rules. ``connections`` are all there are, as they come and go."""

    def __init__(self, limits: TransportLimits, connections: Collection[Measured]) -> None:
        self._connections = connections
        self._up = limits.up_bytes_per_s
        self.capacity = Capacity()
        self.shaper = Shaper(None if limits.up_bytes_per_s == "auto" else limits.up_bytes_per_s)
        self.crediting = Crediting(
            Granter(
                window_bytes=limits.connection.window_bytes,
                total_bytes=limits.window_bytes,
                bytes_per_s=limits.down_bytes_per_s,
            )
        )
        self._told: float | None = None

    @property
    def chosen_bytes_per_s(self) -> float | None:
        """What the user says that the link carries; None: nothing is said."""
        return self._up if isinstance(self._up, float | int) else self.crediting.bytes_per_s

    def set(self, up_bytes_per_s: UpBudget, down_bytes_per_s: float | None) -> None:
        """From now on."""
        self._up = up_bytes_per_s
        self.shaper.set_budget(self.capacity.budget if up_bytes_per_s == "auto" else up_bytes_per_s)
        self.crediting.set_budget(down_bytes_per_s)

    async def measure(self) -> None:
        """Keep the learned budget up to date, until cancelled."""
        while True:
            if self._up != "auto" or not self._is_busy(self._paths()):
                await asyncio.sleep(IDLE_LOOK_S)
                continue
            await self._measure_once()

    async def _measure_once(self) -> None:
        loop = asyncio.get_running_loop()
        paths = self._paths()
        start, is_busy = loop.time(), True
        round_trip_s = max(path.round_trip_s for path in paths.values())
        for _ in range(LOOKS):
            await asyncio.sleep(max(WINDOW_S, WINDOW_ROUND_TRIPS * round_trip_s) / LOOKS)
            is_busy &= self._is_busy(paths)
        now_paths = self._paths()
        delivered = sum((now_paths[c].acked_bytes or 0) - (paths[c].acked_bytes or 0) for c in paths if c in now_paths)
        if self._up != "auto" or any(connection not in now_paths for connection in paths):
            return
        self.capacity.saw(delivered, loop.time() - start, is_busy=is_busy)
        self.shaper.set_budget(self.capacity.budget)
        self._tell()

    def _paths(self) -> dict[Measured, Path]:
        """Of the connections that have a link whose deliveries the kernel counts."""
        found = {connection: connection.path() for connection in list(self._connections)}
        return {c: path for c, path in found.items() if path and not path.is_local and path.acked_bytes is not None}

    def _is_busy(self, paths: dict[Measured, Path]) -> bool:
        return any(connection.has_waiting_bulk for connection in paths)

    def _tell(self) -> None:
        estimate, told = self.capacity.estimate, self._told
        if estimate is not None and (told is None or not told / NEWS < estimate < told * NEWS):
            self._told = estimate
            log.info("measured what the link up carries", mbit_per_s=round(estimate * 8 / 1e6, 1))
