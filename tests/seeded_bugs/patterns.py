"""Find and replace in a module's syntax tree, so that a seeded bug survives new formatting, comments and local names.

A pattern is Python code, an expression or statements, which must stand once in the function or class that ``where``
names (all of the module if it is empty):

- Names of the function's own variables stand for any variable: ``if found is None: return`` matches
  ``if result is None: return``. What the module defines or imports, attributes, methods and keywords must be the same.
- ``...`` as a statement stands for any statements, also none; in the replacement the first ``...`` is what the first
  one stood for, and so on.
- ``Queue.put(self, item)`` as ``where`` gives names to the function's parameters, for a replacement that needs one
  which the pattern does not hold.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

Binding = dict[str, str]
"""Variables of a pattern -> those of the module."""
Statements = list[ast.stmt]

IGNORED = {"ctx", "type_comment", "kind", "type_params"}
NAMES: dict[type[ast.AST], str] = {ast.Name: "id", ast.arg: "arg", ast.ExceptHandler: "name", ast.MatchAs: "name"}
"""Nodes that hold a variable's name, and in which field."""


class PatternError(Exception):
    """The pattern does not match exactly once; the message says why."""


class Match(NamedTuple):
    """A place in the tree: ``parent.field``, or its elements [start, stop) if it is a list of statements."""

    parent: ast.AST
    field: str
    start: int | None
    stop: int | None
    binding: Binding
    rest: list[Statements]
    """What each ``...`` stood for."""


def replaced(source: str, where: str, old: str, new: str) -> ast.Module:
    """The tree of ``source`` in which ``new`` stands for ``old``.

    Raises:
        PatternError: ``old`` does not stand there exactly once, or ``new`` needs a variable that is not there.
    """
    tree = ast.parse(source)
    shared = _shared_names(source)
    found = matches(tree, shared, where, old, new)
    if len(found) != 1:
        raise PatternError(f"{old!r} stands {len(found)} times in {where or 'the module'}")
    match = found[0]
    is_statement = match.start is not None
    made = _parsed(new) if is_statement else ast.parse(new, mode="eval").body
    variables = _Substitution(match, shared | _local_names(tree, where) | _bound_names(made))
    if isinstance(made, list):
        getattr(match.parent, match.field)[match.start : match.stop] = variables.in_statements(made)
    else:
        index = match.stop
        if index is None:
            setattr(match.parent, match.field, variables.visit(made))
        else:
            getattr(match.parent, match.field)[index] = variables.visit(made)
    return ast.fix_missing_locations(tree)


def matches(tree: ast.Module, shared: frozenset[str], where: str, old: str, new: str) -> list[Match]:
    """All places where ``old`` stands. It is an expression only if ``new`` is one, too.

    ``shared``: names of the module.
    """
    path, _, parameters = where.partition("(")
    found: list[Match] = []
    for scope in _scopes(tree, path):
        if isinstance(scope, ast.ClassDef):
            shared |= {one.id for one in _without_functions(scope) if isinstance(one, ast.Name)}
        binding: Binding = {}
        if parameters:
            given = [name.strip() for name in parameters.rstrip(")").split(",")]
            assert isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
            real = [one.arg for one in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)]
            if len(given) > len(real):
                raise PatternError(f"{path} has the parameters {', '.join(real)}")
            binding = dict(zip(given, real, strict=False))
        if _is_expression(old) and _is_expression(new):
            found += _expressions(scope, ast.parse(old, mode="eval").body, shared, binding)
        else:
            found += _windows(scope, _parsed(old), shared, binding)
    return found


# -- Places ------------------------------------------------------------------------------------------------------------


def _scopes(tree: ast.Module, path: str) -> list[ast.AST]:
    scopes: list[ast.AST] = [tree]
    for name in path.split(".") if path else ():
        scopes = [
            child
            for scope in scopes
            for child in _definitions(scope)
            if child.name == name  # a property and its setter are two of one name
        ]
    if not scopes:
        raise PatternError(f"there is no {path}")
    return scopes


