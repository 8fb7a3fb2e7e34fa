"""What the kernel's queueing disciplines are told: token buckets for lines, netem for paths.

Rules of this file:
1. Every bucket sees forwarded traffic. On a sender's own interface the kernel would push back on its socket instead
   of queueing and dropping, which no router on the internet does.
2. A bucket for a fast line is deeper than one offloaded packet (64 KiB), else the kernel segments in software:
   measured exact to 5 Gbit/s with max(256 KiB, 0.5 ms). A slow line's bucket holds at most 10 ms, so that it does not
   look fast for a while.
3. netem gets a rate far above any line's when it jitters, which makes it keep packets in order; without, it reorders.
4. netem loses whole packets of up to 64 KiB, which flatters TCP: where it loses, offloads are off at the sites.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from typing import Any

from benchmarks.netbed.namespace_exec import opened_in
from benchmarks.netbed.namespaces import interface
from benchmarks.netbed.topology import Route

DEEP_BYTES = 256 << 10
DEEP_S = 0.5e-3
SHALLOW_S = 10e-3
PACKET_BYTES = 1514
ETHERNET_BYTES = 14
OFFLOADED_BYTES = 1 << 16
NETEM_PACKETS = 200_000
ORDERING_BPS = 30_000_000_000
SIOCETHTOOL = 0x8946
OFFLOADS = (0x1F, 0x24, 0x2C)
"""ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO."""


def burst_bytes(rate_bps: int) -> int:
    """How deep a line's bucket is."""
    bytes_per_s = rate_bps / 8
    return round(max(2 * PACKET_BYTES, DEEP_S * bytes_per_s, min(DEEP_BYTES, SHALLOW_S * bytes_per_s)))


def queue_bytes(rate_bps: int, queue_s: float) -> int:
    """How much waits before a line: at least what comes in one piece."""
    is_whole = burst_bytes(rate_bps) > OFFLOADED_BYTES
    return max(2 * OFFLOADED_BYTES if is_whole else 4 * PACKET_BYTES, round(rate_bps / 8 * queue_s))


def set_bucket(net: Any, device: str, rate_bps: int, queue_s: float, *, is_tun: bool = False) -> None:
    """Limit what leaves through ``device``; replaces what was there. A TUN device's packets have no Ethernet header,
    so its bucket is given less, in the proportion of full packets."""
    if is_tun:
        rate_bps = round(rate_bps * (PACKET_BYTES - ETHERNET_BYTES) / PACKET_BYTES)
    net.tc(
        "replace",
        "tbf",
        interface(net, device),
        rate=rate_bps // 8,
        burst=burst_bytes(rate_bps),
        limit=queue_bytes(rate_bps, queue_s),
    )


def set_netem(net: Any, device: str, route: Route) -> None:
    """Delay and lose what leaves through ``device``, one direction of a path; replaces what was there."""
    options: dict[str, Any] = {
        "delay": round(route.round_trip_s / 2 * 1e6),
        "limit": NETEM_PACKETS,
        "loss": route.loss * 100,
    }
    if route.jitter_s:
        _let_netem_have_a_rate()
        options |= {"jitter": round(route.jitter_s * 1e6), "rate": ORDERING_BPS // 8}
    net.tc("replace", "netem", interface(net, device), **options)


def _let_netem_have_a_rate() -> None:
    """pyroute2 0.9.7 puts netem's rate into the request a second time, as a rate estimator, which fails; for tbf it
    takes it out again. Have it do the same for netem."""
    from pyroute2.netlink.rtnl.tcmsg import sched_netem, sched_tbf

    if not hasattr(sched_netem, "fix_request"):
        sched_netem.fix_request = sched_tbf.fix_request


def set_offloads(namespace: str, device: str, *, on: bool) -> None:
    """Whether a site's TCP hands over packets of up to 64 KiB."""

    def apply() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
            for command in OFFLOADS:
                value = array.array("I", (command, int(on)))
                fcntl.ioctl(handle, SIOCETHTOOL, struct.pack("16sP", device.encode(), value.buffer_info()[0]))

    opened_in(namespace, apply)
