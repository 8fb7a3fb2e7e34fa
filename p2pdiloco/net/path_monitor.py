"""Decisions from the kernel's measurements of paths to other peers: lanes, round trips, the learned budget.

Rules of this file:
1. The module is pure: PathInfoWanted asks for measurements, ``handle_paths`` takes them.
2. Nothing is asked for while nothing needs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import ceil
from typing import Literal

from p2pdiloco.net.bandwidth import DeliveryRateSampler, Path
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.context import Due, EndpointContext
from p2pdiloco.net.events import ConnectionId, LaneWanted, PathInfoWanted, UplinkMeasured
from p2pdiloco.net.frames import GoodbyeCode
from p2pdiloco.net.handshake import Role
from p2pdiloco.net.limits import TransportLimits, UpBudget
from p2pdiloco.net.multipath import LANES_LIMIT
from p2pdiloco.timing import Backoff

# -- Number of lanes ---------------------------------------------------------------------------------------------------
# The longer a pair's path, the more lanes the pair has. Lanes are dialled while there is bulk data, and closed after a
# while without any. The primary stays.
#
# 1. Dials are bounded: DIALS at once, with growing pauses after failures.
# 2. A closing lane says goodbye after the data that it carries. The other side sends what it had queued on the lane
#    again on other lanes.


WINDOW_BYTES = {"bbr": 2.9e6}
OTHER_WINDOW_BYTES = 3.7e6
SPARE = 2.0
"""Measured: 8 were needed where rate x round trip / window is 4 to 5, and 12 to 16 where it is 9 to 11."""
SUPPOSED_BYTES_PER_S = 125e6
"""Assumed rate where no budget is given."""
DIALS = 4
LOOK_S, PAUSE_MOST_S = 1.0, 60.0
"""Usual and longest interval between checks for missing or idle lanes; it grows after failures."""


def lanes_for(wanted: int | Literal["auto"], path: Path | None, bytes_per_s: float | None) -> int:
    """Return the number of connections that a pair needs over ``path`` at ``bytes_per_s``.

    It depends on the length of the path, not on the amount of queued data.
    """
    if wanted != "auto":
        return min(max(1, wanted), LANES_LIMIT)
    if path is None or path.is_local:
        return 1
    window_bytes = WINDOW_BYTES.get(path.congestion, OTHER_WINDOW_BYTES)
    held_bytes = SPARE * (bytes_per_s or SUPPOSED_BYTES_PER_S) * path.least_round_trip_s
    return min(max(1, ceil(held_bytes / window_bytes)), LANES_LIMIT)


class Idleness:
    """Detects that a growing count has stood still for ``idle_s`` seconds."""

    def __init__(self, idle_s: float, now: float) -> None:
        self._idle_s = idle_s
        self._count = 0
        self._grew_at = now

    def update(self, count: int, now: float) -> bool:
        """Take the count as of now. Return whether it has stood still for ``idle_s`` seconds."""
        if count != self._count:
            self._count, self._grew_at = count, now
        return now - self._grew_at >= self._idle_s


class LaneKeeper:
    """Lanes of a pair whose primary connection this peer dialled. Call ``plan_lanes`` after each ``backoff`` pause."""

    def __init__(
        self,
        primary: Connection,
        connections: Mapping[ConnectionId, Connection],
        wanted: int | Literal["auto"],
        idle_s: float,
        now: float,
    ) -> None:
        """``connections`` are all connections of the endpoint, the pair's lanes among them."""
        self._primary = primary
        self._connections = connections
        self._wanted = wanted
        self._idleness = Idleness(idle_s, now)
        self._dialled = 0
        self._failed = False
        self._number = 0
        self.backoff = Backoff(LOOK_S, PAUSE_MOST_S)

    def plan_lanes(self, path: Path | None, bytes_per_s: float | None, now: float) -> list[LaneWanted]:
        """Close idle lanes and return the lanes to dial.

        ``bytes_per_s`` is the link's rate as set by the user. (An estimate over too few lanes would keep them few.)
        """
        primary, session = self._primary, self._primary.session
        is_idle = self._idleness.update(self._bulk_bytes(), now) and not session.queued_bytes
        if not primary.is_open or self._dialled:
            return []
        if is_idle:
            for lane in session.lanes.members:
                if lane is not session:
                    self._connections[lane.connection].close(GoodbyeCode.LEAVING, "the lane was idle")
            return []
        if primary.greeting.is_relayed:
            return []  # a relay carries one connection of a pair
        missing = lanes_for(self._wanted, path, bytes_per_s) - len(session.lanes.members)
        self._dialled, self._failed = max(0, min(missing, DIALS)), False
        return [self._next_lane() for _ in range(self._dialled)]

    def handle_dialled(self, is_there: bool) -> bool:
        """Record the result of dialling a lane. Return whether to look for missing lanes again at once."""
        self._dialled -= 1
        self._failed |= not is_there
        if self._dialled:
            return False
        if self._failed:
            self.backoff.next_s()
        else:
            self.backoff.reset()
        return not self._failed

    def _bulk_bytes(self) -> int:
        """Return the bulk bytes of the pair so far. A lost lane takes its count away, which is a change, too."""
        traffics = [lane.traffic for lane in self._primary.session.lanes.members]
        return sum(traffic.sent_bulk + traffic.received_bulk for traffic in traffics)

    def _next_lane(self) -> LaneWanted:
        self._number = self._number % (2**16 - 1) + 1
        return LaneWanted(self._primary.id, self._number, self._primary.greeting.nonce)


