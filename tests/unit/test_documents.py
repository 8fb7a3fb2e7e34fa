"""The commands in the documents: each is one that its parser takes, each module and each target is there, each link
leads somewhere. That they do what the documents say, the integration tests of each command show; the tutorial's are run
as they stand (tests/integration/test_tutorial.py)."""

from __future__ import annotations

import re
import shlex
import tomllib
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from p2pdiloco.cli import argument_types
from p2pdiloco.cli.arguments import COMMANDS
from p2pdiloco.cli.main import _parse
from tests.site import WRITTEN, complete, prepare

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "adr").glob("*.md")),
    *sorted((ROOT / "tests").glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
VALUES = {
    "N": "2",
    "RATE": "10mbit",
    "S": "2",
    "T": "3",
    "SECONDS": "60",
    "FILE": "file",
    "NAME": "name",
    "PORT": "8000",
    "HOST:PORT": "127.0.0.1:8000",
}
"""What stands for a number, or for a word."""
STORIES = {"--story NAME": "--story partition-and-heal"}


class Mention(NamedTuple):
    """A command in a document."""

    document: str
    text: str
    is_whole: bool
    """It can be typed as it stands; else it may only be named."""


@cache
def mentions() -> list[Mention]:
    """All of them, once each."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        blocks = [block for _, block in re.findall(r"^```([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
        lines = [line for block in blocks for line in block.splitlines()]
        lines += re.findall(r"^    (\S.*)$", text, re.MULTILINE)
        whole = [(re.split(r"\s+#\s", line)[0].strip().removeprefix("$ "), True) for line in lines]
        named = [(line, False) for line in re.findall(r"`((?:p2pdiloco|python -m|make) [^`\n]+)`", text)]
        name = path.relative_to(ROOT).as_posix().removeprefix("docs/")
        found += [Mention(name, line, is_whole) for line, is_whole in whole + named]
    return list(dict.fromkeys(found))


def typed(program: str) -> list[Mention]:
    return [one for one in mentions() if one.text.startswith(program + " ")]


def words_of(text: str) -> list[str]:
    """Placeholders filled in, of alternatives the first one, what is optional given."""
    for story, whole in STORIES.items():
        text = text.replace(story, whole)
    text = re.sub(r"\\?\|[\w\\|]+", "", text).replace("[", "").replace("]", "").replace("...", "")
    return [VALUES.get(word, word) for word in shlex.split(text)]


@pytest.mark.parametrize("mention", typed("p2pdiloco"), ids=lambda one: f"{one.document}: {one.text}")
def test_a_command_is_one_that_can_be_typed(
    mention: Mention, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        argument_types.shutil, "which", lambda name: name
    )  # programs and extras of the reader's machine
    words = words_of(mention.text.partition(" && ")[0])[1:]
    with suppress(SystemExit):
        _parse(words)
    said = capsys.readouterr().err
    is_named = not mention.is_whole and ("the following arguments are required" in said or ": give " in said)
    assert not said or is_named, said


SHARED = (ROOT / "benchmarks" / "bench.py", ROOT / "tests" / "simulation" / "command_line.py")
"""Options of several programs."""


@pytest.mark.parametrize("mention", typed("python -m"), ids=lambda one: f"{one.document}: {one.text}")
def test_a_module_is_there_and_has_those_options(mention: Mention) -> None:
    words = words_of(mention.text.partition(" -- ")[0])[2:]  # what follows is a command of its own
    if words[0].partition(".")[0] not in ("benchmarks", "tests", "p2pdiloco"):
        return
    spec = find_spec(words[0])
    assert spec is not None, words[0]
    folders = [Path(place) for place in spec.submodule_search_locations or [Path(str(spec.origin)).parent]]
    sources = [path for folder in folders for path in folder.glob("*.py")]
    source = "".join(path.read_text() for path in [*sources, *SHARED])
    for option in (word.partition("=")[0] for word in words[1:] if word.startswith("--")):
        assert f'"{option}"' in source, option


def test_targets_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for one in typed("make") for word in one.text.split()[1:2] if re.fullmatch(r"[a-z-]+", word)}
    assert len(named) > 5
    assert named <= targets


def test_every_command_is_in_a_document() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    names = [name for name, command in COMMANDS.items() if not command.parts]
    names += [f"{name} {part}" for name, command in COMMANDS.items() for part in command.parts]
    assert {name for name in names if f"p2pdiloco {name}" not in text and f"`{name}" not in text} == set()


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ +(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    """To files that are there, and to headings that they have."""
    dead = []
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((\S+?)\)", path.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            page = path.parent / name if name else path
            if "://" not in target and not (page.exists() and (not anchor or anchor in anchors(page))):
                dead.append(f"{path.relative_to(ROOT)}: {target}")
    assert dead == []


def test_the_site_has_every_page(tmp_path: Path) -> None:
    """And the pages that it names are there."""
    prepare(tmp_path / "docs")
    told = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    named = set(re.findall(r"'(\S+\.md)'", str(told["nav"])))
    assert named == {*(path.name for path in (tmp_path / "docs").glob("*.md")), "adr/index.md"}
    assert named >= WRITTEN.keys()


def test_the_sites_links_to_files_of_the_repository_lead_to_copies(tmp_path: Path) -> None:
    site, root = tmp_path / "site", tmp_path / "root"
    for path, text in (
        ("site/index.html", '<a href="guide/">'),
        ("site/guide/index.html", '<a href="../index.html"><a href="../../peers/one.py#L3"><a href="../../peers">'),
        ("site/broken/index.html", '<a href="../../peers/none.py"><a href="../nowhere/">'),
        ("root/peers/one.py", "pass"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert complete(site, root) == ["../../peers/none.py", "../nowhere/"]
    guide = (site / "guide" / "index.html").read_text()
    assert guide == '<a href="../index.html"><a href="../files/peers/one.py#L3"><a href="../files/peers">'
    assert (site / "files" / "peers" / "one.py").read_text() == "pass"
    assert 'href="one.py"' in (site / "files" / "peers" / "index.html").read_text()
