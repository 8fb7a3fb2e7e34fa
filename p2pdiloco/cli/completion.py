"""``p2pdiloco completion``: Print a script with which a shell completes commands, options, their choices and files.
Print it again after an update.
"""

from __future__ import annotations

import argparse

import shtab

from p2pdiloco.cli.arguments import COMMANDS, add_common_arguments


async def run(arguments: argparse.Namespace) -> int:
    """Print the script for the shell that was named."""
    print(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Return the completion script for ``shell``."""
    parser = argparse.ArgumentParser(prog="p2pdiloco")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help)
        command.add_arguments(sub)
        add_common_arguments(sub, is_quiet=command.is_quiet)
        for action in sub._actions:
            if action.nargs != 0 and not action.choices:  # any other value may be a file
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)
