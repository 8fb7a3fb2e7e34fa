"""Islands of chips that fail: the share of its time that an island computes, by simulation.

    python -m benchmarks.scale.islands            # fit the constants again

1. Chips fail independently (Poisson), or in whole racks. Times of detection, restart and repair are drawn from an
   exponentiated Weibull; the paper gives the family and no constants.
2. An *elastic* island stops briefly and continues without the slice of the failed chip. A repaired slice is taken in at
   the next stop, or at one of its own if none comes for a while. Other islands stop until everything runs again from
   the last checkpoint.
3. Failures during a stop are handled in the same stop.
4. The constants are fitted to the paper's two data-parallel rows and to nothing else.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from itertools import product
from math import log
from random import Random
from typing import NamedTuple

YEAR_S = 365.25 * 86400.0
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
DATA_PARALLEL = (72, 57, 38, 27, 18)
ELASTIC = (88, 80, 69, 58, 40)
DECOUPLED = {2: (94, 88, 80, 70, 54), 4: (96, 93, 89, 82, 73), 8: (98, 96, 94, 88, 80), 16: (99, 98, 96, 93, 86)}
"""Goodput in %, by chips, a year between two failures of a chip: arXiv 2604.21428."""


AGE_REPAIRS = 5
"""At time 0 an island is so many mean repairs old: slices are away, and others come back."""


class Constants(NamedTuple):
    """Of an island. Times are means, in seconds."""

    restart_s: float = 77.0
    """Of data parallel: noticed, restarted, and what was computed since the checkpoint computed again. Fitted."""
    pause_s: float = 18.0
    """Of elastic data parallel, on each shrinking and each growing: noticed, resharded. Fitted."""
    growth_s: float = 90.0
    """How long a slice that is back waits for a stop in which it is taken in. Fitted."""
    repair_s: float = 3600.0
    """Until a slice is back. Assumed; with slices of this size 0.7 % of the chips are away."""
    slice_chips: int = 64
    """Chips that leave with one of them. Assumed; only its product with ``repair_s`` matters."""
    chip_year_s: float = YEAR_S
    """Between two failures of a chip (the paper)."""
    rack_chips: int = 64
    racks_year_s: float = float("inf")
    """Between two failures of a rack, which takes the slices of all its chips at once. Not in the paper's table."""


def drawn_s(random: Random, mean_s: float) -> float:
    """Exponentiated Weibull, shape 1.5, power 2 (ours: few short ones, a tail): its mean is 1.2416 times its scale."""
    u = random.random() ** 0.5
    return float(mean_s / 1.2416 * (-log(1.0 - u)) ** (1 / 1.5)) if u < 1.0 else mean_s


