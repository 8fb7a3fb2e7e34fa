"""What is planted still fits its code, and the tests that it names fail."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.seeded_bugs import peer, protocol
from tests.seeded_bugs.inject import PlantingError, change_on_import, plant, planted, source_of
from tests.seeded_bugs.patterns import PatternError, replaced

BUGS = peer.BUGS + protocol.BUGS
ROOT = Path(__file__).parents[2]


def test_every_planted_bug_fits_and_names_tests_that_are_there() -> None:
    """And each name in it is there: else every test finds it, whatever it tests."""
    texts = dict[str, str]()
    with TemporaryDirectory() as folder:
        for number, bug in enumerate(BUGS):
            text = ast.unparse(planted(bug, source_of(bug.module)))
            Path(folder, f"bug{number}.py").write_text(f"# {bug.name}\n{text}")
            assert bug.killed_by, bug.name
            for test in bug.killed_by:
                path, _, name = test.partition("::")
                if path not in texts:
                    texts[path] = (ROOT / path).read_text()
                assert f"def {name.rpartition('::')[2].partition('[')[0]}(" in texts[path], (bug.name, test)
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F823", folder]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not found.returncode, found.stdout


class Renamed(ast.NodeTransformer):
    """Every variable that a function assigns gets another name."""

    def __init__(self) -> None:
        self._locals: list[set[str]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        shared = {n for one in ast.walk(node) if isinstance(one, ast.Global | ast.Nonlocal) for n in one.names}
        self._locals.append(names - shared)
        self.generic_visit(node)
        self._locals.pop()
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if any(node.id in names for names in self._locals):
            node.id = f"renamed_{node.id}"
        return node


@pytest.mark.long
def test_planted_bugs_fit_after_every_local_variable_is_renamed() -> None:
    """A name that nobody outside of a function sees is the author's to change."""
    renamed = {
        module: ast.unparse(Renamed().visit(ast.parse(source_of(module)))) for module in {bug.module for bug in BUGS}
    }
    for bug in BUGS:
        planted(bug, renamed[bug.module])


def test_a_pattern_knows_variables_gaps_and_parameters() -> None:
    source = """
import math

def f(first, second):
    found = math.sqrt(first)
    log(found)
    if found > second:
        second = found
    return found
"""
    made = replaced(source, "f", "if x > y:\n    ...", "if x >= y:\n    ...")
    assert "if found >= second:\n        second = found" in ast.unparse(made)
    assert "return 2 * found" in ast.unparse(replaced(source, "f", "return x", "return 2 * x"))
    assert "log(first)" in ast.unparse(replaced(source, "f(a)", "log(x)", "log(a)"))
    with pytest.raises(PatternError, match="stands 0 times"):
        replaced(source, "f", "math.exp(x)", "0")
    with pytest.raises(PatternError, match="stands 2 times"):
        replaced(source.replace("log(found)", "log(found), log(first)"), "f", "log(x)", "0")
    with pytest.raises(PatternError, match="stands 0 times"):
        replaced(source, "f", "if x > x:\n    ...", "pass")
    with pytest.raises(PatternError, match="needs other"):
        replaced(source, "f", "log(x)", "log(other)")


def test_planted_bugs_have_names_of_their_own_and_are_many() -> None:
    assert max(Counter(bug.name for bug in BUGS).values()) == 1
    assert len(BUGS) >= 300


@pytest.mark.timeout(900)
def test_planted_bugs_are_killed() -> None:
    """A fresh sample each time; its seed is printed and repeats it. ``make planted`` judges all."""
    command, environment = [sys.executable, "-m", "tests.seeded_bugs", "--jobs", "2"], {**os.environ, "CI": "true"}
    done = subprocess.run(
        [*command, "--sample", "24"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lived = [line for line in done.stdout.splitlines() if " killed " not in line]  # CI shows a part of what is told
    assert done.returncode == 0, "\n".join(lived) + done.stderr


def test_a_bug_that_no_longer_fits_is_an_error() -> None:
    bug = BUGS[0]._replace(old="this_stands_nowhere")
    with pytest.raises(PlantingError, match="write it anew"):
        plant(bug)


def test_a_bug_in_a_module_that_is_imported_already_is_an_error() -> None:
    with pytest.raises(PlantingError, match="imported already"):
        change_on_import("tests.seeded_bugs.peer", lambda source: source)