# -- Path monitor ------------------------------------------------------------------------------------------------------


NEWS = 1.25
"""A change of the estimate by this factor is reported."""


class PathMonitor:
    """Asks for the kernel's measurements of the connections, and acts on them; see the module's rules.

    ``connections`` is the endpoint's table of all connections.
    """

    def __init__(
        self, context: EndpointContext, limits: TransportLimits, connections: Mapping[ConnectionId, Connection]
    ) -> None:
        self._context = context
        self._limits = limits
        self._connections = connections
        self._up = limits.up_bytes_per_s
        self._sampler: DeliveryRateSampler[ConnectionId] = DeliveryRateSampler()
        self._gauged_at = float("-inf")
        self._keepers: dict[ConnectionId, LaneKeeper] = {}
        self._kept_at: dict[ConnectionId, float] = {}
        """Time of each keeper's next look."""
        self._rounds_at = float("-inf")
        """Time at which round trips were last asked for."""
        self._told: float | None = None

    @property
    def chosen_bytes_per_s(self) -> float | None:
        """Upload rate of the link as set by the user; None if it is not set."""
        return self._up if isinstance(self._up, float | int) else self._context.grants.bytes_per_s

    @property
    def line_bytes_per_s(self) -> float | None:
        """Upload rate of the link, set by the user or measured; None if unknown.

        It is infinite if all connections are within this machine.
        """
        if self._up != "auto":
            return self._up
        return math.inf if self._sampler.is_local else self._sampler.estimator.estimate

    def set_budget(self, up: UpBudget) -> None:
        """Set the upload budget."""
        if up != self._up:
            self._sampler.reset()
        self._up = up
        self._context.shaper.set_budget(self._sampler.estimator.budget if up == "auto" else up, self._context.now)
        self.schedule()

    def add_serving(self, connection: Connection) -> None:
        """Monitor a connection that serves its peer from now on."""
        if connection.role is Role.DIALLER and self._limits.lanes != 1:
            self._keepers[connection.id] = LaneKeeper(
                connection, self._connections, self._limits.lanes, self._limits.lane_idle_s, self._context.now
            )
            self._kept_at[connection.id] = self._context.now
        self.schedule()

    def remove(self, connection: ConnectionId) -> None:
        """Forget a connection that no longer serves."""
        self._keepers.pop(connection, None)
        self._kept_at.pop(connection, None)

    def handle_lane_dialled(self, primary: ConnectionId, is_there: bool) -> None:
        """Record the result of dialling a lane that LaneWanted asked for."""
        keeper = self._keepers.get(primary)
        if keeper is not None:
            look_again = keeper.handle_dialled(is_there)
            self._kept_at[primary] = self._context.now + (0.0 if look_again else keeper.backoff.pause_s)
            self.schedule()

    def schedule(self) -> None:
        """Set the deadline of the next measurement."""
        times = list(self._kept_at.values())
        if self._up == "auto" and self._connections:
            times.append(self._gauged_at + self._sampler.interval_s)
        if self._context.grants.bytes_per_s is not None and self._connections:
            times.append(self._rounds_at + LOOK_S)
        deadlines = self._context.deadlines
        if times:
            deadlines.set(Due.PATH_INFO, min(times))
        else:
            deadlines.cancel(Due.PATH_INFO)

    def request_paths(self) -> None:
        """Ask for the kernel's measurements of the connections for which that is due."""
        now = self._context.now
        needed = {connection: None for connection, at in self._kept_at.items() if at <= now}
        has_rounds = self._context.grants.bytes_per_s is not None and self._rounds_at + LOOK_S <= now
        if has_rounds:
            self._rounds_at = now
        if has_rounds or (self._up == "auto" and self._gauged_at + self._sampler.interval_s <= now):
            proved = [found.id for found in self._connections.values() if found.is_proved and not found.is_lost]
            needed |= dict.fromkeys(proved)
        if needed:
            self._context.emit(PathInfoWanted(tuple(needed)))
        elif self._up == "auto":
            self._gauged_at = now
        if not needed:
            self.schedule()

    def handle_paths(self, paths: Mapping[ConnectionId, Path]) -> None:
        """Take the kernel's measurements, of the connections that have any."""
        now = self._context.now
        for connection, path in paths.items():
            found = self._connections.get(connection)
            if found is not None and found.session.account is not None:
                found.session.account.round_trip_s = path.round_trip_s
        if self._up == "auto" and self._gauged_at + self._sampler.interval_s <= now:
            self._gauged_at = now
            if self._sampler.sample(paths, self._has_waiting_bulk, now):
                self._context.shaper.set_budget(self._sampler.estimator.budget, now)
                self._emit_estimate()
        for primary, keeper in list(self._keepers.items()):
            if self._kept_at[primary] <= now:
                self._kept_at[primary] = now + keeper.backoff.pause_s
                for wanted in keeper.plan_lanes(paths.get(primary), self.chosen_bytes_per_s, now):
                    self._context.emit(wanted)
        self.schedule()

    def _has_waiting_bulk(self, connection: ConnectionId) -> bool:
        found = self._connections.get(connection)
        return found is not None and found.has_waiting_bulk

    def _emit_estimate(self) -> None:
        estimate, told = self._sampler.estimator.estimate, self._told
        if estimate is not None and (told is None or not told / NEWS < estimate < told * NEWS):
            self._told = estimate
            self._context.emit(UplinkMeasured(estimate))
