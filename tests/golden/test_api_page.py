"""Signatures and docstrings say all that the page of the public API needs."""

from __future__ import annotations

import ast
import re

import pytest
from api_page import PUBLIC, functions, items, page, parameters, sections

import p2pdiloco


@pytest.mark.parametrize(("name", "function"), list(functions()), ids=lambda one: one if isinstance(one, str) else "")
def test_every_argument_is_described_in_order(name: str, function: ast.FunctionDef) -> None:
    described = items(sections(ast.get_docstring(function) or "").get("Args", ""))
    assert list(described) == [one for one in parameters(function) if one != "*"]
    assert all(text.endswith(".") for text in described.values())


def test_everything_public_is_on_the_page() -> None:
    assert {f"p2pdiloco.{name}" for name in p2pdiloco.__all__} <= {entry.name for entry in PUBLIC}
    shown = {member for entry in PUBLIC for member in entry.members if entry.name == "p2pdiloco.DiLoCo"}
    assert {name for name in dir(p2pdiloco.DiLoCo) if not name.startswith("_")} == shown


def test_no_mark_of_a_docstring_is_left_on_the_page() -> None:
    text = re.sub(r"^```.*?^```", "", page(), flags=re.MULTILINE | re.DOTALL)
    assert "``" not in text
    assert "::" not in text
