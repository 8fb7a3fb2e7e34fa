"""What can be typed after the commands that look; see ``arguments``, which those of peers have."""

from __future__ import annotations

import argparse
from pathlib import Path

from p2pdiloco.cli.quantities import between, page_place
from p2pdiloco.cli.terms import lifetime


def page(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folder", type=Path, metavar="FOLDER", help="where peers have logged what happened")
    sub.add_argument("--port", type=page_place, default="auto", metavar="[HOST:]PORT", help="default: a free one")
    sub.add_argument("--speed", type=between(0, 10_000, "times"), default=10.0, metavar="X", help="default: 10")


def top(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("what", nargs="?", metavar="WHAT", help="a page's address, or a folder (default: --state)")
    sub.add_argument(
        "--speed",
        type=between(0, 10_000, "times"),
        default=10.0,
        metavar="X",
        help="of what is recorded; 0: stand at its end (default: 10)",
    )


def events(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where they have logged (default: --state)")
    sub.add_argument("--follow", action="store_true", help="go on with what is logged from now on, until interrupted")
    sub.add_argument("--kind", metavar="KIND,...", help="only these, such as came,went,alert (docs/watching.md)")
    sub.add_argument("--peer", default="", metavar="ID", help="only of the peer whose id ends so")
    sub.add_argument("--since", type=lifetime, metavar="TIME", help="only the last 90m, 12h or 30d")
    sub.add_argument(
        "--speed",
        type=between(0, 10_000, "times"),
        default=0.0,
        metavar="X",
        help="replay: pause between them as they came, X times as fast (default: 0, all at once)",
    )
    sub.add_argument("--json", action="store_true", help="one JSON object a line, as logged, with who told it")
