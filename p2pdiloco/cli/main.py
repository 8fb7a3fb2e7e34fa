"""``p2pdiloco``: the command line.

Exit status: 0 success; 1 a failure while running; 2 fix the command, configuration or data; 3 nobody could be reached,
or the requested run does not exist; 4 the run is complete here, but peers that were lost together may have another
model of it; 130 interrupted before it began.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from p2pdiloco.cli import invite_sources
from p2pdiloco.cli.arguments import COMMANDS, Command, add_common_arguments
from p2pdiloco.cli.errors import FAILED, INTERRUPTED, REPAIR, CommandError, as_command_errors
from p2pdiloco.cli.parser import Parser, meant
from p2pdiloco.training import PASSIVE
from p2pdiloco.util import status_pipe
from p2pdiloco.util.errors import UserError
from p2pdiloco.version import VERSION


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _be_lenient()
    try:
        arguments = _parse(_attach_status_pipe(words))
        module = _load(arguments.command)
        if argv is None and hasattr(module, "prepare"):  # this process is the command, and nothing else
            module.prepare(arguments)
        part = getattr(arguments, "part", None)
        with as_command_errors(ValueError):
            return execute(getattr(module, f"run_{part}" if part else "run"), arguments)
    except UserError as error:
        return _tell(error)
    except KeyboardInterrupt:  # while it is still being imported
        return INTERRUPTED


def _be_lenient() -> None:
    """Let this process print paths that are no valid text, and not fail from other libraries' warnings."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    if any(option.startswith("e") for option in sys.warnoptions):  # python -W error, PYTHONWARNINGS=error
        os.environ.pop("PYTHONWARNINGS", None)  # for the processes that this one starts
        warnings.simplefilter("default")


def _tell(error: UserError) -> int:
    """Print an error for the user, and report it to the program that started this one; returns the exit status."""
    from p2pdiloco.util import logs

    status_pipe.writer.report_exit(error.status, str(error))
    print("p2pdiloco:", logs.printable(str(error), keeps="\n"), file=sys.stderr)
    return error.status


def _load(command: str) -> Any:
    """The module that runs ``command``, and may ``prepare`` it before there is a loop. What is imported for it is no
    garbage: looking for some meanwhile, and in it ever after, is an eighth of a node's start."""
    os.environ.update(PASSIVE | os.environ)
    gc.disable()
    try:
        return import_module(f"p2pdiloco.cli.{command}")
    except FileNotFoundError as error:  # libraries look for a folder while they are imported
        raise CommandError(
            f"{error.strerror or error}: set TMPDIR to a folder that can be written (in a container, mount a tmpfs at "
            "/tmp)",
            REPAIR,
        ) from error
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
    except UserError as error:
        return _tell(error)
    except BrokenPipeError:  # ``p2pdiloco watch --events ... | head``
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
    words = list(words)
    top = Parser(
        prog="p2pdiloco",
        description="Train one language model together, peer to peer, over the internet.",
        epilog=" ".join((__doc__ or "").split("\n\n", 1)[1].split()),
    )
    top.add_argument("--version", action="version", version=f"p2pdiloco {VERSION}", help="print the version and exit")
    top.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=["bash", "zsh"],
        help='print a completion script for a shell; in ~/.bashrc: eval "$(p2pdiloco --print-completion bash)"',
    )
    first = next(iter(words), "")
    if first.startswith("-"):
        later = next((word for word in words if word in COMMANDS), None)
        if later and first not in ("-h", "--help", "--version"):
            top.error(f"options come after the command: p2pdiloco {later} ...")
        top.check(words)
    elif first in COMMANDS and (part := COMMANDS[first].usual_part):
        second = next(iter(words[1:]), "--")
        if second.startswith("-") and second not in ("-h", "--help"):
            words.insert(1, part)
    _add_commands(top, COMMANDS, words)
    arguments = top.parse_args(words)
    invite_sources.resolve(arguments)
    return arguments


class _PrintCompletion(argparse.Action):
    """Print the script, and exit."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: argparse.Namespace, shell: object, __: object = None
    ) -> None:
        from p2pdiloco.cli.completion import script

        print(script(str(shell)))
        parser.exit()


def _add_commands(parser: Parser, table: Mapping[str, Command], words: Sequence[str], path: str = "") -> None:
    """Add the commands of ``table`` to ``parser``; the arguments only of that with which ``words`` begin. ``path``: the
    command that ``parser`` is of."""
    chosen, *rest = words or [""]
    if chosen and not chosen.startswith("-") and chosen not in table:
        before = f"{path} " if path else ""
        parser.error(f"there is no command {before}{chosen}{meant(chosen, table, before)}")
    commands = parser.add_subparsers(dest="part" if path else "command", required=True, metavar="COMMAND")
    for name, command in table.items():
        is_chosen = name == chosen
        description = _description(path or name, name if path else "") if is_chosen else None
        sub = commands.add_parser(name, help=command.help, description=description)
        if is_chosen and command.parts:
            _add_commands(sub, command.parts, rest, name)
        elif is_chosen:
            command.add_arguments(sub)
            add_common_arguments(sub, is_quiet=command.is_quiet)
            sub.check(rest)


def _description(command: str, part: str) -> str:
    """The description of a command: its module's docstring, or that of its function for ``part``, read without
    importing the module."""
    spec = find_spec(f"p2pdiloco.cli.{command}")
    assert spec is not None
    assert spec.origin is not None
    import ast

    module = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    if not part:
        return _in_one_line((ast.get_docstring(module) or "").split(": ", 1)[-1])
    (function,) = [
        node for node in module.body if isinstance(node, ast.AsyncFunctionDef) and node.name == f"run_{part}"
    ]
    return _in_one_line(ast.get_docstring(function) or "")


def _in_one_line(docstring: str) -> str:
    return " ".join(docstring.replace("``", "").split())


if __name__ == "__main__":
    sys.exit(main())
