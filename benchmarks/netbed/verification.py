"""Whether a testbed is what its file says: every line both ways and every path, measured and judged.

Rules of this file:
1. A rate or a median round trip may be off by 5 % (a round trip by 1 ms, if that is more). Jitter and loss are random:
   what 5 % allow is widened by what chance explains (three standard deviations of such a sample; four for losses).
2. A line is measured against all other sites at once, so that no other line limits it if that can be. Where all others
   together are slower, the line is judged up to their rate, and the check says so.
3. Jitter is judged by quartiles, and what is off is measured up to twice more: on a machine that others use, too,
   single packets come late and single measurements are cut short, whatever the link is.
4. Who reports anything about a testbed calls ``must_agree`` first, before every series.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Literal

import msgspec

from benchmarks.netbed.measure import SMALL_WIRE_BYTES, Flow, arriving, losses, round_trips
from benchmarks.netbed.namespaces import TestbedError
from benchmarks.netbed.testbed import Testbed
from benchmarks.netbed.topology import Topology, rate_text

TOLERANCE = 0.05
ROUND_TRIP_S = 0.001
JITTER_S = 0.0005
OFFERED = 1.15
"""Times what is expected to arrive."""
ECHOES = 20
ECHOES_WITH_JITTER = 120
QUARTILES_OF_JITTER = 2 * (2 - math.sqrt(2))
"""How far apart the quartiles of a sum of two delays are that are uniform within plus or minus 1."""
ATTEMPTS = 3
INTERVAL_S = 0.03
LOSS_S = 2.0
LOSS_PACKETS_PER_S = 15_000
"""Of all flows together: what Python sends."""
LOSS_SHARE = 0.2
"""Of a line, while losses are counted."""

Kind = Literal["up", "down", "round trip", "jitter", "loss"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was asked for, and what was measured."""

    kind: Kind
    where: str
    wanted: float
    measured: float
    allowed: float
    """How far apart they may be."""
    note: str = ""

    @property
    def is_right(self) -> bool:
        """Whether they agree."""
        return abs(self.measured - self.wanted) <= self.allowed

    @property
    def error(self) -> float:
        """Relative; 0 where nothing was asked for."""
        return self.measured / self.wanted - 1 if self.wanted else 0.0

    def sentence(self) -> str:
        """Both figures."""
        off = f" ({self.error:+.1%})" if self.wanted else ""
        note = f"; {self.note}" if self.note else ""
        measured, wanted = (_figure(self.kind, value) for value in (self.measured, self.wanted))
        return f"{self.kind} {self.where}: {measured} for {wanted}{off}{note}"


class LinkOffError(TestbedError):
    """A link is not what was asked for: nothing may be reported."""

    def __init__(self, wrong: list[Check]) -> None:
        super().__init__("the testbed is not what was asked for: " + "; ".join(check.sentence() for check in wrong))
        self.wrong = wrong


def must_agree(testbed: Testbed) -> list[Check]:
    """Measure all of it.

    Raises:
        LinkOffError: something is off by more than is allowed.
    """
    checks = list(verify(testbed))
    wrong = [check for check in checks if not check.is_right]
    testbed.set_verified(not wrong)
    if wrong:
        raise LinkOffError(wrong)
    return checks


def verify(testbed: Testbed) -> Iterator[Check]:
    """Measure paths, losses, lines; about 2 seconds for each site, more for slow ones."""
    topology = testbed.topology
    yield from _paths(testbed, topology)
    yield from _losses(testbed, topology)
    sites = [testbed.outside(i) for i in range(len(topology.sites))]
    longest_s = max(route.round_trip_s / 2 + route.jitter_s for route in topology.paths.values())
    kinds: tuple[Literal["up", "down"], ...] = ("up", "down")
    for i in range(len(topology.sites)):
        for kind in kinds:
            flows, expected = up_flows(topology, i) if kind == "up" else down_flows(topology, i)
            delay_s = longest_s + max(one.queue_s for one in topology.sites)
            attempts = (
                rate_check(topology, i, kind, expected, arriving(sites, flows, expected, delay_s))
                for _ in range(ATTEMPTS)
            )
            yield _best(attempts)


def up_flows(topology: Topology, i: int) -> tuple[list[Flow], float]:
    """What to offer to fill one site's way out, and how much of that should arrive."""
    others = [j for j in range(len(topology.sites)) if j != i]
    downs = {j: topology.sites[j].down_bps for j in others}
    total = sum(downs.values())
    carried = min(topology.sites[i].up_bps, total)
    kept = sum(downs[j] / total * (1 - topology.path(i, j).loss) for j in others)
    flows = [Flow(source=i, target=j, bps=OFFERED * carried * downs[j] / total) for j in others]
    return flows, carried * kept


def down_flows(topology: Topology, i: int) -> tuple[list[Flow], float]:
    """What to offer to fill one site's way in, and how much of that should arrive."""
    others = [j for j in range(len(topology.sites)) if j != i]
    ups = {j: topology.sites[j].up_bps * (1 - topology.path(i, j).loss) for j in others}
    total = sum(ups.values())
    carried = min(topology.sites[i].down_bps, total)
    return [Flow(source=j, target=i, bps=OFFERED * carried * ups[j] / total) for j in others], carried