class Island:
    """One island's life, made as far as it is asked for."""

    def __init__(self, random: Random, chips: int, constants: Constants, *, is_elastic: bool = True) -> None:
        self.random = random
        self.chips = chips
        self.constants = constants
        self.is_elastic = is_elastic
        self.failures = 0
        self._out: list[tuple[float, int]] = []
        """A heap of repairs, with the slices that come back."""
        self._slices_out = 0
        self._slices_back = 0
        self._growth_at = float("inf")
        """When those that are back are taken in at the latest."""
        self._paused_until = 0.0
        began_at = -AGE_REPAIRS * constants.repair_s
        self._failure_at = self._next_failure(began_at)
        self._starts = [began_at]
        self._rates = [1.0]

    def _next_failure(self, now: float) -> float:
        c = self.constants
        a_second = self.chips / c.chip_year_s + self.chips / c.rack_chips / c.racks_year_s
        return now + self.random.expovariate(a_second)

    def _slices_hit(self) -> int:
        c = self.constants
        racks = self.chips / c.rack_chips / c.racks_year_s
        is_rack = racks > 0 and self.random.random() < racks / (racks + self.chips / c.chip_year_s)
        return -(-c.rack_chips // c.slice_chips) if is_rack else 1

    def _pause(self, now: float, mean_s: float) -> None:
        if now >= self._paused_until:
            self._paused_until = now + drawn_s(self.random, mean_s)
        self._slices_out -= self._slices_back
        self._slices_back, self._growth_at = 0, float("inf")

    def _grow(self) -> None:
        """Make the next piece of its life."""
        now, c = self._starts[-1], self.constants
        repair_at = self._out[0][0] if self._out else float("inf")
        end_at = self._paused_until if self._paused_until > now else float("inf")
        at = min(self._failure_at, repair_at, self._growth_at, end_at)
        if at == self._failure_at:
            self.failures += 1
            self._failure_at = self._next_failure(at)
            self._pause(at, c.pause_s if self.is_elastic else c.restart_s)
            if self.is_elastic:
                hit = self._slices_hit()
                self._slices_out += hit
                heapq.heappush(self._out, (at + drawn_s(self.random, c.repair_s), hit))
        elif at == repair_at:
            self._slices_back += heapq.heappop(self._out)[1]
            self._growth_at = min(self._growth_at, at + c.growth_s)
        elif at == self._growth_at:
            self._pause(at, c.pause_s)
        share = max(0.0, 1.0 - self._slices_out * c.slice_chips / self.chips)
        self._starts.append(at)
        self._rates.append(0.0 if at < self._paused_until else share)

    def pace(self, now: float, work_s: float) -> float:
        """How long work takes that needs ``work_s`` of the whole island and begins now."""
        at, left = now, work_s
        piece = self._piece(at)
        while True:
            if piece + 1 == len(self._starts):
                self._grow()
            able = self._rates[piece] * (self._starts[piece + 1] - at)
            if able >= left:
                return at + left / self._rates[piece] - now
            left -= able
            piece += 1
            at = self._starts[piece]

    def _piece(self, at: float) -> int:
        while self._starts[-1] <= at:
            self._grow()
        return bisect_right(self._starts, at) - 1

    def rate(self, at: float) -> float:
        """The share of its chips that compute then."""
        return self._rates[self._piece(at)]

    def _pieces(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """Rates and durations."""
        for piece in range(self._piece(start), self._piece(end) + 1):
            until = self._starts[piece + 1] if piece + 1 < len(self._starts) else end
            yield self._rates[piece], min(until, end) - max(self._starts[piece], start)

    def computed_s(self, start: float, end: float) -> float:
        """Seconds of the whole island that it computes."""
        return sum(rate * seconds for rate, seconds in self._pieces(start, end))

    def running_s(self, start: float, end: float) -> float:
        """Seconds in which it computes at all."""
        return sum(seconds for rate, seconds in self._pieces(start, end) if rate > 0)


def alone(chips: int, constants: Constants, *, is_elastic: bool, failures: int, seed: int = 1) -> dict[str, float]:
    """One island of all chips for as long as so many of them fail: a data-parallel row's cell. Shares, not %."""
    island = Island(Random(f"{seed} {chips}"), chips, constants, is_elastic=is_elastic)
    end = failures * constants.chip_year_s / chips
    goodput, uptime = island.computed_s(0.0, end) / end, island.running_s(0.0, end) / end
    return {"goodput": goodput, "uptime": uptime, "failures": island.failures}


def row(constants: Constants, *, is_elastic: bool, failures: int, seed: int = 1) -> list[float]:
    """Goodput in %, by ``CHIPS``."""
    cells = (alone(n, constants, is_elastic=is_elastic, failures=failures, seed=seed) for n in CHIPS)
    return [100 * cell["goodput"] for cell in cells]


def worst(found: list[float], published: tuple[int, ...]) -> float:
    """Points by which a row is off at most."""
    return max(abs(a - b) for a, b in zip(found, published, strict=True))


def fit(failures: int = 3000) -> Constants:
    """The constants with the smallest largest error over the two data-parallel rows."""
    base = Constants()
    restarts = [base._replace(restart_s=float(s)) for s in range(50, 111, 3)]
    pauses = [base._replace(pause_s=float(p), growth_s=float(g)) for p, g in product(range(14, 26), range(0, 241, 30))]
    best = min(restarts, key=lambda c: worst(row(c, is_elastic=False, failures=failures), DATA_PARALLEL))
    bent = min(pauses, key=lambda c: worst(row(c, is_elastic=True, failures=failures), ELASTIC))
    return base._replace(restart_s=best.restart_s, pause_s=bent.pause_s, growth_s=bent.growth_s)


def main() -> None:
    """Fit, and say how well."""
    for name, constants in (("as they are", Constants()), ("fitted anew", fit())):
        print(name, constants)
        for is_elastic, published in ((False, DATA_PARALLEL), (True, ELASTIC)):
            found = row(constants, is_elastic=is_elastic, failures=5000)
            print([round(x, 1) for x in found], published, f"{worst(found, published):.1f} points at most")


if __name__ == "__main__":
    main()
