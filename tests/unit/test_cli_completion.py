"""What a shell completes, asked of a real one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from p2pdiloco.cli.arguments import COMMANDS
from p2pdiloco.cli.completion import script
from p2pdiloco.cli.main import main


def completed(*words: str) -> list[str]:
    """What bash offers for the last word of a line."""
    line = " ".join(f"'{word}'" for word in ("p2pdiloco", *words))
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_p2pdiloco; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-c", f"{script('bash')}\n{ask}"], capture_output=True, text=True, check=True, timeout=20
    )
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
        (("--print-completion", "b"), ["bash"]),
        (("members", ""), ["add", "ban", "list"]),
        (("members", "add", "--exp"), ["--expires"]),
    ],
)
def test_commands_options_and_choices(words: tuple[str, ...], offered: list[str]) -> None:
    assert completed(*words) == offered


def test_every_command_is_there() -> None:
    assert completed("") == list(COMMANDS)


def test_any_other_value_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").touch()
    assert completed("start", "ru") == ["run.toml"]
    assert completed("join", "x", "--data", "ru") == ["run.toml"]


def test_the_program_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == script("bash") + "\n"


def test_zsh_reads_its_script() -> None:
    text = script("zsh")
    assert text.startswith("#compdef p2pdiloco")
    for name in (*COMMANDS, *(f"members_{part}" for part in COMMANDS["members"].parts)):
        assert f"_shtab_p2pdiloco_{name}_options=(" in text
    if shutil.which("zsh") is not None:
        subprocess.run(["zsh", "-n"], input=text, text=True, check=True, timeout=20)
