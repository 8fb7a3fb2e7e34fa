"""``p2pdiloco``: the command line.

Exit status: 0 in order; 1 something failed while running; 2 the command, configuration or data must be repaired;
3 nobody could be reached, or what was looked for does not exist.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import uvloop

from p2pdiloco.cli import bootstrap, status, train
from p2pdiloco.node.checkpoint import CheckpointError
from p2pdiloco.node.founding import ConfigError
from p2pdiloco.node.lookup import LookupFailedError
from p2pdiloco.runtime import logs
from p2pdiloco.runtime.directory import DirectoryError
from p2pdiloco.runtime.identity import IdentityError

Command = Callable[[argparse.Namespace], Coroutine[None, None, int]]


def default_state_folder() -> Path:
    """``$XDG_STATE_HOME/p2pdiloco``, else ``~/.local/state/p2pdiloco``."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "p2pdiloco"


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="p2pdiloco",
        description="Train one language model together, peer to peer, over the internet.",
        epilog=__doc__,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (bootstrap.add, train.add_start, train.add_join, status.add):
        sub = add(commands)
        sub.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
        sub.add_argument("--log-format", default="text", choices=["text", "json"], help="one line an event either way")
        sub.add_argument(
            "--state",
            type=Path,
            default=default_state_folder(),
            metavar="DIR",
            help="identity, checkpoints, caches (default: %(default)s); one running peer a folder",
        )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = parser().parse_args(argv)
    logs.configure(arguments.log_level, arguments.log_format)
    command: Command = arguments.run_command
    try:
        return uvloop.run(command(arguments))
    except (ConfigError, CheckpointError, IdentityError) as error:
        return _complain(error, 2)
    except (LookupFailedError, DirectoryError) as error:
        return _complain(error, 3)
    except OSError as error:
        return _complain(error, 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


def _complain(error: Exception, exit_status: int) -> int:
    print(f"p2pdiloco: {error}", file=sys.stderr)
    return exit_status


if __name__ == "__main__":
    sys.exit(main())
