"""Options about connections, which several commands have."""

from __future__ import annotations

import argparse

from p2pdiloco.cli.rates import bytes_per_second, up_budget


def add_network(sub: argparse.ArgumentParser) -> None:
    """How a peer is reached, and what it may send."""
    sub.add_argument(
        "--listen",
        action="append",
        metavar="MULTIADDR",
        help="data port, e.g. /ip4/0.0.0.0/tcp/4242; may be given several times (default: any, IPv4 and IPv6)",
    )
    sub.add_argument(
        "--announce", action="append", default=[], metavar="MULTIADDR", help="data address to publish (port forwarding)"
    )
    sub.add_argument(
        "--no-map", dest="map", action="store_false", help="do not ask the router for a port (PCP, NAT-PMP, UPnP)"
    )
    sub.add_argument(
        "--host_maddrs",
        "--directory-listen",
        nargs="*",
        metavar="MULTIADDR",
        help="directory port (default: any, IPv4 and IPv6)",
    )
    sub.add_argument(
        "--announce_maddrs", nargs="*", default=[], metavar="MULTIADDR", help="directory addresses to publish"
    )
    add_relay(sub)
    sub.add_argument(
        "--up",
        type=up_budget,
        default="auto",
        metavar="RATE",
        help="send at most this, e.g. 2.5gbit, 100mbit, none (default: auto, 90 %% of what the link is seen to carry)",
    )
    sub.add_argument("--down", type=bytes_per_second, metavar="RATE", help="let others send at most this")


def add_relay(sub: argparse.ArgumentParser) -> None:
    """What is carried for others."""
    sub.add_argument(
        "--relay",
        type=bytes_per_second,
        default="50mbit",
        metavar="RATE",
        help="carry at most this for pairs that have no way to each other (default: %(default)s; none: no limit)",
    )
    sub.add_argument("--no-relay", dest="relay", action="store_const", const=0.0, help="carry nothing for others")
