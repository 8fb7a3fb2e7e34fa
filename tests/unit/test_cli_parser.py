"""What was probably meant; and that saying so waits for nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from p2pdiloco.cli.arguments import COMMANDS
from p2pdiloco.cli.main import main
from p2pdiloco.version import VERSION


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("strat",), "there is no command strat: did you mean start?"),
        (("replya", "FILE"), "did you mean replay?"),
        (("xyzzy",), "there is no command xyzzy\n"),
        (("simulate", "--sedes", "1-9"), "there is no option --sedes: did you mean --seeds?"),
        (("simulate", "--sedes=1-9"), "there is no option --sedes: did you mean --seeds?"),
        (("replay", "--xyzzy"), "there is no option --xyzzy\n"),
        (("bench", "lnik"), "lnik"),
    ],
)
def test_a_typo_is_answered_with_what_is_near(
    words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, *words)
    assert sentence in said
    assert "--help" in said, "where to read on"


def test_what_follows_two_dashes_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no option" not in complaint(capsys, "bench", "nothing", "--", "ls", "--sedes")


def test_an_abbreviated_option_is_no_typo(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no option" not in complaint(capsys, "simulate", "--scenari", "nothing")


def test_it_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"p2pdiloco {VERSION}\n"


@pytest.mark.heavy
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_typo_loads_nothing_heavy(command: str) -> None:
    look = (
        "import sys; from p2pdiloco.cli.main import main\n"
        f"try: main([{command!r}, '--xyzzy'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'hivemind', 'uvloop', 'numpy', 'cryptography') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert "there is no option --xyzzy" in ended.stderr
    assert ended.stdout == "[]\n"