def rate_check(topology: Topology, i: int, kind: Literal["up", "down"], expected: float, measured: float) -> Check:
    """Judge a line."""
    site = topology.sites[i]
    rate = site.up_bps if kind == "up" else site.down_bps
    is_capped = expected < rate * (1 - TOLERANCE / 2) and not any(
        topology.path(i, j).loss > TOLERANCE / 2 for j in range(len(topology.sites)) if j != i
    )
    return Check(
        kind=kind,
        where=site.name,
        wanted=expected,
        measured=measured,
        allowed=TOLERANCE * expected,
        note=f"all the others together carry no more, asked for {rate_text(rate)}" if is_capped else "",
    )


def path_checks(
    where: str, wanted_s: float, jitter_s: float, loss: float, found: list[float], sent: int
) -> list[Check]:
    """Judge a path by its echoes."""
    if not found:
        note = "no echo came back"
        return [Check(kind="round trip", where=where, wanted=wanted_s, measured=0.0, allowed=-1.0, note=note)]
    chance = 3 * jitter_s / math.sqrt(len(found))  # of the median of a sum of two uniform delays
    allowed = max(TOLERANCE * wanted_s, ROUND_TRIP_S) + chance
    checks = [
        Check(
            kind="round trip",
            where=where,
            wanted=wanted_s,
            measured=statistics.median(found),
            allowed=allowed,
        )
    ]
    if jitter_s:
        chance = 3 * 1.21 / math.sqrt(len(found))
        low, _, high = statistics.quantiles(found, n=4)
        measured = (high - low) / QUARTILES_OF_JITTER
        allowed = max((TOLERANCE + chance) * jitter_s, JITTER_S)
        checks.append(Check(kind="jitter", where=where, wanted=jitter_s, measured=measured, allowed=allowed))
    if not loss:
        checks.append(Check(kind="loss", where=where, wanted=0.0, measured=1 - len(found) / sent, allowed=0.0))
    return checks


def loss_check(where: str, wanted: float, sent: int, arrived: int) -> Check:
    """Judge losses by counting."""
    chance = 4 * math.sqrt(wanted * (1 - wanted) / max(1, sent))
    return Check(
        kind="loss",
        where=where,
        wanted=wanted,
        measured=1 - arrived / max(1, sent),
        allowed=TOLERANCE * wanted + max(chance, 1 / max(1, sent)),
        note=f"{sent - arrived} of {sent} packets",
    )


def _best(attempts: Iterator[Check]) -> Check:
    """The first that is right, else the nearest."""
    found = []
    for check in attempts:
        found.append(check)
        if check.is_right:
            break
    return min(found, key=lambda check: abs(check.error))


def _paths(testbed: Testbed, topology: Topology) -> Iterator[Check]:
    sites = [testbed.outside(i) for i in range(len(topology.sites))]
    most_jitter_s = max(route.jitter_s for route in topology.paths.values())
    count = ECHOES_WITH_JITTER if most_jitter_s else ECHOES
    longest_s = max(route.round_trip_s for route in topology.paths.values())
    interval_s = max(INTERVAL_S, 2.2 * most_jitter_s)
    checks: list[Check] = []
    for _ in range(ATTEMPTS):
        found = round_trips(sites, list(topology.paths), count, interval_s, longest_s + 0.5)
        checks = []
        for (i, j), route in topology.paths.items():
            where = f"{topology.sites[i].name}-{topology.sites[j].name}"
            checks += path_checks(where, route.round_trip_s, route.jitter_s, route.loss, found[i, j], count)
        if all(check.is_right for check in checks):
            break
    yield from checks


def _losses(testbed: Testbed, topology: Topology) -> Iterator[Check]:
    """Both ways of every path that loses, all at once."""
    count = len(topology.sites)
    ways = [(i, j) for i in range(count) for j in range(count) if i != j and topology.path(i, j).loss]
    if not ways:
        return
    fastest_bps = LOSS_PACKETS_PER_S / len(ways) * SMALL_WIRE_BYTES * 8
    flows = []
    for i, j in ways:
        line_bps = min(topology.sites[i].up_bps, topology.sites[j].down_bps)
        flows.append(Flow(source=i, target=j, bps=min(fastest_bps, LOSS_SHARE * line_bps / (count - 1))))
    longest_s = max(route.round_trip_s for route in topology.paths.values())
    sites = [testbed.outside(i) for i in range(count)]
    for (i, j), (sent, arrived) in zip(ways, losses(sites, flows, LOSS_S, longest_s), strict=True):
        where = f"{topology.sites[i].name} to {topology.sites[j].name}"
        yield loss_check(where, topology.path(i, j).loss, sent, arrived)


def _figure(kind: Kind, value: float) -> str:
    if kind in ("up", "down"):
        return rate_text(value)
    return f"{value:.3%}" if kind == "loss" else f"{value * 1e3:.2f} ms"
