"""Mutants of a module: each a single small change of its syntax tree, named so that it is found again when lines move.

What is not mutated: annotations and type aliases, docstrings and other texts, what is said in logs and notes, messages
of errors, assertions. A change there is no bug that a test should find.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

TEXT_MOST = 110
"""Characters of either side of a change as it is told."""

LIMITS_FROM = 8

FLIPS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SPOKEN = {"note", "debug", "info", "warning", "error", "failure", "write", "fault", "trouble"}
"""Calls whose arguments are for people."""


class Mutant(NamedTuple):
    """``number`` counts the mutants of the module in the order of its tree."""

    module: str
    number: int
    lines: range
    """Where it is reached."""
    place: str
    """The function or class."""
    change: str
    """One line: what it was, what it is."""
    id: str
    """The same as long as the place's text stays, wherever it moves in the module."""


def mutants_of(module: str, source: str) -> list[Mutant]:
    """All mutants of a module."""
    found: list[Mutant] = []
    times: Counter[str] = Counter()
    for number, (place, lines, change, _) in enumerate(_walk(ast.parse(source))):
        name = f"{module}:{place}: {change}"
        times[name] += 1
        found.append(
            Mutant(module, number, lines, place, change, name if times[name] == 1 else f"{name} #{times[name]}")
        )
    return found


def mutated(source: str, number: int) -> ast.Module:
    """The module's tree with one change.

    Raises:
        IndexError: it has no such mutant.
    """
    for at, (_, _, _, tree) in enumerate(_walk(ast.parse(source), number)):
        if at == number:
            assert tree is not None
            return ast.fix_missing_locations(tree)
    raise IndexError(number)


Found = tuple[str, range, str, ast.Module | None]


def _walk(tree: ast.Module, wanted: int | None = None) -> Iterator[Found]:
    """Place, lines, change; of the wanted mutant its tree, too."""
    number = -1
    for parent, field, index, place in _sites(tree):
        children = getattr(parent, field)
        old = children if index is None else children[index]
        for new in _changes(old, parent, field):
            number += 1
            made = None
            if number == wanted:
                _put(parent, field, index, ast.copy_location(new, old))
                made = copy.deepcopy(tree)
                _put(parent, field, index, old)
            yield place, _lines(old), f"{_text(old)}  ->  {_text(new)}", made


