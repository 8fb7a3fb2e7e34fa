"""Planting bugs: a module of ours is imported with a change, in this process, and no file is touched.

Rules of this file:
1. What is planted is planted before the module is imported, once, and stays for the process's life: whoever wants the
   sound program back takes another process. A module that is there already is an error, never a bug that nobody sees.
2. A bug is a pattern on the module's syntax tree (``patterns``), so that it survives other formatting, comments and
   names of variables. A pattern that no longer matches is an error, too: the bug is then written anew, or given up.
3. Nothing of ours is imported here, so that any module can be planted in.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from tests.seeded_bugs.patterns import PatternError, replaced

Change = Callable[[str], str | ast.Module]
"""A module's source to what is compiled in its place."""


class PlantingError(Exception):
    """A bug cannot be planted; the message says why."""


class Bug(NamedTuple):
    """One small wrong decision."""

    name: str
    module: str
    where: str
    """The function or class, such as ``Queue.put``; empty: the module's own statements."""
    old: str
    """The pattern that is replaced; see ``patterns``."""
    new: str
    """The code that takes its place."""
    harm: str
    """What the bug does to a run."""
    killed_by: tuple[str, ...] = ()
    """Tests that must fail with it: ``path::name``."""


def plant(bug: Bug) -> None:
    """From now on ``bug`` is in this process.

    Raises:
        PlantingError: its pattern does not match any more, or the module is imported already.
    """
    planted(bug, source_of(bug.module))
    change_on_import(bug.module, lambda source: planted(bug, source))


def planted(bug: Bug, source: str) -> ast.Module:
    """The module's tree with the bug.

    Raises:
        PlantingError: the pattern does not match just once, or nothing would change.
    """
    try:
        tree = replaced(source, bug.where, bug.old, bug.new)
    except PatternError as error:
        raise PlantingError(f"{bug.name!r} no longer fits {bug.module}: {error}; write it anew") from error
    if ast.dump(tree) == _dump_of(source):
        raise PlantingError(f"{bug.name!r} changes nothing")
    return tree


@lru_cache(maxsize=256)
def _dump_of(source: str) -> str:
    return ast.dump(ast.parse(source))


def source_of(module: str) -> str:
    """A module's text, without importing it.

    Raises:
        PlantingError: there is no such module.
    """
    spec = importlib.util.find_spec(module.rpartition(".")[0])
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    found = PathFinder.find_spec(module, places)
    if found is None or found.origin is None:
        raise PlantingError(f"there is no module {module}")
    return Path(found.origin).read_text(encoding="utf-8")


def change_on_import(module: str, change: Change) -> None:
    """When ``module`` is imported, its source is what ``change`` makes of it.

    Raises:
        PlantingError: it is imported already.
    """
    if module in sys.modules:
        raise PlantingError(f"{module} is imported already: plant before importing anything that needs it")
    sys.meta_path.insert(0, _Finder(module, change))


class _Finder(MetaPathFinder):
    def __init__(self, module: str, change: Change) -> None:
        self._module = module
        self._change = change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The changed module; None for all others."""
        if name != self._module:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin, self._change)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, change: Change) -> None:
        super().__init__(name, path)
        self._change = change

    def get_code(self, fullname: str) -> CodeType:
        """Compiled anew: what lies in ``__pycache__`` is the sound one."""
        source = Path(self.path).read_text(encoding="utf-8")
        return compile(self._change(source), self.path, "exec", dont_inherit=True)
