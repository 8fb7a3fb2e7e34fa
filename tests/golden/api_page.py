"""The site's page of the public API, from its signatures and docstrings. Modules are parsed, not imported, so the
libraries of the integrations are not needed.

Docstrings are in Google style: a summary, paragraphs, lists, ``Example::``, and the sections of ``SECTIONS``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SECTIONS = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises"}
HEAD = """\
# Python API

Everything a training script can import, with all arguments.
[scripts.md](scripts.md) shows how to use it, one question at a time.
"""


class Entry(NamedTuple):
    """A public name, where it is defined, and which of its members users call."""

    name: str
    module: str
    members: tuple[str, ...] = ()


PUBLIC = (
    Entry(
        "p2pdiloco.DiLoCo",
        "diloco",
        (
            *("start", "close", "is_complete", "global_step", "total_steps"),
            *("count", "report", "load_global", "global_parameters", "wait", "progress"),
        ),
    ),
    Entry(
        "p2pdiloco.DiLoCo",
        "training/swarm_view",
        ("peers", "swarm", "sampler", "stream", "share", "shard", "record_batch"),
    ),
    Entry("p2pdiloco.DiLoCoError", "training/script_arguments"),
    Entry("p2pdiloco.integrations.transformers.DiLoCoCallback", "integrations/transformers", ("outer",)),
    Entry("p2pdiloco.integrations.lightning.DiLoCoCallback", "integrations/lightning", ("outer",)),
    Entry("p2pdiloco.integrations.lr_schedules.follow", "integrations/lr_schedules"),
    Entry("p2pdiloco.integrations.lr_schedules.Schedules", "integrations/lr_schedules", ("follow",)),
    Entry("p2pdiloco.integrations.datasets.load_texts", "integrations/datasets"),
    Entry("p2pdiloco.load_model", "training/export"),
    Entry("p2pdiloco.load_into", "training/export"),
    Entry("p2pdiloco.training.export.ExportError", "training/export"),
)
INHERITED = {"training/swarm_view": "SwarmView"}
"""Classes whose members a public class inherits."""

Definition = ast.ClassDef | ast.FunctionDef


def page() -> str:
    """The whole page."""
    text = HEAD
    for entry in PUBLIC:
        node = definition(entry)
        if entry.module not in INHERITED:
            text += f"\n## `{entry.name}`\n\n" + _described(entry.name, node)
        owner = entry.name.rpartition(".")[2]
        for member in entry.members:
            text += f"\n### `{owner}.{member}`\n\n" + _member(node, member)
    return text


def definition(entry: Entry) -> Definition:
    """The class or function of an entry."""
    tree = ast.parse((ROOT / "p2pdiloco" / f"{entry.module}.py").read_text(encoding="utf-8"))
    name = INHERITED.get(entry.module, entry.name.rpartition(".")[2])
    (found,) = [node for node in tree.body if isinstance(node, Definition) and node.name == name]
    return found


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Public functions, methods and constructors, by the names that the page gives them."""
    for entry in PUBLIC:
        node = definition(entry)
        if isinstance(node, ast.FunctionDef):
            yield entry.name, node
        else:
            wanted = entry.members if entry.module in INHERITED else (*entry.members, "__init__")
            yield from ((f"{entry.name}.{one.name}", one) for one in _methods(node) if one.name in wanted)


def parameters(function: ast.FunctionDef) -> dict[str, str]:
    """Names of a function's parameters, each as it is written, with type and default."""
    arguments = function.args
    plain = [one for one in (*arguments.posonlyargs, *arguments.args) if one.arg != "self"]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    found = {one.arg: _parameter(one, default) for one, default in zip(plain, defaults, strict=True)}
    if arguments.vararg:
        found[arguments.vararg.arg] = f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        found["*"] = "*"
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[one.arg] = _parameter(one, default)
    if arguments.kwarg:
        found[arguments.kwarg.arg] = f"**{ast.unparse(arguments.kwarg)}"
    return found


