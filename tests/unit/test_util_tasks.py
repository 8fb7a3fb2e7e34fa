"""Every task of a node that has no end of its own has a policy for its failure: it is started again and told
(``Tasks.keep``), or it is one of those below. ``integration/test_lasting_tasks.py`` shows what a failure leads to."""

from __future__ import annotations

import ast
from pathlib import Path

import p2pdiloco

PACKAGE = Path(p2pdiloco.__file__).parent
STARTS = ("spawn", "create_task", "ensure_future")
"""Functions that start a task and do not look after it."""
POLICIES = {
    ("discovery/detours.py", "_accept_all"): "the next use of the detour makes a new one",
    ("node/learner_process.py", "_write"): "the learner's end follows, and the supervisor starts another",
    ("node/notifier.py", "_keep"): "each alert's failure is caught and told",
    ("swarm/reachability.py", "keep"): "of a command that ends in seconds (doctor)",
    ("util/tasks.py", "_run_again"): "it is what starts tasks again",
}


def is_endless(function: ast.AsyncFunctionDef) -> bool:
    loops = [node for node in ast.walk(function) if isinstance(node, ast.While)]
    return any(isinstance(loop.test, ast.Constant) and loop.test.value for loop in loops)


def functions_in(tree: ast.AST) -> dict[str, bool]:
    """Names of coroutine functions, and whether they are endless."""
    return {node.name: is_endless(node) for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}


def started(tree: ast.AST, elsewhere: set[str]) -> set[str]:
    """The endless coroutines that a module starts as tasks nobody looks after; ``elsewhere``: of all modules."""
    here, found = functions_in(tree), set[str]()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        work = call.args[0]
        if name in STARTS and isinstance(work, ast.Call):
            called = work.func.attr if isinstance(work.func, ast.Attribute) else getattr(work.func, "id", "")
            if here.get(called, called in elsewhere):
                found.add(called)
    return found


def test_every_task_without_an_end_has_a_policy() -> None:
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    endless = {name for tree in trees.values() for name, is_one in functions_in(tree).items() if is_one}
    found = {(module, name) for module, tree in trees.items() for name in started(tree, endless)}
    assert found == POLICIES.keys()
