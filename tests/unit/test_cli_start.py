"""What ``start`` asks when another run of its name is live."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import pytest

from p2pdiloco.cli import start
from p2pdiloco.node.kept_runs import ConfigError
from p2pdiloco.node.run_folder import NameTakenError
from p2pdiloco.protocol.identifiers import RunId
from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.wire.records import RunRecord

RUN = RunId("a" * 40)
RECORD = RunRecord("story", 1000)


def decide(arguments: argparse.Namespace) -> str:
    return start._decider(arguments, RunConfig(name="story"))(RUN, RECORD)


@pytest.fixture
def arguments() -> argparse.Namespace:
    return argparse.Namespace(config="story.toml", bootstrap=["/ip4/192.0.2.1/tcp/1/p2p/x"], name=None)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [(["join"], ""), (["J"], ""), (["found"], "story-2"), (["", "what?", "f"], "story-2")],
)
def test_on_a_terminal_the_user_says(
    arguments: argparse.Namespace, answers: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Iterator[str] = iter(answers)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(given))
    assert decide(arguments) == expected
    assert list(given) == [], "each answer was asked for"


def test_without_a_terminal_both_commands_are_told(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(NameTakenError) as caught:
        decide(arguments)
    assert "p2pdiloco join /ip4/192.0.2.1/tcp/1/p2p/x --run aaaaaaaaaaaa. " in str(caught.value)
    assert "p2pdiloco start story.toml --bootstrap /ip4/192.0.2.1/tcp/1/p2p/x --name story-2" in str(caught.value)


def test_a_name_on_the_command_line_is_checked_like_the_files() -> None:
    given = argparse.Namespace(config="stdlib-tiny", name="mine", access="list")
    config = start._config(given)
    assert (config.name, config.access) == ("mine", "list")
    given.name = "no spaces please"
    with pytest.raises(ConfigError, match="--name no spaces please: write letters"):
        start._config(given)