def _definitions(scope: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Directly in ``scope``, also below ``if`` and the like."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        elif not isinstance(child, ast.expr):
            yield from _definitions(child)


def _expressions(scope: ast.AST, pattern: ast.expr, shared: frozenset[str], given: Binding) -> list[Match]:
    found = []
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            children = value if isinstance(value, list) else [value]
            for index, child in enumerate(children):
                if not isinstance(child, ast.expr):
                    continue
                state = _State(shared, dict(given), [])
                if state.matches(pattern, child):
                    at = index if isinstance(value, list) else None
                    found.append(Match(parent, field, None, at, state.binding, state.rest))
    return found


def _windows(scope: ast.AST, pattern: Statements, shared: frozenset[str], given: Binding) -> list[Match]:
    found = []
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            if not isinstance(value, list) or not value or not isinstance(value[0], ast.stmt):
                continue
            for start in range(len(value)):
                state = _State(shared, dict(given), [])
                stop = state.match_from(pattern, value, start)
                if stop is not None:
                    found.append(Match(parent, field, start, stop, state.binding, state.rest))
    return found


class _State:
    """One attempt to match."""

    def __init__(self, shared: frozenset[str], binding: Binding, rest: list[Statements]) -> None:
        self._shared = shared
        self.binding = binding
        self.rest = rest

    def matches(self, pattern: Any, node: Any) -> bool:
        """Whether ``node`` is what ``pattern`` describes."""
        if isinstance(pattern, ast.AST):
            return type(pattern) is type(node) and all(
                self._match_field(pattern, field, getattr(pattern, field, None), getattr(node, field, None))
                for field in pattern._fields
                if field not in IGNORED
            )
        if isinstance(pattern, list):
            if pattern and isinstance(pattern[0], ast.stmt):
                return self.match_from(pattern, _without_docstring(node), 0) == len(_without_docstring(node))
            return len(pattern) == len(node) and all(map(self.matches, pattern, node))
        return bool(pattern == node)

    def match_from(self, pattern: Statements, body: Statements, start: int) -> int | None:
        """The end of the statements from ``start`` on that match; None if they do not."""
        if not pattern:
            return start
        if not _is_gap(pattern[0]):
            if start < len(body) and self.matches(pattern[0], body[start]):
                return self.match_from(pattern[1:], body, start + 1)
            return None
        if len(pattern) == 1:
            self.rest.append(body[start:])
            return len(body)
        for end in range(start, len(body) + 1):
            kept = dict(self.binding), len(self.rest)
            self.rest.append(body[start:end])
            stop = self.match_from(pattern[1:], body, end)
            if stop is not None:
                return stop
            self.binding = kept[0]
            del self.rest[kept[1] :]
        return None

    def _match_field(self, pattern: ast.AST, field: str, wanted: Any, value: Any) -> bool:
        if NAMES.get(type(pattern)) != field or wanted is None or value is None:
            return self.matches(wanted, value)
        if wanted in self._shared or value in self._shared:
            return bool(wanted == value)
        if wanted in self.binding:
            return bool(self.binding[wanted] == value)
        if value in self.binding.values():
            return False
        self.binding[wanted] = value
        return True


# -- Replacement -------------------------------------------------------------------------------------------------------


class _Substitution(ast.NodeTransformer):
    """A replacement's variables become the module's."""

    def __init__(self, match: Match, known: frozenset[str]) -> None:
        self._binding, self._rest = match.binding, list(match.rest)
        self._known = known

    def in_statements(self, made: Statements) -> Statements:
        """With what each ``...`` stands for."""
        body: Statements = []
        for statement in made:
            if _is_gap(statement):
                body += copy.deepcopy(self._rest.pop(0))
            else:
                body.append(self.visit(statement))
        return body or [ast.Pass()]

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Names, and statements in order."""
        field = NAMES.get(type(node))
        if field is not None and (name := getattr(node, field)) is not None:
            setattr(node, field, self._real(name))
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, name, self.in_statements(value))
            elif isinstance(value, list):
                setattr(node, name, [self.visit(one) if isinstance(one, ast.AST) else one for one in value])
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
        return node

    def _real(self, name: str) -> str:
        if name in self._binding:
            return self._binding[name]
        if name not in self._known:
            raise PatternError(f"the replacement needs {name}, which is not there: let the pattern hold it")
        return name


def _is_gap(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and statement.value.value is Ellipsis
    )


def _without_docstring(body: Statements) -> Statements:
    first = body[0] if body else None
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if is_text and len(body) > 1 else body


@lru_cache(maxsize=256)
def _shared_names(source: str) -> frozenset[str]:
    """What means the same in all of the module: builtins, imports, definitions and variables of the module."""
    tree = ast.parse(source)
    names = set(dir(builtins)) | {"self", "cls"}
    for node in _without_functions(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    names |= {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return frozenset(names)


def _without_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | ast.expr):
            yield from _without_functions(child)
        elif isinstance(child, ast.Tuple):
            yield from child.elts


def _local_names(tree: ast.Module, where: str) -> set[str]:
    """Variables of the function that ``where`` names."""
    return set().union(*(_names(scope) for scope in _scopes(tree, where.partition("(")[0])))


def _bound_names(made: Statements | ast.expr) -> set[str]:
    """Variables that the replacement itself sets."""
    nodes = [node for one in (made if isinstance(made, list) else [made]) for node in ast.walk(one)]
    return {
        str(getattr(node, NAMES[type(node)]))
        for node in nodes
        if type(node) in NAMES and not isinstance(getattr(node, "ctx", None), ast.Load)
    }


def _names(scope: ast.AST) -> set[str]:
    return {str(getattr(node, NAMES[type(node)])) for node in ast.walk(scope) if type(node) in NAMES}


def _is_expression(code: str) -> bool:
    try:
        ast.parse(code, mode="eval")
    except SyntaxError:
        return False
    return code.strip() != "..."


def _parsed(code: str) -> Statements:
    try:
        return ast.parse(code).body
    except SyntaxError as error:
        raise PatternError(f"{code!r} is no Python: {error}") from error
