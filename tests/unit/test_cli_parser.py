"""What was probably meant; and that saying so waits for nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.netbed import __main__ as netbed
from p2pdiloco.cli.arguments import COMMANDS
from p2pdiloco.cli.errors import FAILED, INTERRUPTED, NOBODY_THERE, REPAIR
from p2pdiloco.cli.main import main
from p2pdiloco.peer.ending import APART
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
        (("wacth", "FILE"), "did you mean watch?"),
        (("members", "ad"), "there is no command members ad: did you mean members add?"),
        (("members", "xyzzy"), "there is no command members xyzzy\n"),
        (("members", "ban", "x", "--rnu", "y"), "there is no option --rnu: did you mean --run?"),
        (("members", "--jsno"), "there is no option --jsno: did you mean --json?"),
        (("start", "x", "--journl"), "there is no option --journl\n"),
        (("--verison",), "there is no option --verison: did you mean --version?"),
        (("xyzzy",), "there is no command xyzzy\n"),
        (("demo", "--setps", "9"), "there is no option --setps: did you mean --steps?"),
        (("demo", "--setps=9"), "there is no option --setps: did you mean --steps?"),
        (("watch", "--xyzzy"), "there is no option --xyzzy\n"),
    ],
)
def test_a_typo_is_answered_with_what_is_near(
    words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, *words)
    assert sentence in said
    assert "--help" in said, "where to read on"


def test_what_follows_two_dashes_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        netbed.main(["nothing", "--", "ls", "--sedes"])
    assert "no option" not in capsys.readouterr().err


def test_an_abbreviated_option_is_no_typo(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no option" not in complaint(capsys, "demo", "--time-limi", "nothing")


def test_it_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"p2pdiloco {VERSION}\n"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_its_help_names_each_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = shown(capsys).split("Exit status: ")
    named = [int(part.split()[0]) for part in said.split("; ")]
    assert named == [0, FAILED, REPAIR, NOBODY_THERE, APART, INTERRUPTED]


def test_the_demo_takes_as_long_wherever_that_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    makefile, readme = (root / "Makefile").read_text(), (root / "README.md").read_text()
    told = [next(line for line in makefile.splitlines() if line.startswith("demo:"))]
    told.append(next(line for line in readme.splitlines() if line.startswith("The demo takes ")))
    for text in (shown(capsys, "demo"), *told):
        assert "a minute or two" in text


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
