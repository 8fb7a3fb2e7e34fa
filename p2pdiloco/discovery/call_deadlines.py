"""Deadlines of calls to other nodes of the directory, from measured round trips. No clock, no I/O.

Rules of this file:
1. A deadline grows with the node's round trip and its variation (RFC 6298), and has room for one lost packet: its
   repetition takes a further round trip.
2. The deadline of a node that was never measured follows the median of the others: over a satellite link, all are far.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable

from p2pdiloco.protocol.membership import smoothed

# Bounds of a deadline. With a floor of 3 s, a store took 10 s if every third node was frozen.
LEAST_S, MOST_S = 0.7, 8.0
# Maximum number of nodes that are remembered; the one that was not measured for longest is forgotten first.
NODES_LIMIT = 512


class CallDeadlines:
    """Round trips to other nodes, and the deadlines that follow from them."""

    def __init__(self) -> None:
        # Mean and variation for each node.
        self._round_trips: dict[Hashable, tuple[float, float]] = {}

    @property
    def typical_s(self) -> float:
        """Median of the round trips; 0 if none was measured."""
        means = [mean_s for mean_s, _ in self._round_trips.values()]
        return statistics.median(means) if means else 0.0

    def deadline_s(self, node: Hashable) -> float:
        """Return how many seconds a call to ``node`` may take."""
        typical_s = self.typical_s
        mean_s, variation_s = self._round_trips.get(node, (typical_s, typical_s / 2))
        return min(MOST_S, LEAST_S + 2 * mean_s + 4 * variation_s)

    def record(self, node: Hashable, took_s: float) -> None:
        """Record that ``node`` has answered a call in ``took_s``."""
        self._round_trips[node] = smoothed(*self._round_trips.pop(node, (0.0, 0.0)), took_s)
        while len(self._round_trips) > NODES_LIMIT:
            del self._round_trips[next(iter(self._round_trips))]
