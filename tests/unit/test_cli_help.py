"""Help: the same groups in the same order, and every default in the same form."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from p2pdiloco.cli.arguments import COMMANDS, Command, add_common_arguments
from p2pdiloco.cli.main import main
from p2pdiloco.cli.parser import Parser

SHARED = ["network", "storage", "machine", "publishing", "reporting"]
FIRST = {
    "start": ["--name", "--access", "--bootstrap", "--data", "--device", "--state"],
    "join": ["--run", "--follow", "--data", "--device", "--state"],
    "resume": ["--run", "--bootstrap", "--data", "--device", "--state"],
}


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    def made(name: str, command: Command) -> tuple[str, argparse.ArgumentParser]:
        parser = Parser(prog=name)
        command.add_arguments(parser)
        add_common_arguments(parser, is_quiet=command.is_quiet)
        return name, parser

    for name, command in COMMANDS.items():
        if command.parts:
            yield from (made(f"{name} {part}", one) for part, one in command.parts.items())
        else:
            yield made(name, command)


PARSERS = dict(parsers())


def shown(actions: list[argparse.Action]) -> list[str]:
    return [one.option_strings[-1] for one in actions if one.option_strings and one.help != argparse.SUPPRESS]


@pytest.mark.parametrize("command", FIRST)
def test_what_peers_share_stands_in_the_same_groups(command: str) -> None:
    _, options, *groups = PARSERS[command]._action_groups
    first = [option for option in shown(options._group_actions) if option != "--invite-file"]
    assert first == ["--help", *FIRST[command]]
    assert [group.title for group in groups] == SHARED
    others = [shown(group._group_actions) for group in PARSERS["start"]._action_groups[2:]]
    assert [shown(group._group_actions) for group in groups] == others


def test_options_of_logs_come_last() -> None:
    for name, parser in PARSERS.items():
        last = parser._action_groups[-1]
        assert last.title == "reporting", name
        assert shown(last._group_actions)[-2:] == ["--log-level", "--log-format"], name


@pytest.mark.parametrize("command", PARSERS)
def test_every_option_says_what_holds_without_it(command: str) -> None:
    """At the end of its help, in the same form; what only can be given says nothing."""
    for action in PARSERS[command]._actions:
        if not action.option_strings or action.help == argparse.SUPPRESS or action.nargs == 0:
            continue
        text = str(action.help) % vars(action)
        ending = r"\(required\)$" if action.required else r"\(default: [^()]+\)$"
        assert re.search(ending, text), f"{action.option_strings[-1]}: {text}"
        assert text.count("default") == (not action.required), action.option_strings[-1]


def test_an_option_is_about_the_same_in_all_commands() -> None:
    """Of one name there is one metavar, apart from those that say which values a command has."""
    found: dict[str, set[object]] = {}
    for parser in PARSERS.values():
        for action in parser._actions:
            for option in action.option_strings:
                found.setdefault(option, set()).add(action.metavar)
    several = {option for option, metavars in found.items() if len(metavars) > 1}
    assert several == {"--page"}


@pytest.mark.parametrize("command", [*COMMANDS, *(f"members {part}" for part in COMMANDS["members"].parts)])
def test_every_page_of_help_begins_with_what_the_command_does(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    _, description, *_ = re.split(r"\n\n", capsys.readouterr().out)
    assert re.match(r"[A-Z][a-z]+ ", description), description
    assert "`" not in description
