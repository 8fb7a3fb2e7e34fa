"""Line rate needed for a given compute utilization: arithmetic, no measurement.

Unlike the public model (``p2pdiloco.planner``) it includes what a real link costs: headers, round trips, loss, control.

1. Pure numbers: bits, seconds, bits per second on the wire.
2. All links of a swarm are alike. Sending and receiving use the two directions of a peer's line.
3. Compute utilization is compute / (compute + stall), as in the simulator of the Decoupled DiLoCo family: the forward
   pass takes a third of the step, the backward pass two thirds; the deadline is the end of the step, or of the overlap.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.scale import bandwidth

PAYLOAD_SHARE = 1448 / 1514
"""TCP payload in a full packet, as tc counts it."""
HOPS = 3
"""One-way trips of a turn: announced, contributed, committed."""


class Run(NamedTuple):
    """A training run as the formula sees it."""

    parameters: float
    peers: int
    step_s: float
    sync_every: int = 1
    fragments: int = 1
    overlap: int = 0
    bytes_per_parameter: float = 4.0
    control_bps: float = 0.0
    """What a peer sends besides, whatever it trains."""


class Link(NamedTuple):
    """A site's line and the paths from it."""

    rate_bps: float
    round_trip_s: float = 0.0
    loss: float = 0.0


def step_bits(run: Run) -> float:
    """What a peer sends for one exchange of the whole model: a reduce and a spread."""
    return 2 * (run.peers - 1) / run.peers * run.parameters * run.bytes_per_parameter * 8


def data_parallel_s(run: Run, link: Link) -> float:
    """Seconds that a data-parallel step takes: gradients leave while the backward pass makes them, evenly over its two
    thirds of the step, and the last of them go through a ring of 2 (M - 1) hops."""
    transfer = step_bits(run) / (link.rate_bps * PAYLOAD_SHARE)
    backward = run.step_s * 2 / 3
    last = run.step_s / 3 + max(backward, transfer)
    return max(run.step_s, last + (run.peers - 1) * link.round_trip_s)


def synchronous_diloco_s(run: Run, link: Link) -> float:
    """Seconds a step, on average, when all stop every ``sync_every`` steps until the outer gradients are averaged."""
    transfer = step_bits(run) / (link.rate_bps * PAYLOAD_SHARE) + (run.peers - 1) * link.round_trip_s
    return run.step_s + transfer / run.sync_every


def utilisation(seconds_a_step: float, run: Run) -> float:
    """Compute utilisation at that pace."""
    return run.step_s / seconds_a_step


def fragment_s(run: Run, link: Link) -> float:
    """Seconds from a fragment's turn to its commit at all peers, with nothing else on the link."""
    usable = max(1.0, link.rate_bps * PAYLOAD_SHARE * (1 - link.loss) - run.control_bps)
    return step_bits(run) / run.fragments / usable + HOPS * link.round_trip_s / 2


def sustained_share(run: Run, link: Link) -> float:
    """How many of its turns a swarm can afford: 1 if fragments leave the link as fast as they come."""
    usable = max(1.0, link.rate_bps * PAYLOAD_SHARE * (1 - link.loss) - run.control_bps)
    wanted = step_bits(run) / (run.sync_every * run.step_s)
    return min(1.0, usable / wanted)


def is_on_time(run: Run, link: Link) -> bool:
    """Whether a fragment is committed within its overlap."""
    return fragment_s(run, link) <= run.overlap * run.step_s


def least_rate(run: Run, wanted: float, *, system: str, round_trip_s: float = 0.0) -> float:
    """The slowest line, in bits per second, at which ``system`` computes ``wanted`` of the time. p2pdiloco's learners
    never wait for the link; for it, ``wanted`` is the share of turns that are kept, on time."""

    def share(run: Run, rate_bps: float) -> float:
        link = Link(rate_bps, round_trip_s)
        if system == "ddp":
            return utilisation(data_parallel_s(run, link), run)
        if system == "diloco":
            return utilisation(synchronous_diloco_s(run, link), run)
        return sustained_share(run, link) if is_on_time(run, link) else 0.0

    return bandwidth.least_rate(share, run, wanted)
