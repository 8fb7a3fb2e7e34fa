"""The house rules that protect a reader: import direction, one meaning a name, purity. What is listed here as an
exception may only become less."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "p2pdiloco"
TWO_SIDES = """
    AdoptStep Batches BlockFinished Evaluate Evaluated Failed MoveEnd Shift Snapshot Snapshotted Train Pause
    Channel Checkpoint Checks Connection Directory Driver Fault Learner LearnerLife Network Outcome PeerSetting World
    DiLoCoCallback Commit Peer Swarm Workers
"""
"""Classes of one name and one meaning in two places: what the machine says and what its learner is told, a world that
is real and one that is simulated."""
TWO_MEANINGS = "Blocks Chain Part Piece Role"
"""Classes of one name and two meanings, still."""
CIRCLES = {
    frozenset({"training.multi_rank", "training.node_link"}),
}
"""Modules that know each other's types, still."""
OPENS_OTHERS = """
    cli/demo cli/export cli/invite_sources cli/main demo/local_swarm nat/port_mapping node/diagnostics node/run_creation
    training/corpus training/dataset_files training/export training/generation training/gguf_export
    training/huggingface training/learner_options training/tokenized_dataset util/files util/process
"""
"""Modules that open files of the user or of the system, beside those of a peer's state."""
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PARTS = "core|replication|aggregation|contributions|shutdown|evaluations|heartbeats|repair|block_assignment"


@cache
def modules() -> dict[str, ast.Module]:
    """By path below the package, without its ending."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).with_suffix("").as_posix(): ast.parse(path.read_text()) for path in paths}


def classes() -> list[tuple[str, ast.ClassDef]]:
    """With their modules."""
    return [(name, item) for name, tree in modules().items() for item in tree.body if isinstance(item, ast.ClassDef)]


def words_in_code() -> set[str]:
    """The words of which the package's names are made."""
    found: set[str] = set()
    for name, tree in modules().items():
        found.update(re.split(r"[/_]", name))
        for node in ast.walk(tree):
            named = getattr(node, "name", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
            if isinstance(node, ast.Name):
                named = node.id
            if isinstance(named, str):
                found.update(part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", named))
    return found


def glossary() -> list[str]:
    """The words of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Glossary")[2]
    rows = re.findall(r"^\| ([a-z][^|]*) \|", text, re.MULTILINE)
    return [word.strip() for row in rows if row != "word" for word in row.split(",")]


def test_no_pattern_lets_a_last_line_break_through() -> None:
    """``$`` matches before one."""
    patterns = {
        p.name: re.findall(r"""pattern=r?["'][^\n]*\$["']""", p.read_text())
        for p in PACKAGE.rglob("*.py")
        if "planted" not in p.name
    }
    assert not {name: found for name, found in patterns.items() if found}


def test_each_word_of_the_glossary_is_used_in_the_code() -> None:
    words, used = glossary(), words_in_code()
    assert len(words) > 30
    parts = {part for word in words for part in re.findall(r"[a-z]{2,}", word)} - {"window"}
    assert not {part for part in parts if not used & {part, part + "s", part.rstrip("e") + "ing"}}


def defined() -> set[str]:
    """Classes, functions, and methods with their class's name, of the package."""
    found = {item.name for tree in modules().values() for item in ast.walk(tree) if isinstance(item, DEFINITIONS)}
    for _, item in classes():
        found.update(f"{item.name}.{method.name}" for method in item.body if isinstance(method, DEFINITIONS))
    return found


def test_the_architecture_page_names_only_files_and_functions_that_exist() -> None:
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "architecture.md").read_text())
    paths = {text for text in quoted if re.fullmatch(r"[\w/]+(/|\.py|\.c)|\w+\.toml", text)}
    names = {text for text in quoted if re.fullmatch(r"[A-Za-z_]\w*(\.[a-z_]\w*)?", text)}
    known = defined()
    assert len(paths) > 60
    assert len(names) > 25
    assert {path for path in paths if not (PACKAGE / path).exists() and not (ROOT / path).exists()} == set()
    assert {name for name in names - paths if name not in known} == set()


def test_no_class_name_has_two_meanings_but_those_that_are_known_for_it() -> None:
    places = defaultdict(set)
    for name, item in classes():
        if not item.name.startswith("_"):
            places[item.name].add(name)
    twice = {name for name, where in places.items() if len(where) > 1}
    assert not twice - set(TWO_SIDES.split()) - set(TWO_MEANINGS.split())
    assert twice >= set(TWO_MEANINGS.split()), "one has a single meaning now: take it off the list"


def test_modules_do_not_import_each_other_in_circles_but_those_that_are_known_for_it() -> None:
    known = {name.replace("/", ".").removesuffix(".__init__") for name in modules()}
    imports = {name.replace("/", "."): set(imported(tree, known)) for name, tree in modules().items()}
    reached = {name: reachable(name, imports) for name in imports}
    circles = {frozenset(o for o in reached[n] if n in reached.get(o, ())) for n in imports if n in reached[n]}
    assert circles <= CIRCLES


def imported(tree: ast.Module, known: set[str]) -> list[str]:
    """Modules of the package that one imports, for its types, too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("p2pdiloco."):
            module = (node.module or "").removeprefix("p2pdiloco.")
            found += [f"{module}.{a.name}" if f"{module}.{a.name}" in known else module for a in node.names]
    return found


def reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    """All that a module needs."""
    found: set[str] = set()
    todo = list(imports[start])
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += imports.get(module, ())
    return found


def test_node_and_peer_read_the_machine_through_its_view() -> None:
    for folder in ("node", "peer"):
        for path in sorted((PACKAGE / folder).glob("*.py")):
            assert not re.findall(rf"machine\.(?:{PARTS})\b", path.read_text()), path.name


def test_files_of_a_peers_state_are_opened_in_one_way() -> None:
    """By ``util.files``: a FIFO among them makes nothing wait for ever, and nobody else may read what is made."""
    found = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name not in OPENS_OTHERS.split():
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                is_open = isinstance(node.func, ast.Name) and called == "open"
                is_path = isinstance(node.func, ast.Attribute) and called == "open" and bool(node.args)
                is_path = is_path and isinstance(node.args[0], ast.Constant)
                is_plain = (is_open or is_path) and all(keyword.arg != "opener" for keyword in node.keywords)
                if is_plain or called in ("read_bytes", "read_text", "write_bytes", "write_text", "mkdir"):
                    found.append(f"{name}:{node.lineno}: {called}")
    assert not found
