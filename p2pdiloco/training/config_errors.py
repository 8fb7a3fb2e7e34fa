"""Error messages for configurations: name the key as written, its value, and the allowed values.

msgspec's own messages use Python's type names, which the author of a configuration need not know.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import msgspec
from msgspec import inspect

_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "object": "a table",
    "array": "a list",
}
_BOUNDS = {
    ">=": "of at least",
    "<=": "of at most",
    ">": "above",
    "<": "below",
    "of length <=": "with a length of at most",
}
_FORMS = {r"^(?!\\.{1,2}\\Z)[A-Za-z0-9._-]+\\Z": "letters, digits, dots, dashes and underscores, and not . or .."}


def in_words(error: msgspec.ValidationError, written: object, form: type) -> str:
    """Return a sentence for ``error``, which msgspec raised when it converted ``written`` (nested tables) to
    ``form``."""
    text = str(error)
    at = _AT.search(text)
    key = at.group(1) if at else ""
    said = text[: at.start()] if at else text
    if (found := re.fullmatch(r"Object contains unknown field `(.*)`", said)) is not None:
        known = [field.encode_name for field in getattr(_type_at(form, key), "fields", ())]
        near = difflib.get_close_matches(found[1], known, n=1)
        where = f"{key}." if key else ""
        hint = f"did you mean {where}{near[0]}?" if near else f"there are {', '.join(known)}"
        return f"there is no key {where}{found[1]}: {hint}"
    if (found := re.fullmatch(r"Object missing required field `(.*)`", said)) is not None:
        return f'the key {f"{key}." if key else ""}{found[1]} is missing: add it, such as {found[1]} = "story"'
    if (found := re.fullmatch(r"Invalid enum value .*", said)) is not None:
        return f"{key} = {_value(written, key)}: choose one of {', '.join(_choices(form, key))}"
    return f"{key} = {_value(written, key)}: {_wanted(said)}" if key else said


def _wanted(said: str) -> str:
    """Translate messages such as ``Expected `int` >= 1``."""
    found = re.fullmatch(r"Expected `([^`]+)`(?:, got `\S+`)?(.*)", said)
    if found is None:
        return said
    kinds = " or ".join(_KINDS.get(kind, kind) for kind in found[1].split(" | ") if kind != "null")
    rest = found[2].strip()
    if (form := re.fullmatch(r"matching regex '(.*)'", rest)) is not None:
        return f"write {kinds} of {_FORMS.get(form[1], form[1])}"
    sign, _, bound = rest.rpartition(" ")
    return f"write {kinds} {_BOUNDS.get(sign, sign)} {bound}".rstrip()


def _value(written: object, key: str) -> str:
    found = written
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return repr(found)[:80]


def _type_at(form: type, key: str) -> Any:
    found: Any = inspect.type_info(form)
    for name in key.split(".") if key else []:
        found = next((_struct(field.type) for field in found.fields if field.encode_name == name), None)
        if found is None:
            return None
    return found


def _struct(found: Any) -> Any:
    """Return the member of a union that has fields or choices; any other type unchanged."""
    if isinstance(found, inspect.UnionType):
        return next((one for one in found.types if hasattr(one, "fields") or hasattr(one, "values")), found)
    return found


def _choices(form: type, key: str) -> list[str]:
    found = _type_at(form, key)
    return [str(one) for one in getattr(found, "values", ())] or [one.value for one in getattr(found, "cls", ())]
