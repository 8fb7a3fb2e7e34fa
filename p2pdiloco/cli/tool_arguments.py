"""What can be typed after the commands that prove, measure and hurt; see ``arguments``, which those of peers have."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from p2pdiloco.cli.quantities import at_least, between, file
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


def simulate(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--seeds", default="0-999", metavar="A-B", help="inclusive (default: %(default)s)")
    sub.add_argument(
        "--fresh", type=at_least(1, MOST_SEEDS), metavar="N", help="N seeds that nobody has run before, not --seeds"
    )
    sub.add_argument("--whole", action="store_true", help="simulate whole peers, not the protocol alone")
    from p2pdiloco.simulation.scenarios import STORIES
    from p2pdiloco.simulation.scenes import MIXED, SCENARIOS

    sub.add_argument("--scenario", choices=[MIXED, *SCENARIOS], default=MIXED, help="kinds of faults (default: all)")
    sub.add_argument("--story", choices=sorted(STORIES), help="tell one scripted situation instead of running seeds")
    sub.add_argument("--mutants", action="store_true", help="find every planted bug")
    sub.add_argument("--piece", default="1/1", metavar="K/N", help="of whole peers' bugs every N-th, from the K-th")
    sub.add_argument("--record", type=file, metavar="FILE", help="what finds each of whole peers' bugs, as JSON")
    sub.add_argument(
        "--jobs",
        type=at_least(1, MOST_PROCESSES),
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (default: all cores)",
    )
    sub.add_argument("--json", action="store_true", help="nothing but JSON on standard output")


def chaos(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--plan", default="quick", metavar="PLAN", help="TOML file, or quick, half-hour, peer-hour (default: quick)"
    )
    sub.add_argument("--peers", type=at_least(2, 26), metavar="N", help="instead of the plan's")
    sub.add_argument(
        "--seconds",
        type=between(1, 86400, "seconds"),
        metavar="T",
        help="in which faults come, instead of the plan's",
    )
    sub.add_argument(
        "--seed", type=at_least(0, LARGEST_SEED), default=1, metavar="S", help="of the schedule (default: %(default)s)"
    )
    sub.add_argument("--out", type=Path, default=Path("out/chaos"), metavar="DIR", help="default: %(default)s")
    sub.add_argument("--json", type=file, metavar="FILE", help="write the JSON object there, too")


def replay(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("journal", type=Path, metavar="JOURNAL", help="STATE/RUN/journal.bin")
    sub.add_argument(
        "--check", action="store_true", help="print nothing but the first difference from what the peer decided then"
    )
    sub.add_argument("--full", action="store_true", help="heartbeats, and steps without effect, too")


def bench(sub: argparse.ArgumentParser) -> None:
    actions = sub.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, help_text: str, *, file: bool = True) -> Any:
        made = actions.add_parser(name, help=help_text)
        if file:
            made.add_argument("topology", metavar="TOPOLOGY", help="TOML file, or the name of a shipped one")
        return made

    makers = [
        action("up", "make the network, measure it, leave it up"),
        action("link", "measure each line and path, print the matrix; makes the network for that if it is down"),
        action("exec", "run a command in a site; makes the network for that if it is down"),
    ]
    for made in makers:
        made.add_argument("--engine", choices=["netem", "router"], help="who delays and loses (default: the best)")
    for made in (makers[0], makers[2]):
        made.add_argument("--unverified", action="store_true", help="do not measure; do not report figures from it")
    makers[1].add_argument("--json", type=file, metavar="FILE", help="write what was measured there, too")
    makers[2].add_argument("--play", action="store_true", help="play the scheduled changes while the command runs")
    makers[2].add_argument("site", metavar="SITE")
    makers[2].add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    action("play", "put the scheduled changes in force, each at its time")
    relay = action("relay", "without root: shape in this process what goes through its TCP relays")
    relay.add_argument("servers", nargs="*", metavar="SITE=HOST:PORT", help="what others reach; none: only measure")
    action("down", "remove the network")
    action("clean", "remove all that testbeds left here: namespaces, interfaces, processes", file=False)
    action("probe", "say what this kernel has, and what would be used", file=False)


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
