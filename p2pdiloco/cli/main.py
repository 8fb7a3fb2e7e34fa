"""``p2pdiloco``: the command line.

Exit status: 0 in order; 1 something failed while running; 2 the command, configuration or data must be repaired;
3 nobody could be reached, or what was looked for does not exist; 130 interrupted before it had begun.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import uvloop

from p2pdiloco.cli.complaints import FAILED, INTERRUPTED, Complaint
from p2pdiloco.runtime import logs

COMMANDS = {
    "demo": "see a swarm on this machine found, train, lose and gain peers (3 minutes)",
    "bootstrap": "run a directory node that others use as their first address",
    "start": "found a run and train it",
    "join": "join a running run",
    "resume": "go on with a run whose peers have all died",
    "status": "show runs and their peers",
    "simulate": "prove the protocol in a simulated world",
    "chaos": "hurt a real swarm on this machine and judge what it makes of that",
    "replay": "tell or check a peer's journal",
    "bench": "run commands on a throttled network of namespaces, measured before use",
    "doctor": "check what this machine can do as a peer",
}
"""Each is a module of this package with ``add_arguments(parser)`` and ``async run(arguments) -> exit status``. Only the
chosen one is imported, so that what needs no torch does not wait for it."""


def default_state_folder() -> Path:
    """``$XDG_STATE_HOME/p2pdiloco``, else ``~/.local/state/p2pdiloco``."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "p2pdiloco"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    arguments = _parser(chosen).parse_args(words)
    logs.configure(arguments.log_level, arguments.log_format)
    run: Callable[[argparse.Namespace], Coroutine[None, None, int]] = _module(arguments.command).run
    try:
        status: int = uvloop.run(_until_terminated(run(arguments)))
        return status
    except Complaint as error:
        print(f"p2pdiloco: {error}", file=sys.stderr)
        return error.status
    except BrokenPipeError:  # ``p2pdiloco replay ... | head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED


async def _until_terminated(work: Coroutine[None, None, int]) -> int:
    """Until a command has a way of its own to leave, SIGTERM cancels it as Ctrl+C does: what is open is closed."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The command line; only the chosen command's own arguments are there."""
    top = argparse.ArgumentParser(
        prog="p2pdiloco",
        description="Train one language model together, peer to peer, over the internet.",
        epilog=" ".join((__doc__ or "").split("\n\n", 1)[1].split()),
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in COMMANDS.items():
        module = _module(name) if name == chosen else None
        description = None if module is None else " ".join((module.__doc__ or "").split(": ", 1)[-1].split())
        sub = commands.add_parser(name, help=help_text, description=description)
        if module is not None:
            module.add_arguments(sub)
            _add_common_arguments(sub, quiet=getattr(module, "IS_QUIET", False))
    return top


def _add_common_arguments(sub: argparse.ArgumentParser, *, quiet: bool) -> None:
    levels = ["debug", "info", "warning", "error"]
    sub.add_argument("--log-level", default="warning" if quiet else "info", choices=levels)
    sub.add_argument("--log-format", default="text", choices=["text", "json"], help="one line an event either way")
    sub.add_argument(
        "--state",
        type=Path,
        default=default_state_folder(),
        metavar="DIR",
        help="identity, checkpoints, caches (default: %(default)s); one running peer a folder",
    )


def _module(name: str) -> Any:
    return import_module(f"p2pdiloco.cli.{name}")


if __name__ == "__main__":
    sys.exit(main())
