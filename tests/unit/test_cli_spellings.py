"""Old spellings of commands and options: each still works, names its successor, and is shown nowhere."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from p2pdiloco.cli import spellings
from p2pdiloco.cli.arguments import COMMANDS
from p2pdiloco.cli.completion import script
from p2pdiloco.cli.main import _parse, main
from p2pdiloco.version import VERSION

PLAN = "plan stdlib-tiny --peers 4 --step-time 1"
COMMAND_LINES = [
    ("top", "watch"),
    ("top state --speed 2", "watch state --speed 2"),
    ("page out", "watch out --page auto"),
    ("page out --port 8000", "watch out --page 8000"),
    ("events out --follow --kind joined", "watch --events out --follow --kind joined"),
    ("invite --role admin --expires 2h", "members add --role admin --expires 2h"),
    ("invite --address A --address B", "members add --bootstrap A B"),
    ("ban PEER --run story", "members ban PEER --run story"),
    ("members --id --run story", "members list --id --run story"),
    ("bootstrap --initial-peers A B", "bootstrap --bootstrap A B"),
    ("bootstrap --meet A", "bootstrap --rendezvous A"),
    (f"{PLAN} --link 20mbit", f"{PLAN} --up 20mbit"),
    ("join x --no-relay", "join x --relay off"),
    ("fetch x --no-map", "fetch x --no-port-mapping"),
    ("join x --tensor-threads=3", "join x --merge-threads=3"),
    ("start x --initial_peers A", "start x --bootstrap A"),
    ("status x --identity_path key", "status x --identity key"),
    ("join x --identity_path=key", "join x --identity=key"),
    ("join x --host_maddrs A B", "join x --directory-listen A B"),
    ("join x --announce_maddrs A", "join x --directory-announce A"),
]
"""Old and new."""
SILENT = {"members --id", *spellings.HIVEMIND}
"""They are no older than others, or stay."""


def typed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[argparse.Namespace, list[str]]:
    """What is understood, and what is said."""
    found = _parse(line.split())
    return found, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("old", "new"), COMMAND_LINES, ids=[old for old, _ in COMMAND_LINES])
def test_an_old_spelling_works_and_names_its_successor(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, notices = typed(old, capsys)
    assert (found, []) == typed(new, capsys)
    is_silent = any(word in old for word in SILENT)
    assert bool(notices) != is_silent
    for notice in notices:
        told = re.fullmatch(r"p2pdiloco: (\S+) is now (.+); the old spelling works until 0\.2", notice)
        assert told is not None
        assert told[1] in re.split("[ =]", old)
        assert told[2].split()[0].lstrip("-") in new
    assert len(notices) == len(set(notices)), "one line for each"


def test_every_old_spelling_is_tried_here() -> None:
    lines = [old for old, _ in COMMAND_LINES]
    for key in (*spellings.RENAMED, *spellings.HIVEMIND):
        option = key.split()[-1]
        is_tried = any(option in re.split("[ =]", line) for line in lines)
        assert is_tried or key == "completion", key


def test_the_old_way_to_print_a_completion_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "zsh"])
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert said.out.startswith("#compdef p2pdiloco")
    assert said.err == "p2pdiloco: completion is now --print-completion; the old spelling works until 0.2\n"


def test_an_old_name_is_a_name_only_where_it_stands_for_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    found, notices = typed("export top --run events", capsys)
    assert (found.source, found.run, notices) == ("top", "events", [])
    with pytest.raises(SystemExit):
        _parse(["bootstrap", "--port", "80"])
    assert "there is no option --port" in capsys.readouterr().err


def test_what_follows_two_dashes_is_kept() -> None:
    words = ["join", "--no-map", "--", "--no-map", "top"]
    assert spellings.translate(words)[0] == ["join", "--no-port-mapping", "--", "--no-map", "top"]


def test_old_spellings_go_with_the_release_that_the_notice_names() -> None:
    """When this fails, delete ``RENAMED``; ``HIVEMIND`` stays."""
    assert tuple(map(int, VERSION.split("."))) < tuple(map(int, spellings.UNTIL.split(".")))


def test_help_and_completion_show_no_old_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    pages = {}
    for name, command in COMMANDS.items():
        for words in [[name], *([name, part] for part in command.parts)]:
            with pytest.raises(SystemExit):
                main([*words, "--help"])
            pages[" ".join(words)] = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    top = capsys.readouterr().out
    old = {key.split()[-1] for key in (*spellings.RENAMED, *spellings.HIVEMIND)} - {"--address", "--port"}
    options = {word for word in old if word.startswith("--")} | {"--no-average", "--journal", "--learner"}
    for text in (*pages.values(), script("bash"), script("zsh")):
        assert {option for option in options if re.search(rf"(?<![\w-]){option}(?![\w-])", text)} == set()
    assert {word for word in old - options if re.search(rf"^    {word} ", top, re.MULTILINE)} == set()
    commands = {word for word in old - options if f"_shtab_p2pdiloco_{word}_" in script("bash")}
    assert commands == set()


def test_the_changelog_lists_them() -> None:
    text = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    rows = [(old.split(), new.split()) for old, new in re.findall(r"^  \| `(.+)` \| `(.+)` \|$", text, re.MULTILINE)]
    for key, successor in (spellings.RENAMED | spellings.HIVEMIND).items():
        assert any(key.split()[-1] in old and successor.split()[0] in new for old, new in rows), key