def _lines(node: ast.AST) -> range:
    """Of a function those of its body: the others run when it is defined."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        first = node.body[-1] if len(node.body) == 1 else node.body[1]
        return range(first.lineno, first.lineno + 1)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)  # type: ignore[attr-defined]


def _put(parent: ast.AST, field: str, index: int | None, new: ast.AST) -> None:
    if index is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Pass):
        return "(dropped)"
    whole = node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"def {node.name}: " + ("(empty)" if isinstance(node.body[-1], ast.Pass) else "...")
    text = " ".join(ast.unparse(whole).split())
    return text if len(text) <= TEXT_MOST else text[: TEXT_MOST - 3] + "..."


Site = tuple[ast.AST, str, int | None, str]


def _sites(tree: ast.Module) -> Iterator[Site]:
    """Every node that may be changed: where it hangs, and in which function."""
    yield from _below(tree, "")


def _below(node: ast.AST, place: str) -> Iterator[Site]:
    for field, value in ast.iter_fields(node):
        if _is_text(node, field):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_spared(child, index, node):
                continue
            inner = place
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{place}.{child.name}" if place else child.name
            if hasattr(child, "lineno"):
                yield node, field, index, place or "module"
            yield from _below(child, inner)


def _is_text(node: ast.AST, field: str) -> bool:
    """What stands there is for type checkers or for people."""
    if field in ("annotation", "returns", "decorator_list", "bases", "type_comment", "keywords") and not isinstance(
        node, ast.Call
    ):
        return True
    if isinstance(node, ast.Raise | ast.Assert):
        return True
    if isinstance(node, ast.Call):
        return _name(node.func) in SPOKEN or (field != "args" and isinstance(node.func, ast.Name) and field == "func")
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _is_spared(child: ast.AST, index: int | None, parent: ast.AST) -> bool:
    if isinstance(child, ast.Import | ast.ImportFrom | ast.Assert | ast.JoinedStr | ast.expr_context):
        return True
    if isinstance(child, ast.Assign) and isinstance(parent, ast.Module | ast.ClassDef):
        names = [target.id for target in child.targets if isinstance(target, ast.Name)]
        value = child.value
        is_alias = isinstance(value, ast.BinOp | ast.Subscript) and bool(names) and names[0][:1].isupper()
        if names and (names[0].startswith("__") or (is_alias and not names[0].isupper())):
            return True
    return isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)  # a docstring


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


# -- the changes -------------------------------------------------------------------------------------------------------


def _changes(node: ast.AST, parent: ast.AST, field: str) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[op], left=left, comparators=comparators):
            for flipped in FLIPS[type(op)]:
                yield ast.Compare(left=left, ops=[flipped()], comparators=comparators)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(op=ast.Or() if isinstance(op, ast.And) else ast.And(), values=values)
            for index in range(len(values)):
                rest = [*values[:index], *values[index + 1 :]]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op=op, values=rest)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC and not _is_union(node):
            yield ast.BinOp(left=left, op=ARITHMETIC[type(op)](), right=right)
        case ast.Constant(value=value) if not isinstance(parent, ast.keyword) or value is not None:
            yield from _constants(value)
        case ast.Call():
            yield from _calls(node)
        case ast.stmt():
            yield from _statements(node, parent)
    if field == "test" and isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
        yield ast.UnaryOp(op=ast.Not(), operand=node)
    if field in ("test", "ifs"):  # a decision that is always the same; `while True` would only hang
        yield from (ast.Constant(value) for value in ([False] if isinstance(parent, ast.While) else [False, True]))


def _is_union(node: ast.BinOp) -> bool:
    """Of types, in isinstance."""
    last = node.right.attr if isinstance(node.right, ast.Attribute) else getattr(node.right, "id", "")
    return isinstance(node.op, ast.BitOr) and last[:1].isupper()


def _constants(value: object) -> Iterator[ast.AST]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
        if 1 < value <= LIMITS_FROM:  # of a limit, one more tells as much as one less
            yield ast.Constant(value - 1)
    elif isinstance(value, float):
        yield ast.Constant(value * 2 if value else 1.0)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    if isinstance(node.func, ast.Name) and node.func.id in TWINS:
        yield ast.Call(func=ast.Name(TWINS[node.func.id], ast.Load()), args=node.args, keywords=node.keywords)
    plain = [not isinstance(a, ast.Starred) for a in node.args[:2]]
    is_same = len(plain) == 2 and ast.unparse(node.args[0]) == ast.unparse(node.args[1])
    if plain == [True, True] and not is_same and _name(node.func) not in {"isinstance", *TWINS, *SPOKEN}:
        swapped = [node.args[1], node.args[0], *node.args[2:]]
        yield ast.Call(func=node.func, args=swapped, keywords=node.keywords)


def _statements(node: ast.stmt, parent: ast.AST) -> Iterator[ast.AST]:
    if isinstance(parent, ast.Module | ast.ClassDef) and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    match node:
        case ast.Expr(value=ast.Call(func=function)) if _name(function) not in SPOKEN:
            yield ast.Pass()
        case ast.Expr(value=ast.Await()) | ast.Delete() | ast.Continue() | ast.Break() | ast.Raise():
            yield ast.Pass()
        case ast.AugAssign(op=ast.Add() | ast.Sub() as op):
            other = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
            yield ast.AugAssign(target=node.target, op=other, value=node.value)
            yield ast.Pass()
        case ast.AugAssign():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Return(value=None):
            yield ast.Pass()
        case ast.Return(value=ast.Constant()):
            pass  # constants are changed for themselves
        case ast.Return():
            yield ast.Return(value=ast.Constant(None))
        case ast.FunctionDef() | ast.AsyncFunctionDef() if _does(node) and not _gives(node) and node.name != "__init__":
            empty = copy.copy(node)
            empty.body = [*node.body[: ast.get_docstring(node, clean=False) is not None], ast.Pass()]
            if ast.dump(empty) != ast.dump(node) and len(empty.body) <= len(node.body):
                yield empty


def _does(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Anything at all: a protocol's methods have no body."""
    last = node.body[-1]
    return not isinstance(last, ast.Pass) and not (isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant))


def _gives(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it returns or yields anything: an empty body would then be another's mutant, or no bug at all."""
    inner = [child for child in ast.walk(node) if isinstance(child, ast.Return | ast.Yield | ast.YieldFrom)]
    return any(child.value is not None for child in inner)
