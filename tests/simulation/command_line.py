"""The command line of both simulators: which seeds, what is told of them, and the exit status."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping

from p2pdiloco.cli.argument_types import at_least
from p2pdiloco.cli.errors import FAILED, REPAIR, CommandError

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


class Tally:
    """The sums over many seeds: a line for each batch and each failure, and a JSON object at the end."""

    def __init__(self, program: str, seeds: range, batch: int, *, is_json: bool) -> None:
        """``program``: the command that repeats a seed. ``batch``: seeds between two progress lines."""
        self.total: dict[str, float] = {"seeds": 0, "violations": 0}
        self._program, self._seeds, self._batch, self._is_json = program, seeds, batch, is_json

    def batches(self) -> Iterator[range]:
        """The seeds; what was counted meanwhile is told after each batch, if there are several."""
        for first in range(self._seeds.start, self._seeds.stop, self._batch):
            yield range(first, min(first + self._batch, self._seeds.stop))
            if not self._is_json and len(self._seeds) > self._batch:
                events = f"  {self.total['events']:>13,} events" if "events" in self.total else ""
                print(f"{self.total['seeds']:>7,} seeds{events}  {self.total['violations']} violations", flush=True)

    def count(self, figures: Mapping[str, float]) -> None:
        """Add these to the sums."""
        for key, value in figures.items():
            self.total[key] = self.total.get(key, 0) + value

    def failed(self, seed: int, sentence: str, more: str = "") -> None:
        """Tell of a seed that failed; ``more``: options that repeating it needs."""
        print(f"seed {seed}: {sentence}\n  repeat: {self._program} --seeds {seed}{more}", file=sys.stderr)

    def end(self, **told: object) -> int:
        """Print the sums and what else is told; return the exit status."""
        print(json.dumps({**self.total, **told}))
        return FAILED if self.total["violations"] or self.total.get("tokens_lost") else 0
