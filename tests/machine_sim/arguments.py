"""Arguments that the programs of both simulators take."""

from __future__ import annotations

import argparse
import os
import re
import sys

from p2pdiloco.cli.argument_types import at_least
from p2pdiloco.cli.errors import REPAIR, CommandError

MOST_SEEDS, MOST_PROCESSES = 1_000_000_000, 1024


def add_seeds(parser: argparse.ArgumentParser) -> None:
    """Which seeds, and how they are run."""
    parser.add_argument("--seeds", default="0-999", metavar="A-B", help="inclusive (default: %(default)s)")
    parser.add_argument(
        "--fresh", type=at_least(1, MOST_SEEDS), metavar="N", help="N seeds that nobody has run before, not --seeds"
    )
    parser.add_argument(
        "--jobs",
        type=at_least(1, MOST_PROCESSES),
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (default: all cores)",
    )
    parser.add_argument("--json", action="store_true", help="print nothing but JSON on standard output")


def seeds_of(arguments: argparse.Namespace) -> range:
    """The seeds that are asked for.

    Raises:
        CommandError: ``--seeds`` is no range.
    """
    return parse_seeds(arguments.seeds) if arguments.fresh is None else fresh_seeds(arguments.fresh)


def parse_seeds(text: str) -> range:
    """``A-B`` or ``A``.

    Raises:
        CommandError: neither.
    """
    found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    if found is None or (found[2] is not None and int(found[2]) < int(found[1])):
        raise CommandError(f"--seeds {text}: give a range such as 0-999, or one number, of at most 18 digits", REPAIR)
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def fresh_seeds(count: int) -> range:
    """Seeds that nobody has run before; told, so that they can be run again."""
    first = int.from_bytes(os.urandom(5), "big")
    print(f"seeds {first}-{first + count - 1}", file=sys.stderr)
    return range(first, first + count)
