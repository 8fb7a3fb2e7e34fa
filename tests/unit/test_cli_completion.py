"""What a shell completes, asked of a real one."""

from __future__ import annotations

import subprocess

import pytest

from p2pdiloco.cli.arguments import COMMANDS
from p2pdiloco.cli.completion import script


def completed(*words: str) -> list[str]:
    """What bash offers for a line's last word."""
    line = " ".join(f"'{word}'" for word in ("p2pdiloco", *words))
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _p2pdiloco; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{script()}\n{ask}"], capture_output=True, text=True, check=True, timeout=20)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("st",), ["start", "status"]),
        (("join", "--boot"), []),
        (("start", "--boot"), ["--bootstrap"]),
        (("start", "x", "--access", ""), ["open", "invite", "list"]),
        (("export", "x", "--format", "s"), ["safetensors"]),
        (("completion", "b"), ["bash"]),
    ],
)
def test_commands_options_and_choices(words: tuple[str, ...], offered: list[str]) -> None:
    assert completed(*words) == offered


def test_every_command_is_there() -> None:
    assert completed("") == list(COMMANDS)
