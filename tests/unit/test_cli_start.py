"""What ``start`` asks when another run of its name is live."""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import select
import sys
from collections.abc import Iterator

import pytest

from p2pdiloco.cli import main as cli
from p2pdiloco.cli import start
from p2pdiloco.node.run_folder import NameTakenError
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.swarm.run_index import ConfigError
from p2pdiloco.wire.directory_records import RunRecord

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
    prompts: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt: prompts.append(prompt) or next(given))
    assert decide(arguments) == expected
    assert list(given) == [], "each answer was asked for"
    assert prompts[0].startswith("a run called story (aaaaaaaaaaaa, 1,000 parameters) is being trained already\n")


def test_who_leaves_the_question_is_told_both_commands(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(_: str) -> str:
        raise EOFError

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", leave)
    with pytest.raises(NameTakenError, match="To take part in it"):
        decide(arguments)


def test_who_interrupts_a_command_before_it_has_begun_sees_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it imports takes a second."""

    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", interrupted)
    assert cli.main(["pause"]) == 130


ASKING = """
import argparse, signal, sys
signal.alarm(60)  # rather than wait for ever
from p2pdiloco.cli import main, peer_options as peer
async def run(arguments):
    return 7 if peer.ask("really? ") is None else 8
sys.exit(main.execute(run, argparse.Namespace(log_level="info", log_format="text")))
"""


@pytest.mark.parametrize(("key", "status"), [(b"\x03", 130), (b"\x04", 7), (b"yes\n", 8)])
def test_a_question_is_left_by_ctrl_c_and_ctrl_d(key: bytes, status: int) -> None:
    """On a terminal, within the event loop. Before, the first Ctrl+C was not heard."""
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-c", ASKING])
    told = b""
    while b"really? " not in told:
        told += os.read(terminal, 1 << 12)
    os.write(terminal, key)
    with contextlib.suppress(OSError):  # the terminal goes with the child
        while True:
            if not select.select([terminal], [], [], 1.0)[0]:
                os.write(terminal, key)  # it may have come between the question's last letter and the waiting
            elif data := os.read(terminal, 1 << 12):
                told += data
            else:
                break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    os.close(terminal)
    assert b"Traceback" not in told


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
