"""docs/protocol.md and the tests in this folder name each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[2] / "docs" / "protocol.md"
RULE = re.compile(r"^\| ([A-Z]\d[a-z]?) \| (.+?) \| (`test_.+`) \|$", re.MULTILINE)
"""A rule's line: its id, its sentence, the tests that would fail without it."""
LINE = re.compile(r"^\| ([A-Z]\d[a-z]?) \|", re.MULTILINE)
ID = re.compile(r"\b[A-Z]\d[a-z]?\b")


def rules() -> dict[str, set[str]]:
    """Each rule's id, with the tests that the document names."""
    return {rule: set(re.findall(r"`(test_\w+)`", named)) for rule, _, named in RULE.findall(DOCUMENT.read_text())}


def marked() -> dict[str, set[str]]:
    """Each test of this folder but these, with the rules that its docstring begins with (up to the colon or stop)."""
    found: dict[str, set[str]] = {}
    for path in sorted(HERE.glob("test_*.py")):
        if path.name != Path(__file__).name:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    assert node.name not in found, f"{node.name} is there twice"
                    found[node.name] = set(ID.findall(re.split(r"[:.]", ast.get_docstring(node) or "")[0]))
    return found


def test_every_line_of_a_rule_names_a_test() -> None:
    lines = LINE.findall(DOCUMENT.read_text())
    assert len(lines) == len(set(lines)), "an id is there twice"
    assert sorted(lines) == sorted(rules())
    assert len(lines) > 90


def test_every_test_that_a_rule_names_carries_the_rules_id() -> None:
    carried = marked()
    missing = [
        f"{rule}: {test}" for rule, named in rules().items() for test in named if rule not in carried.get(test, ())
    ]
    assert missing == []


def test_every_test_carries_the_id_of_a_rule_that_is_in_the_document() -> None:
    known = rules().keys()
    assert [test for test, carried in marked().items() if not carried or carried - known] == []
