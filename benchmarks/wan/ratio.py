"""Line rates that are as slow for our small model as 2 to 5 Gbit/s are for the paper's 12B run.

A data-parallel step sends 2 (M - 1) / M of the gradients' bytes over a site's line: for 12B parameters in bf16 and M =
4, 36 GB = 288 Gbit. The step time is not published. The family's public simulator takes 1 s for 5B parameters, so 2.4 s
on the same accelerators: the run wants 120 Gbit/s, 24 times what 5 Gbit/s and 60 times what 2 Gbit/s carry. Our model
sends float32, and its lines are slower by as much as it wants less. Round trips are those of the four regions, not
scaled: in units of a step they are 2.4 / ``step_s`` times as long as for the 12B run, which favours no system.
"""

from __future__ import annotations

from benchmarks.netbed.topology import Topology, find_topology, parse_topology

PAPER_PARAMETERS = 12e9
PAPER_BYTES = 2
PAPER_STEP_S = 2.4
PEERS = 4
OUR_BYTES = 4


def wanted_bps(parameters: float, bytes_each: float, step_s: float, peers: int = PEERS) -> float:
    """What data parallel wants of each line to hide all communication."""
    return 2 * (peers - 1) / peers * parameters * bytes_each * 8 / step_s


def scale(parameters: float, step_s: float) -> float:
    """By how much the paper's lines are to be slowed down for our model."""
    return wanted_bps(parameters, OUR_BYTES, step_s) / wanted_bps(PAPER_PARAMETERS, PAPER_BYTES, PAPER_STEP_S)


def regions() -> Topology:
    """The shipped four US regions."""
    return parse_topology(find_topology("four-us-regions").read_text())


def ratios(topology: Topology) -> tuple[float, float]:
    """Seconds of communication for a second of computation, on the fastest and the slowest line."""
    wanted = wanted_bps(PAPER_PARAMETERS, PAPER_BYTES, PAPER_STEP_S)
    rates = [site.up_bps for site in topology.sites]
    return wanted / max(rates), wanted / min(rates)
