"""Arguments of ``demo`` and ``plan``; see ``arguments``, which those of peers have."""

from __future__ import annotations

import argparse
from pathlib import Path

from p2pdiloco.cli.quantities import at_least, between
from p2pdiloco.cli.rates import bytes_per_second

MOST_STEPS, MOST_SEEDS, LARGEST_SEED, MOST_PROCESSES = 1_000_000, 1_000_000_000, 2**63 - 1, 1024
"""Beyond any use, and no more than what is done with the numbers bears."""


def demo(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="default: %(default)s")
    sub.add_argument("--config", default="stdlib-tiny", metavar="CONFIG", help="TOML file, or a shipped one's name")
    sub.add_argument(
        "--steps", type=at_least(1, MOST_STEPS), metavar="N", help="global steps instead of the configuration's"
    )
    sub.add_argument(
        "--time-limit",
        type=between(1, 86400, "seconds"),
        default=420.0,
        metavar="SECONDS",
        help="give up after this long (default: 420)",
    )


def plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", metavar="CONFIG", help="a run's TOML file, or the name of a shipped one")
    sub.add_argument("--peers", type=at_least(2, 1_000_000), required=True, metavar="N", help="that train")
    sub.add_argument(
        "--link", type=bytes_per_second, required=True, metavar="RATE", help="each peer's line up, such as 20mbit"
    )
    sub.add_argument("--down", type=bytes_per_second, metavar="RATE", help="each peer's line down (default: as --link)")
    sub.add_argument("--rtt", type=between(0, 10_000, "milliseconds"), default=50.0, metavar="MS", help="round trip")
    sub.add_argument(
        "--step-time", type=between(0.001, 3600, "seconds"), required=True, metavar="S", help="an inner step's"
    )
    sub.add_argument("--price", type=between(0, 1000), default=0.0, metavar="P", help="of a GB that leaves a peer")
    sub.add_argument("--json", action="store_true", help="for programs")
