"""Which tests check which rule of docs/protocol.md, as their docstrings say, and the site's page that lists them."""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "unit" / "protocol"
SPECIFICATION = ROOT / "docs" / "protocol.md"
ABOUT_THE_DOCUMENT = TESTS / "test_document.py"
"""Its tests check the documents, and no rule."""
ID = re.compile(r"\b[A-Z]\d[a-z]?\b")
INTRODUCTION = """\
# Tests of the protocol's rules

This page lists, for each rule of [protocol.md](protocol.md), the tests that fail without it.
A test names its rules at the beginning of its docstring.
The tests are in [tests/unit/protocol](../tests/unit/protocol/).
"""


def rules_of_tests() -> dict[tuple[str, str], set[str]]:
    """Map each test, as its file and its name, to the rules that its docstring names up to the first colon or stop."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        if path == ABOUT_THE_DOCUMENT:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                named = ID.findall(re.split(r"[:.]", ast.get_docstring(node) or "")[0])
                assert (path.name, node.name) not in found, f"{node.name} is defined twice in {path.name}"
                found[path.name, node.name] = set(named)
    return found


def page() -> str:
    """Return the text of the page: a table for each letter, a row for each rule."""
    tests: dict[str, list[str]] = {}
    for (file, test), rules in rules_of_tests().items():
        for rule in rules:
            tests.setdefault(rule, []).append(f"[`{test}`](../tests/unit/protocol/{file})")
    parts = [INTRODUCTION]
    for letter, rules_of_letter in groupby(sorted(tests), key=lambda rule: rule[0]):
        rows = [f"| {rule} | {', '.join(tests[rule])} |" for rule in rules_of_letter]
        parts.append("\n".join([f"\n## Rules {letter}\n", "| rule | tests |", "|---|---|", *rows, ""]))
    return "".join(parts)