def sections(docstring: str) -> dict[str, str]:
    """The text of a docstring by its sections; that before the first one has the name ""."""
    found, name = {"": ""}, ""
    for line in cleandoc(docstring).splitlines():
        if (title := line.removesuffix(":")) in SECTIONS and line.endswith(":"):
            name = title
            found[name] = ""
        else:
            found[name] += f"{line}\n"
    return {name: dedent(text).strip("\n") for name, text in found.items()}


def items(text: str) -> dict[str, str]:
    """A section's entries: "name: text", which goes on in lines that are indented."""
    entries = re.findall(r"^(\w+): (.*(?:\n +.*)*)", text, re.MULTILINE)
    return {name: " ".join(said.split()) for name, said in entries}


# -- Markdown ----------------------------------------------------------------------------------------------------------


def _described(name: str, node: Definition) -> str:
    """A signature, what it is for, and its arguments."""
    if isinstance(node, ast.FunctionDef):
        return _signature(name, node) + _text(ast.get_docstring(node) or "")
    made = next((one for one in _methods(node) if one.name == "__init__"), None)
    if made is None:
        return _text(ast.get_docstring(node) or "")
    return _signature(name, made) + _text(ast.get_docstring(node) or "") + "\n" + _text(ast.get_docstring(made) or "")


def _member(owner: Definition, name: str) -> str:
    assert isinstance(owner, ast.ClassDef)
    method = next((one for one in _methods(owner) if one.name == name), None)
    if method is None:
        return _attribute(owner, name)
    decorators = [ast.unparse(one) for one in method.decorator_list]
    if "property" in decorators:
        assert method.returns is not None
        return f"Property, `{ast.unparse(method.returns)}`.\n\n" + _text(ast.get_docstring(method) or "")
    returns = "contextlib.contextmanager" not in decorators
    return _signature(name, method, returns=returns) + _text(ast.get_docstring(method) or "")


def _attribute(owner: ast.ClassDef, name: str) -> str:
    """An attribute that the constructor annotates and describes."""
    (made,) = [one for one in _methods(owner) if one.name == "__init__"]
    for line, after in zip(made.body, made.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == f"self.{name}":
            assert isinstance(after, ast.Expr)
            return f"Attribute, `{ast.unparse(line.annotation)}`.\n\n" + _text(ast.literal_eval(after.value))
    raise AssertionError(name)


def _signature(name: str, function: ast.FunctionDef, *, returns: bool = True) -> str:
    written = list(parameters(function).values())
    result = ""
    if returns and function.returns is not None and ast.unparse(function.returns) != "None":
        result = f" -> {ast.unparse(function.returns)}"
    line = f"{name}({', '.join(written)}){result}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {one},\n" for one in written) + f"){result}"
    return f"```python\n{line}\n```\n\n"


def _text(docstring: str) -> str:
    found = sections(docstring)
    before = found.pop("")
    text = _paragraphs(before) if before else ""
    for name, body in found.items():
        text += f"\n**{SECTIONS[name]}**\n\n" if text else f"**{SECTIONS[name]}**\n\n"
        named = items(body)
        text += "".join(f"- `{one}`: {_inline(said)}\n" for one, said in named.items()) if named else _paragraphs(body)
    return text


def _paragraphs(text: str) -> str:
    """One sentence a line; lists and examples as they are."""
    blocks, found = text.split("\n\n"), []
    for index, block in enumerate(blocks):
        if block.startswith("    "):
            found.append(f"```python\n{dedent(block)}\n```\n")
        elif block.startswith("- "):
            entries = re.split(r"\n(?=- )", block)
            found.append("".join(f"{_inline(' '.join(one.split()))}\n" for one in entries))
        elif not (block == "Example::" and blocks[index + 1].startswith("    ")):
            lines = re.split(r"(?<=[.!?]) (?=[A-Z`])", " ".join(block.split()))
            found.append("".join(f"{_inline(line)}\n" for line in lines))
    return "\n".join(found)


def _inline(text: str) -> str:
    return text.replace("``", "`")


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [one for one in node.body if isinstance(one, ast.FunctionDef)]


def _parameter(one: ast.arg, default: ast.expr | None) -> str:
    written = ast.unparse(one)
    return written if default is None else f"{written} = {ast.unparse(default)}"
