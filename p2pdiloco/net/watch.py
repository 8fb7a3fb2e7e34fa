"""What follows from what the kernel knows of the ways to other peers: lanes, round trips, the learned budget.

Rules of this file:
1. Pure: LookWanted asks, ``saw`` brings what the kernel says.
2. Nothing is asked while nobody needs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from p2pdiloco.net.commons import Commons, Due
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.events import Learned, LookWanted
from p2pdiloco.net.gauge import Gauge
from p2pdiloco.net.handshake import Role
from p2pdiloco.net.lane_keeper import LOOK_S, LaneKeeper
from p2pdiloco.net.limits import TransportLimits, UpBudget
from p2pdiloco.net.path import Path

NEWS = 1.25
"""A change of the learned budget by this factor is told."""


class Watch:
    """See the module's rules. ``connections``: all there are, as they come and go."""

    def __init__(self, commons: Commons, limits: TransportLimits, connections: Mapping[Connection, object]) -> None:
        self._commons = commons
        self._limits = limits
        self._connections = connections
        self._up = limits.up_bytes_per_s
        self._gauge: Gauge[Connection] = Gauge()
        self._gauged_at = float("-inf")
        self._keepers: dict[Connection, LaneKeeper] = {}
        self._kept_at: dict[Connection, float] = {}
        """When each keeper is to look again."""
        self._rounds_at = float("-inf")
        """When round trips were asked for."""
        self._told: float | None = None

    @property
    def chosen_bytes_per_s(self) -> float | None:
        """What the user says that the link carries; None: nothing is said."""
        return self._up if isinstance(self._up, float | int) else self._commons.grants.bytes_per_s

    @property
    def line_bytes_per_s(self) -> float | None:
        """What the link carries upwards, as the user says or as was learned; infinite: all connections stay on this
        machine; None: not known."""
        if self._up != "auto":
            return self._up
        return math.inf if self._gauge.is_local else self._gauge.capacity.estimate

    def set_budget(self, up: UpBudget) -> None:
        """Bytes per second that may be sent, from now on."""
        if up != self._up:
            self._gauge.reset()
        self._up = up
        self._commons.shaper.set_budget(self._gauge.capacity.budget if up == "auto" else up, self._commons.agenda.now)
        self.plan()

    def serves(self, connection: Connection) -> None:
        """``connection`` serves its peer from now on."""
        if connection.role is Role.DIALLER and self._limits.lanes != 1:
            now = self._commons.agenda.now
            self._keepers[connection] = LaneKeeper(connection, self._limits.lanes, self._limits.lane_idle_s, now)
            self._kept_at[connection] = now
        self.plan()

    def forget(self, connection: Connection) -> None:
        """``connection`` serves no more."""
        self._keepers.pop(connection, None)
        self._kept_at.pop(connection, None)

    def lane_dialled(self, primary: Connection, is_there: bool) -> None:
        """A lane that was wanted is proved, or failed."""
        keeper = self._keepers.get(primary)
        if keeper is not None:
            look_again = keeper.dialled(is_there)
            self._kept_at[primary] = self._commons.agenda.now + (0.0 if look_again else keeper.pause_s)
            self.plan()

    def plan(self) -> None:
        """Set the deadline of the next look."""
        times = list(self._kept_at.values())
        if self._up == "auto" and self._connections:
            times.append(self._gauged_at + self._gauge.look_s)
        if self._commons.grants.bytes_per_s is not None and self._connections:
            times.append(self._rounds_at + LOOK_S)
        deadlines = self._commons.agenda.deadlines
        if times:
            deadlines.set(Due.LOOK, min(times))
        else:
            deadlines.cancel(Due.LOOK)

    def look(self) -> None:
        """It is time: ask for what is needed."""
        now = self._commons.agenda.now
        needed = {connection: None for connection, at in self._kept_at.items() if at <= now}
        has_rounds = self._commons.grants.bytes_per_s is not None and self._rounds_at + LOOK_S <= now
        if has_rounds:
            self._rounds_at = now
        if has_rounds or (self._up == "auto" and self._gauged_at + self._gauge.look_s <= now):
            needed |= {connection: None for connection in self._connections if connection.is_proved}
        if needed:
            self._commons.agenda.tell(LookWanted(tuple(needed)))
        elif self._up == "auto":
            self._gauged_at = now
        if not needed:
            self.plan()

    def saw(self, paths: Mapping[Connection, Path]) -> None:
        """What the kernel says; connections of which it says nothing are left out."""
        now = self._commons.agenda.now
        for connection, path in paths.items():
            if connection.conversation.account is not None:
                connection.conversation.account.round_trip_s = path.round_trip_s
        if self._up == "auto" and self._gauged_at + self._gauge.look_s <= now:
            self._gauged_at = now
            if self._gauge.look(paths, lambda connection: connection.has_waiting_bulk, now):
                self._commons.shaper.set_budget(self._gauge.capacity.budget, now)
                self._tell()
        for primary, keeper in list(self._keepers.items()):
            if self._kept_at[primary] <= now:
                self._kept_at[primary] = now + keeper.pause_s
                for wanted in keeper.look(paths.get(primary), self.chosen_bytes_per_s, now):
                    self._commons.agenda.tell(wanted)
        self.plan()

    def _tell(self) -> None:
        estimate, told = self._gauge.capacity.estimate, self._told
        if estimate is not None and (told is None or not told / NEWS < estimate < told * NEWS):
            self._told = estimate
            self._commons.agenda.tell(Learned(estimate))
