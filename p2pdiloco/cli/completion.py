"""``p2pdiloco --print-completion``: the script with which a shell completes commands, options, their choices and files.
It has to be printed again after an update."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import shtab

from p2pdiloco.cli.arguments import COMMANDS, Command, add_common_arguments


def script(shell: str) -> str:
    """Return the completion script for ``shell``, bash or zsh."""
    parser = argparse.ArgumentParser(prog="p2pdiloco")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--print-completion", choices=["bash", "zsh"], help="print a completion script for a shell")
    _add_commands(parser, COMMANDS)
    return shtab.complete(parser, shell)


def _add_commands(parser: argparse.ArgumentParser, table: Mapping[str, Command]) -> None:
    commands = parser.add_subparsers()
    for name, command in table.items():
        sub = commands.add_parser(name, help=command.help)
        if command.parts:
            _add_commands(sub, command.parts)
            continue
        command.add_arguments(sub)
        add_common_arguments(sub, is_quiet=command.is_quiet)
        for action in sub._actions:
            if action.nargs != 0 and not action.choices:  # any other value may be a file
                action.complete = shtab.FILE  # type: ignore[attr-defined]
