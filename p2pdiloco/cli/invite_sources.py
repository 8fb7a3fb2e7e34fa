"""Sources of an invite or of addresses: the command line, a file, standard input, the environment.

Other users of a machine see command lines in its list of processes, and whoever has an invite can join the run. The
other three are private.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final, NamedTuple

from p2pdiloco.access.invite_code import VARIABLE

LONGEST: Final = 1 << 16
"""Bytes that are read of a file or of standard input."""


class _Wanted(NamedTuple):
    """A command that needs an invite or an address."""

    parser: argparse.ArgumentParser
    metavar: str
    is_required: bool


def add_addresses(sub: argparse.ArgumentParser, *, metavar: str, help: str, is_required: bool = True) -> None:
    """Add the positional argument ``address``, and the option that names a file instead."""
    sub.add_argument(
        "address",
        nargs="*",
        metavar=metavar,
        help=f"{help}; -: what standard input holds (default: the environment variable {VARIABLE})",
    )
    sub.add_argument("--invite-file", type=Path, metavar="FILE", help="file with them (default: none)")
    sub.set_defaults(_wanted=_Wanted(sub, metavar, is_required))


def resolve(arguments: argparse.Namespace) -> None:
    """Replace the sources in ``arguments.address`` by what they hold. The variable counts if nothing else is given."""
    if not hasattr(arguments, "invite_file"):
        return
    wanted: _Wanted = arguments._wanted
    del arguments._wanted
    words: list[str] = []
    for word in arguments.address:
        words += sys.stdin.read(LONGEST).split() if word == "-" else [word]
    if arguments.invite_file is not None:
        try:
            with open(arguments.invite_file, encoding="utf-8") as file:
                words += file.read(LONGEST).split()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text"
            wanted.parser.error(f"--invite-file {arguments.invite_file}: {reason}")
    if not words and (wanted.is_required or VARIABLE in os.environ):
        words = os.environ.get(VARIABLE, "").split()
    if not words and wanted.is_required:
        wanted.parser.error(
            f"give {wanted.metavar}: as an argument, with --invite-file, as - for standard input, or in "
            f"the variable {VARIABLE}"
        )
    arguments.address = words
