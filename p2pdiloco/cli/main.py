"""``p2pdiloco``: the command line.

Exit status: 0 success; 1 a failure while running; 2 fix the command, configuration or data; 3 nobody could be reached,
or the requested run does not exist; 4 the run is complete here, but peers that were lost together may have another
model of it; 130 interrupted before it began.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from p2pdiloco.cli.arguments import COMMANDS, add_common_arguments
from p2pdiloco.cli.errors import FAILED, INTERRUPTED, CommandError
from p2pdiloco.cli.parser import Parser, meant
from p2pdiloco.training import PASSIVE
from p2pdiloco.util import status_pipe
from p2pdiloco.version import VERSION

MOVED = {
    "simulate": "python -m tests.machine_sim, or python -m tests.peer_sim for --whole",
    "chaos": "python -m tests.chaos",
    "replay": "python -m tests.machine_sim.replay",
    "bench": "python -m benchmarks.netbed",
}
"""Commands of the release before."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parse(_attach_status_pipe(words))
        module = _load(arguments.command)
        if argv is None and hasattr(module, "prepare"):  # this process is the command, and nothing else
            module.prepare(arguments)
        return execute(module.run, arguments)
    except KeyboardInterrupt:  # while it is still being imported
        return INTERRUPTED


def _load(command: str) -> Any:
    """The module that runs ``command``, and may ``prepare`` it before there is a loop. What is imported for it is no
    garbage: looking for some meanwhile, and in it ever after, is an eighth of a node's start."""
    os.environ.update(PASSIVE | os.environ)
    gc.disable()
    try:
        return import_module(f"p2pdiloco.cli.{command}")
    finally:
        gc.freeze()
        gc.enable()


def program(
    prog: str,
    doc: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], Coroutine[None, None, int]],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a program of a clone, which is no command, with the errors, logs and exit statuses of the commands. ``doc``:
    its module's."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog=prog, description=" ".join((doc or "").split(": ", 1)[-1].split()))
    add_arguments(parser)
    add_common_arguments(parser, is_quiet=True)
    parser.check(words)
    try:
        return execute(run, parser.parse_args(words))
    except KeyboardInterrupt:
        return INTERRUPTED


def execute(run: Callable[[argparse.Namespace], Coroutine[None, None, int]], arguments: argparse.Namespace) -> int:
    """Run a command in an event loop; returns its exit status."""
    import asyncio  # which a typo does not wait for

    import uvloop

    from p2pdiloco.util import logs

    logs.configure(arguments.log_level, arguments.log_format)
    try:
        status: int = uvloop.run(_until_terminated(run(arguments)))
        return status
    except CommandError as error:
        status_pipe.writer.report_exit(error.status, str(error))
        print("p2pdiloco:", logs.printable(str(error), keeps="\n"), file=sys.stderr)
        return error.status
    except BrokenPipeError:  # ``p2pdiloco events ... | head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED


async def _until_terminated(work: Coroutine[None, None, int]) -> int:
    """Run a command. SIGTERM cancels it as Ctrl+C does, unless the command handles it itself."""
    import asyncio

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


def _attach_status_pipe(words: Sequence[str]) -> list[str]:
    """Take ``--status-fd N``, which the program that started this one gives to any command, off the command line before
    the rest of it can be wrong; returns the rest."""
    hidden = Parser(prog="p2pdiloco", add_help=False, allow_abbrev=False)
    hidden.add_argument(status_pipe.OPTION, type=int)
    found, rest = hidden.parse_known_args(words)
    try:
        if found.status_fd is not None:
            status_pipe.writer.attach(found.status_fd)
    except OSError as error:
        hidden.error(f"{status_pipe.OPTION} {found.status_fd}: {error.strerror}")
    return rest


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line; only the chosen command's own arguments are there."""
    top = Parser(
        prog="p2pdiloco",
        description="Train one language model together, peer to peer, over the internet.",
        epilog=" ".join((__doc__ or "").split("\n\n", 1)[1].split()),
    )
    top.add_argument("--version", action="version", version=f"p2pdiloco {VERSION}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), None)
    later = next((word for word in words if word in COMMANDS), None)
    if later and words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        top.error(f"options come after the command: p2pdiloco {later} ...")
    if chosen in MOVED:
        top.error(f"{chosen} is a tool of this repository now, and no command: in a clone, {MOVED[chosen]}")
    if chosen is not None and chosen not in COMMANDS:
        top.error(f"there is no command {chosen}{meant(chosen, COMMANDS)}")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=_description(name) if name == chosen else None)
        if name == chosen:
            command.add_arguments(sub)
            add_common_arguments(sub, is_quiet=command.is_quiet)
            sub.check(words[words.index(name) + 1 :])
    return top.parse_args(words)


def _description(name: str) -> str:
    """The description of a command: its module's docstring, read without importing the module."""
    spec = find_spec(f"p2pdiloco.cli.{name}")
    assert spec is not None
    assert spec.origin is not None
    import ast

    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return " ".join(text.split(": ", 1)[-1].split())


if __name__ == "__main__":
    sys.exit(main())
